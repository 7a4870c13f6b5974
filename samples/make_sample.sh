#!/usr/bin/env bash
# How smollm2-docs.safetensors was made: the first 40 tokens of the prose in prompts.py.
set -euo pipefail
cd "$(dirname "$0")"
python -c 'import prompts; print(prompts.docs(), end="")' |
  kvz capture "$(python -c 'import models; print(models.smollm2())')" --prompt-file - \
    --max-tokens 40 --queries 4 -o smollm2-docs.safetensors "$@"

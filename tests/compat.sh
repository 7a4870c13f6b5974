#!/bin/sh
# Runs the capture and restore tests on older releases of transformers.
#
#   tests/compat.sh FOLDER [VERSION...]
#
# Makes a virtual environment for each VERSION under FOLDER (kept for the next run) and prints one
# line of pytest's summary for each. PYTHON names the interpreter, python3 by default.
set -eu

folder=${1:?usage: tests/compat.sh FOLDER [VERSION...]}
shift
[ $# -gt 0 ] || set -- 4.56.2 5.0.0
root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
status=0

for version in "$@"; do
    environment=$folder/transformers-$version
    if ! [ -e "$environment/installed" ]; then
        "${PYTHON:-python3}" -m venv "$environment"
        # torch by itself first: an index with CPU wheels is then not passed over
        "$environment/bin/pip" install --quiet "torch${TORCH:-}"
        "$environment/bin/pip" install --quiet "transformers==$version" accelerate gguf \
            click hypothesis numba numpy pytest pytest-timeout rich safetensors zstandard
        touch "$environment/installed"
    fi
    printf 'transformers %s: ' "$version"
    cd "$root"
    PYTHONPATH=$root OMP_NUM_THREADS=1 "$environment/bin/python" -m pytest -q -p no:cacheprovider \
        -m "not model and not cuda" tests/test_capture_restore.py tests/test_identity.py \
        tests/test_capture_metadata.py tests/test_pair_norms.py tests/test_layers.py tests/test_capture_cache.py \
        tests/test_zoo.py tests/test_refusals.py >"$folder/$version.log" 2>&1 || status=1
    tail -n 1 "$folder/$version.log"
done
exit $status

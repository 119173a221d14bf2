#!/usr/bin/env bash
# Test the wheel with the lowest and the newest dependencies that pyproject.toml allows, on the oldest and
# a new Python, in temporary environments: scripts/versions.sh [PYTEST ARGUMENTS]
#   PYTHONS='3.11 3.14'                    which Pythons: versions that uv finds or fetches, or paths
#   RESOLUTIONS='lowest-direct highest'    which versions
#   UV_TORCH_BACKEND=cpu                   the CPU wheels of PyTorch (PyPI's bring CUDA: 6 GB each)
# Needs uv. The tests run without the real tokenizers, Ray, datasets and the guides.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/_venv.sh

command -v uv >/dev/null || fail "uv is not installed" "pip install uv"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset PYTHONPATH
mkdir "$work/tree"
git archive HEAD | tar -x -C "$work/tree" # without what earlier builds left behind
run uv build --quiet --wheel --out-dir "$work/dist" "$work/tree"

with=(hypothesis matplotlib pyarrow pytest pytest-xdist scipy zstandard httpx msgspec prometheus-client starlette uvicorn)
tests=(-q -m 'not real' -p no:cacheprovider)
# What PyTorch says of Python 3.13.0, and old versions of tokenizers of what Transformers calls
tests+=(-W 'ignore:Guards may run slower on Python 3.13.0:RuntimeWarning' -W 'ignore:Deprecated in 0.9.0:DeprecationWarning')
for left_out in benchmark docs hf_trainer layout ray site wheel; do
  tests+=(--ignore-glob "*/test_$left_out.py") # in whichever folder it is
done
failed=()
for python in ${PYTHONS:-3.11 3.14}; do
  for resolution in ${RESOLUTIONS:-lowest-direct highest}; do
    env="$work/env"
    run uv venv --quiet --python "$python" "$env"
    export VIRTUAL_ENV="$env"
    run uv pip install --quiet --only-binary :all: --resolution "$resolution" -r pyproject.toml
    # The test's own libraries are the newest that leave these as they are.
    uv pip freeze --quiet >"$work/installed"
    run uv pip install --quiet --constraint "$work/installed" "${with[@]}"
    run uv pip install --quiet --no-deps "$work"/dist/*.whl
    # pytest itself, not python -m pytest, which would import the tree instead of the wheel
    run "$env/bin/pytest" "${tests[@]}" "$@" || failed+=("Python $python, $resolution")
    rm -rf "$env"
  done
done
[[ ${#failed[@]} == 0 ]] || fail "tests failed: ${failed[*]}" "raise the bound in pyproject.toml, or fix the code"

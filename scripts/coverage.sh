#!/usr/bin/env bash
# Measure which lines the tests run, including Numba kernels and commands in processes of their own;
# fail below 95 %. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

data=$(mktemp -d)
trap 'rm -rf "$data"' EXIT
export COVERAGE_FILE="$data/coverage" COVERAGE_RCFILE="$PWD/pyproject.toml"

# First the kernels as plain Python, which coverage can trace, with the tests about them: on whole
# vocabularies they would take hours. A hash that overflows warns only in plain Python.
NUMBA_DISABLE_JIT=1 python -m coverage run -m pytest -q -m 'not real' \
  -W 'ignore:overflow encountered in scalar:RuntimeWarning' \
  tests/alignment/test_aligner.py tests/building/counting/test_{counts,pair_text,smoothing}.py \
  tests/building/embeddings/test_generate.py tests/inspection/test_evaluate.py ||
  echo "some tests failed; the lines that they ran count" >&2
# Then everything else, compiled.
python -m coverage run -m pytest -q "$@" ||
  echo "some tests failed; the lines that they ran count" >&2
python -m coverage combine --quiet
python -m coverage report --fail-under=95

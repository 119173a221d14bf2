#!/usr/bin/env bash
# Install xtok and its test dependencies into .venv, fetch the real tokenizers, run every check.
# Arguments go to pytest: scripts/test.sh -k tiktoken
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/_venv.sh

use_venv dev
run python scripts/fetch_tokenizers.py ||
  echo "Some real tokenizers are not available: tests marked 'real' that need them are skipped."
run python -m ruff check
run python -m ruff format --check
run python -m mypy
run python scripts/prose.py
run python -m pytest "$@"

#!/usr/bin/env bash
# Build the documentation site into site/, or serve it while you write: scripts/docs.sh build|serve
# A dead link, or a page that mkdocs.yml does not name, fails the build. Arguments go to mkdocs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/_venv.sh

if [[ ${1:-} != build && ${1:-} != serve ]]; then
  fail "give build or serve" "scripts/docs.sh serve"
fi
use_venv docs
export NO_MKDOCS_2_WARNING=1 # a banner about versions to come
run python -m mkdocs "$1" --strict "${@:2}"

#!/usr/bin/env bash
# Cut a release of the last commit: run every check, build the sdist and the wheel into dist/, test these
# two files, and print what is left to do. Nothing is tagged or uploaded. Arguments go to the tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/_venv.sh

version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' xtok/__init__.py)
[[ -z $(git status --porcelain) ]] ||
  fail "there are changes that no commit has" "commit them, or put them away; git status lists them"
grep -q "^## \[$version\] - [0-9]\{4\}-[0-9][0-9]-[0-9][0-9]\$" CHANGELOG.md ||
  fail "CHANGELOG.md gives no date for version $version" "write: ## [$version] - $(date +%F), and commit"
! git rev-parse --quiet --verify "refs/tags/v$version" >/dev/null ||
  fail "the tag v$version exists" "raise __version__ in xtok/__init__.py"

scripts/test.sh "$@"
use_venv dev
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/tree"
git archive HEAD | tar -x -C "$work/tree" # only what is committed
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct) # so that a commit gives the same wheel again
export SOURCE_DATE_EPOCH
run python -m build --no-isolation --outdir "$work/dist" "$work/tree"
XTOK_DIST="$work/dist" run python -m pytest -n 0 tests/test_wheel.py
mkdir -p dist
rm -f dist/xtok-*
cp "$work"/dist/* dist/

echo
(cd dist && sha256sum -- *)
cat <<END

Checked: dist/ is xtok $version, of commit $(git rev-parse --short HEAD). To publish it:
  git tag -a v$version -m 'xtok $version' && git push origin v$version
  attach both files of dist/ to the release, or: python -m twine upload dist/*
  scripts/docs.sh build    # the site, in site/
END

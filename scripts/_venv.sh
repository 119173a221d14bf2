# Sourced by quickstart.sh and test.sh in the repository's root: one virtual environment, .venv.
# shellcheck shell=bash

fail() { # fail MESSAGE HINT
  printf 'error: %s\nhint: %s\n' "$1" "$2" >&2
  exit 1
}

# Print a command as one would type it, on stderr, then run it.
run() {
  (set -x && "$@")
}

# The first Python that is new enough, or the one in the variable PYTHON.
find_python() {
  local candidate candidates=(python3 python python3.14 python3.13 python3.12 python3.11)
  if [[ -n ${PYTHON:-} ]]; then
    candidates=("$PYTHON")
  fi
  for candidate in "${candidates[@]}"; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  fail "no Python 3.11 or newer among: ${candidates[*]}" "install one, or name one: PYTHON=/path/to/python $0"
}

make_venv() {
  local python
  python=$(find_python)
  echo "making a virtual environment in .venv with $("$python" --version)"
  if ! "$python" -m venv --clear .venv >/dev/null 2>&1; then
    # Debian's Python has no ensurepip without python3-venv; its own pip works instead.
    "$python" -m venv --clear --without-pip .venv &&
      "$python" -m pip --python .venv/bin/python install -qq pip ||
      fail "$python cannot make a virtual environment" "install its venv module (on Debian and Ubuntu: apt install python3-venv)"
  fi
}

# use_venv [EXTRA]: put a .venv with xtok and the EXTRA first on PATH. A stamp file skips the installation
# while pyproject.toml, constraints.txt and the folder's name are unchanged (a moved .venv is broken). The
# extra dev has what docs has.
use_venv() {
  local extra=${1:-} stamp=.venv/xtok-installed fingerprint installed='' with=''
  .venv/bin/python -c 'import pip' 2>/dev/null || make_venv
  export PATH="$PWD/.venv/bin:$PATH"
  fingerprint=$({ pwd && cat pyproject.toml constraints.txt; } |
    python -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')
  if [[ -f $stamp ]]; then
    read -r installed with <"$stamp" || true
  fi
  if [[ $installed == "$fingerprint" && ($with == "$extra" || $with == dev || -z $extra) ]]; then
    return
  fi
  echo "installing xtok into .venv (a few minutes the first time: PyTorch is large)"
  rm -f "$stamp"
  python -m pip --disable-pip-version-check install -qq -c constraints.txt -e ".${extra:+[$extra]}" ||
    fail "pip cannot install xtok into .venv" "check the network and \`pip config list\`, then run $0 again"
  echo "$fingerprint $extra" >"$stamp"
}

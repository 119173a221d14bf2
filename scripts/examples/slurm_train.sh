#!/usr/bin/env bash
#SBATCH --job-name=xtok-train
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --output=%x_%j.log
# Train on 8 nodes with 8 GPUs each. Arguments go to hf_trainer.py:
#
#     sbatch scripts/examples/slurm_train.sh --student models/student --teacher models/teacher \
#       --map events.safetensors --dataset corpus.jsonl --output_dir runs/event-kl --bf16 \
#       --fsdp full_shard --fsdp_config scripts/examples/fsdp2.json
#
# Submit the same job again to resume from the last checkpoint. Run it in the clone.
set -euo pipefail

if [[ $# -eq 0 ]]; then
  printf 'error: the options of hf_trainer.py are missing\nhint: sbatch %s --student FOLDER ...\n' "$0" >&2
  exit 1
fi
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1} OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 8 --rdzv-id "$SLURM_JOB_ID" \
  --rdzv-backend c10d --rdzv-endpoint "$head:29500" scripts/examples/hf_trainer.py "$@"

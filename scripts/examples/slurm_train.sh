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
# Submit the job in the clone, with the environment of xtok activated. Options of sbatch come before
# the path of this script: sbatch --nodes=2 --gpus-per-node=4 --partition=NAME scripts/…. Submit the
# same job again to resume from the last checkpoint.
set -euo pipefail

fail() { # fail MESSAGE HINT
  printf 'error: %s\nhint: %s\n' "$1" "$2" >&2
  exit 1
}

# In a job, $0 is Slurm's copy of this script.
script=scripts/examples/slurm_train.sh
[[ $# -gt 0 ]] || fail "the options of hf_trainer.py are missing" "sbatch $script --student FOLDER ..."
[[ -n ${SLURM_JOB_NODELIST:-} ]] || fail "this is not a Slurm job" "sbatch $script --student FOLDER ..."
[[ -r scripts/examples/hf_trainer.py ]] ||
  fail "there is no scripts/examples/hf_trainer.py in $PWD" "submit the job in the clone of xtok"

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
# Compute nodes often have no internet. Download models on the login node, or set HF_HUB_OFFLINE=0.
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1} OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
# Since Slurm 22.05, srun does not inherit --cpus-per-task from sbatch.
srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-64}" torchrun --nnodes "$SLURM_NNODES" \
  --nproc-per-node "${SLURM_GPUS_ON_NODE:-8}" --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d \
  --rdzv-endpoint "$first:29500" scripts/examples/hf_trainer.py "$@"

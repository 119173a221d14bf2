#!/usr/bin/env bash
# Count a map on text on several Slurm nodes. Starts Ray on all of them; the first is the head and runs
# the command. Text, tokenizers and a virtual environment with the extras ray and parquet (XTOK_VENV) are
# on a shared file system.
#
#   sbatch --nodes 8 scripts/examples/slurm_count_ray.sh STUDENT TEACHER \
#     --text '/data/corpus/*.parquet' --output /data/maps/map.safetensors
#
#SBATCH --job-name=xtok-count
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --mem=64G
#SBATCH --time=12:00:00

set -euo pipefail

if [[ -n "${XTOK_VENV:-}" ]]; then
  # shellcheck disable=SC1091
  source "$XTOK_VENV/bin/activate"
fi

# Ray's steps are children of this shell, and end with it.
stop() {
  local steps
  steps=$(jobs -pr)
  if [[ -n "$steps" ]]; then
    xargs kill <<< "$steps" || true
  fi
}
trap stop EXIT

port=${RAY_PORT:-6379}
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
cores=${SLURM_CPUS_PER_TASK:-1}
export SRUN_CPUS_PER_TASK=$cores  # a step does not inherit it from the job

# `--block` keeps Ray in the foreground of its step.
srun --nodes=1 --ntasks=1 --overlap --nodelist="$head" \
  ray start --head --node-ip-address="$head" --port="$port" --num-cpus="$cores" \
  --disable-usage-stats --block &
for attempt in {1..60}; do
  if srun --nodes=1 --ntasks=1 --overlap --nodelist="$head" \
    ray status --address="$head:$port" > /dev/null 2>&1; then
    break
  fi
  if [[ "$attempt" == 60 ]]; then
    echo "error: the head of the Ray cluster on $head did not start" >&2
    exit 1
  fi
  sleep 2
done

# Each worker is a step of its own: if some nodes fail, the others do the work.
for node in "${nodes[@]:1}"; do
  srun --nodes=1 --ntasks=1 --overlap --nodelist="$node" \
    ray start --address="$head:$port" --num-cpus="$cores" --disable-usage-stats --block &
done

srun --nodes=1 --ntasks=1 --overlap --nodelist="$head" \
  xtok build --engine ray --address "$head:$port" "$@"

#!/usr/bin/env bash
#SBATCH --job-name=xtok-build
#SBATCH --cpus-per-task=2
#SBATCH --mem=2G
#SBATCH --time=00:15:00
#SBATCH --output=%x_%A_%a.log
# A Slurm array job: each task builds the map of one line, a student and a teacher, of a list.
#
#     sbatch --array=1-"$(wc -l < pairs.txt)" scripts/examples/slurm_build.sh pairs.txt maps
#
# Finished maps are kept, so the same job can be submitted again. Further arguments go to
# `xtok build`: --for p-kl.
set -euo pipefail

fail() { # fail MESSAGE HINT
  printf 'error: %s\nhint: %s\n' "$1" "$2" >&2
  exit 1
}

[[ $# -ge 2 ]] || fail "the list of pairs or the folder is missing" "sbatch --array=1-N $0 pairs.txt maps"
pairs=$1 folder=$2
shift 2
task=${SLURM_ARRAY_TASK_ID:-}
[[ $task =~ ^[1-9][0-9]*$ ]] ||
  fail "this is no task of an array that begins with 1" "sbatch --array=1-N $0 $pairs $folder"
[[ -r $pairs ]] || fail "the list of pairs $pairs cannot be read" "give the path of a text file"

read -r student teacher < <(sed -n "${task}p" -- "$pairs") || true
[[ -n ${teacher:-} ]] || fail "line $task of $pairs has no student and teacher" "give --array=1-N, N the number of lines"

# As many threads as the task has processors, and models from the cache that the login node filled.
export RAYON_NUM_THREADS=${SLURM_CPUS_PER_TASK:-2} OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-2}
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}
exec "${PYTHON:-python3}" -m xtok build "$student" "$teacher" --output "$folder/" --skip-existing "$@"

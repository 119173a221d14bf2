#!/usr/bin/env bash
#SBATCH --job-name=xtok-pairs
#SBATCH --cpus-per-task=2
#SBATCH --mem=2G
#SBATCH --time=00:15:00
#SBATCH --output=%x_%A_%a.log
# A Slurm array job: each task builds the map of one pair of a list.
#
#     sbatch --array=1-"$(grep -cvE '^[[:space:]]*(#|$)' pairs.txt)" scripts/examples/slurm_build_pairs.sh pairs.txt maps
#
# The list has a student, a teacher and, if you like, an output on each line, as `xtok build-pairs`
# reads it. Maps that are there are kept, so a job that was cut short can be sent again as it is;
# OVERWRITE=1 builds them anew. Further arguments go to `xtok build`: --top-k 8.
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

line=$(grep -vE '^[[:space:]]*(#|$)' -- "$pairs" | sed -n "${task}p" || true)
[[ -n $line ]] || fail "$pairs has no pair number $task" "count its lines for --array, without comments"

list=$(mktemp)
trap 'rm -f "$list"' EXIT
printf '%s\n' "$line" >"$list"
mkdir -p -- "$folder"
options=("$list" --output-dir "$folder")
[[ ${OVERWRITE:-0} = 1 ]] || options+=(--skip-existing)

# As many threads as the task has processors, and models from the cache that the login node filled.
export RAYON_NUM_THREADS=${SLURM_CPUS_PER_TASK:-2} OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-2}
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}
# One process, and not exec, so that the list is removed.
"${PYTHON:-python3}" -m xtok build-pairs "${options[@]}" "$@"

#!/usr/bin/env bash
#SBATCH --job-name=xtok-build
#SBATCH --cpus-per-task=2
#SBATCH --mem=2G
#SBATCH --time=00:15:00
#SBATCH --output=%x_%A_%a.log
# A Slurm array job that builds one map per line of a list. A line contains a student and a teacher.
#
#     sbatch --array=1-"$(wc -l < pairs.txt)" scripts/examples/slurm_build.sh pairs.txt maps
#
# Further arguments go to `xtok build`: --for p-kl. Finished maps are kept, so the same job can be
# submitted again. Activate the environment of xtok first, or set PYTHON to its interpreter.
set -euo pipefail

fail() { # fail MESSAGE HINT
  printf 'error: %s\nhint: %s\n' "$1" "$2" >&2
  exit 1
}

# In a job, $0 is Slurm's copy of this script.
script=scripts/examples/slurm_build.sh
[[ $# -ge 2 ]] || fail "the list of pairs or the folder is missing" "sbatch --array=1-N $script pairs.txt maps"
pairs=$1 folder=$2
shift 2
task=${SLURM_ARRAY_TASK_ID:-}
[[ $task =~ ^[1-9][0-9]*$ ]] ||
  fail "the task number of the array is '$task', expected 1 or more" "sbatch --array=1-N $script $pairs $folder"
[[ -r $pairs ]] || fail "the list of pairs $pairs cannot be read" "give the path of a text file"

read -r student teacher < <(sed -n "${task}p" -- "$pairs") || true
[[ -n ${teacher:-} ]] ||
  fail "line $task of $pairs has no student and teacher" "give --array=1-N, where N is the number of lines"

# One thread for each processor of the task.
export RAYON_NUM_THREADS=${SLURM_CPUS_PER_TASK:-2} OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-2}
# Compute nodes often have no internet. Download models on the login node, or set HF_HUB_OFFLINE=0.
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}
exec "${PYTHON:-python3}" -m xtok build "$student" "$teacher" --output "$folder/" --skip-existing "$@"

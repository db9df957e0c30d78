#!/bin/bash
# Slurm: one task for each GPU, as JAX expects there; on TPU or CPU nodes give one task for each node.
#SBATCH --job-name=posttrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

# The folder from which the job is submitted: this repository, on a file system that all nodes share.
cd "$SLURM_SUBMIT_DIR"
# Stopped by SIGTERM with a checkpoint, killed, or without one of its processes: the same job goes on.
trap 'case $? in 75 | 137 | 143) scontrol requeue "$SLURM_JOB_ID" ;; esac' EXIT
srun --kill-on-bad-exit=1 .venv/bin/posttrain run configs/sft_gsm8k.yaml output=runs/sft_gsm8k

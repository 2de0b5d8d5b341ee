#!/bin/bash
# Several nodes under Slurm: sbatch recipes/launch/slurm.sh CHECKPOINT OUT DATA.jsonl
#SBATCH --job-name=polydecode
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
set -euo pipefail
checkpoint=$1 out=$2 data=$3
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun \
  --nnodes "$SLURM_NNODES" --nproc-per-node 8 \
  --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$head_node:29500" \
  -m polydecode train "$checkpoint" "$out" --data "$data" \
  --batch-size 256 --micro-batch-size 4 --save-steps 500

#!/bin/bash
# Train on the nodes of a Slurm job: one process for each GPU, or one per node without GPUs.
#
#     sbatch examples/launch/slurm.sh examples/minimal.py
#
#SBATCH --job-name=laconic
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1 # torchrun starts a node's processes
#SBATCH --time=24:00:00

# This script runs on the job's first node, where the processes find each other.
port=$((20000 + SLURM_JOB_ID % 10000))
exec srun torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" \
    --rdzv-backend c10d --rdzv-endpoint "$SLURMD_NODENAME:$port" --rdzv-id "$SLURM_JOB_ID" "$@"

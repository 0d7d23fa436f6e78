#!/bin/bash
# Train on the nodes of a Slurm job: one process for each GPU, or one per node without GPUs.
#
#     sbatch examples/launch/slurm.sh examples/minimal.py
#
#SBATCH --job-name=laconic
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1 # torchrun starts a node's processes
#SBATCH --exclusive         # all processors of the nodes
#SBATCH --time=24:00:00

# Rank 0 is on the job's first node, which runs this script.
export MASTER_ADDR=$SLURMD_NODENAME MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export PROCESSES=${SLURM_GPUS_ON_NODE:-1}
# A failure on one node ends the job. SLURM_NODEID is known in the tasks only, hence the inner shell.
exec srun --kill-on-bad-exit=1 bash -c 'exec torchrun --nnodes "$SLURM_JOB_NUM_NODES" \
    --node-rank "$SLURM_NODEID" --nproc-per-node "$PROCESSES" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" "$@"' torchrun "$@"

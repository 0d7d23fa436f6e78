#!/bin/bash
# An elastic run under Slurm: one worker per node, started again after a failure.
#
#     sbatch examples/elastic/slurm.sh --steps 100000
#
#SBATCH --job-name=laconic
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive         # all processors of the nodes
#SBATCH --no-kill           # the job goes on when a node fails
#SBATCH --time=24:00:00

# The coordinator runs beside this script, on the job's first node.
port=$((20000 + SLURM_JOB_ID % 10000))
laconic coordinator --address "$SLURMD_NODENAME:$port" &
coordinator=$!
trap 'kill "$coordinator"' EXIT
export LACONIC_COORDINATOR=$SLURMD_NODENAME:$port

# Each task starts its worker until the run has ended.
srun --no-kill --kill-on-bad-exit=0 --wait=0 bash -c '
    for attempt in {1..100}; do
        python examples/elastic/train.py "$@" && exit
        sleep 5
    done
    exit 1
' worker --workers "$SLURM_NTASKS" --model "model-$SLURM_JOB_ID.pt" "$@"

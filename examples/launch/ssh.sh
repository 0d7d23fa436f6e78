#!/bin/bash
# Train on hosts that you reach over ssh, without a job system. The first host is rank 0's; the
# others must reach it by the name or address given here. The program and its environment are at the
# same path on every host.
#
#     PROCESSES=1 examples/launch/ssh.sh host1,host2,host3 examples/minimal.py
#
# Ctrl-C ends the program on all hosts, and so does a failure on one of them. OMP_NUM_THREADS and the
# variables of laconic are the same on all hosts.
set -euo pipefail
IFS=, read -ra hosts <<< "${1:?usage: ssh.sh HOST,HOST,... PROGRAM [ARGUMENTS]}"
shift

quoted() { printf '%q ' "$@"; }
mapfile -t variables < <(env | grep -E '^(PATH|OMP_NUM_THREADS|LACONIC_\w+)=')

running=()
trap 'trap - EXIT; kill "${running[@]}" 2> /dev/null || true; wait' EXIT
for i in "${!hosts[@]}"; do
    command=(torchrun --nnodes "${#hosts[@]}" --node-rank "$i"
        --nproc-per-node "${PROCESSES:-1}"
        --master-addr "${hosts[0]}" --master-port "${PORT:-29500}" "$@")
    # with a terminal (-tt), what runs on the host ends when this ssh does
    ssh -tt -o ServerAliveInterval=30 "${hosts[i]}" \
        "cd $(quoted "$PWD")&& $(quoted env "${variables[@]}" "${command[@]}")" < /dev/null &
    running+=($!)
done
for _ in "${hosts[@]}"; do
    wait -n # stops at the first failure
done

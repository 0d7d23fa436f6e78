#!/bin/bash
# Train on hosts that you reach over ssh, without a job system. The first host is rank 0's; the
# others must reach it by the name or address given here. The program and its environment are at the
# same path on every host.
#
#     PROCESSES=1 examples/launch/ssh.sh host1,host2,host3 examples/minimal.py
#
# Ctrl-C ends the program on all hosts, and so does a failure on one of them.
set -euo pipefail
IFS=, read -ra hosts <<< "$1"
shift

quoted() { printf '%q ' "$@"; }

running=()
trap 'trap - EXIT; kill "${running[@]}" 2> /dev/null || true; wait' EXIT
for i in "${!hosts[@]}"; do
    command=(torchrun --nnodes "${#hosts[@]}" --node-rank "$i"
        --nproc-per-node "${PROCESSES:-1}"
        --master-addr "${hosts[0]}" --master-port "${PORT:-29500}" "$@")
    # with a terminal (-tt), what runs on the host ends when this ssh does
    ssh -tt "${hosts[i]}" "cd $(quoted "$PWD")&& PATH=$(quoted "$PATH")$(quoted "${command[@]}")" \
        < /dev/null &
    running+=($!)
done
for _ in "${hosts[@]}"; do
    wait -n # stops at the first failure
done

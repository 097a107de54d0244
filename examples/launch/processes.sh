#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Starts the ranks of this machine as plain processes that find each other by TCP: no torchrun, MPI or Slurm is needed.
#
#   RANKS_PER_NODE=8 processes.sh llama-demo --tp 8 --sp                                       one machine
#   NODES=2 NODE_RANK=0 HEAD=node01:29500 processes.sh llama-demo --tp 8 --dp 2                the first of two
#   NODES=2 NODE_RANK=1 HEAD=node01:29500 processes.sh llama-demo --tp 8 --dp 2                the second
#
# HEAD: name and free port of the first machine (default localhost:29500). More variables: steps.sh.
set -eu

# Status of the lowest rank that failed. A rank that fails ends the others with one report, wherever they run.
start() {
    pids='' local=0
    while [ "$local" -lt "$RANKS_PER_NODE" ]; do
        RANK=$((${NODE_RANK:-0} * RANKS_PER_NODE + local)) WORLD_SIZE=$((NODES * RANKS_PER_NODE)) LOCAL_RANK=$local \
            MASTER_ADDR=${head%:*} MASTER_PORT=${head##*:} "$@" &
        pids="$pids $!"
        local=$((local + 1))
    done
    status=0
    for pid in $pids; do
        code=0
        wait "$pid" || code=$?
        # A signal ends the wait, and the process soon after: train saves a checkpoint first.
        if kill -0 "$pid" 2>/dev/null; then code=0; wait "$pid" || code=$?; fi
        [ "$status" -ne 0 ] || status=$code
    done
    pids=''
    return "$status"
}

head=${HEAD:-localhost:29500} pids=''
# shellcheck disable=SC2086
trap 'kill -TERM $pids 2>/dev/null || true' INT TERM

# shellcheck source=steps.sh
. "$(dirname "$0")/steps.sh"

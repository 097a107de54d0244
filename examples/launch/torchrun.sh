#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Starts the ranks by torchrun; on several machines the same line on each of them.
#
#   torchrun.sh llama-demo --tp 8 --sp                                           one machine of 8 GPUs
#   NODES=2 HEAD=node01:29500 torchrun.sh llama-demo --tp 8 --dp 2 --sp          two
#   NODES=16 HEAD=node01:29500 torchrun.sh llama-demo --tp 8 --dp 16 --sp        sixteen
#
# NODE_RANK: 0 on the machine of HEAD, any other number on the others, which then print nothing of their own. All machines
# share OUT. More variables: steps.sh.
set -eu

# check and train have a rendezvous each: a machine that is late finds its own.
start() {
    if [ "$NODES" -eq 1 ]; then
        torchrun --no-python --standalone --nproc-per-node "$RANKS_PER_NODE" "$@"
    else
        torchrun --no-python --nnodes "$NODES" --nproc-per-node "$RANKS_PER_NODE" --rdzv-backend c10d \
            --rdzv-id "anyrank-$2" --rdzv-endpoint "${HEAD:?name and port of the first machine, as node01:29500}" "$@"
    fi
}

# shellcheck source=steps.sh
. "$(dirname "$0")/steps.sh"

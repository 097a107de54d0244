#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Starts the ranks by Open MPI's mpirun, once, on the machine where one is.
#
#   DEVICE=cpu RANKS_PER_NODE=4 mpirun.sh llama-demo --tp 2 --dp 2                       processors of one machine
#   NODES=2 HOSTFILE=hosts mpirun.sh llama-demo --tp 8 --dp 2 --sp                       two of 8 GPUs
#   NODES=16 HOSTFILE=hosts mpirun.sh llama-demo --tp 8 --dp 16 --sp                     sixteen
#
# HOSTFILE: a machine in each line (default: this one, or those of the batch system). More variables: steps.sh.
set -eu

# Without a binding, which is to one core otherwise.
start() {
    mpirun -n $((NODES * RANKS_PER_NODE)) ${HOSTFILE:+--hostfile "$HOSTFILE"} --map-by "ppr:$RANKS_PER_NODE:node" \
        --bind-to none "$@"
}

# shellcheck source=steps.sh
. "$(dirname "$0")/steps.sh"

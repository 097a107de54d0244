# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=sh
# What every launcher of this folder runs. It is sourced by a script that defines `start COMMAND...`, which runs a
# command once for each rank, and that passes its own arguments on: MODEL and options that plan, check and train share,
# as in `llama-demo --tp 8 --dp 2 --sp --batch 16`. clusters.md explains the steps.
#
#   NODES            machines (default 1)
#   RANKS_PER_NODE   processes on each machine, one for each of its GPUs (default 8)
#   DEVICE           what ranks compute on: cuda, cpu, emulated (default cuda)
#   TRANSPORT        what connects them: nccl, or mpi between processors (default: by the device)
#   STEPS            training steps (default 20)
#   OUT              folder of reports and checkpoint, of process 0 (default anyrank-launch)
#   ANYRANK_NCCL_ID_FILE
#                    where process 0 leaves NCCL's id for the others, unless MPI starts them (default: OUT/nccl-id, so
#                    that all machines need the same OUT)
#   EXPECT           hash that the weights are to have in the end (default: none is asked for)
#   ANYRANK          the command (default anyrank)

: "${NODES:=1}" "${RANKS_PER_NODE:=8}" "${DEVICE:=cuda}" "${STEPS:=20}" "${OUT:=anyrank-launch}" "${ANYRANK:=anyrank}"
if [ -z "${TRANSPORT:-}" ]; then
    case $DEVICE in cpu) TRANSPORT=mpi ;; *) TRANSPORT=nccl ;; esac
fi
if [ $# -eq 0 ]; then
    echo "${0##*/}: give a MODEL and a layout of $((NODES * RANKS_PER_NODE)) ranks, as in: llama-demo --tp 8" >&2
    exit 2
fi
if [ -e "$OUT/run" ]; then
    echo "${0##*/}: $OUT/run is there already: name another folder by OUT, or go on with: anyrank train --resume" >&2
    exit 2
fi
mkdir -p "$OUT"
export ANYRANK_NCCL_ID_FILE="${ANYRANK_NCCL_ID_FILE:-$OUT/nccl-id}"

if [ "${NODE_RANK:-0}" -eq 0 ]; then
    # Needs no rank: an illegal layout ends here, before many machines are kept waiting for it.
    echo "== what rank 0 is to hold, operation by operation: $OUT/plan.txt"
    "$ANYRANK" plan "$@" --flow > "$OUT/plan.txt"
    tail -n 1 "$OUT/plan.txt"
    echo "== check: every tensor of every rank against one rank; memory, shapes of the parts, hashes"
fi
start "$ANYRANK" check "$@" --transport "$TRANSPORT" --device "$DEVICE" --skip-f64 --memory --json "$OUT/check.json"

[ "${NODE_RANK:-0}" -ne 0 ] || echo "== train: $STEPS steps"
start "$ANYRANK" train "$@" --transport "$TRANSPORT" --device "$DEVICE" --steps "$STEPS" --save "$OUT/run" \
    --json "$OUT/train.json"

if [ -n "${EXPECT:-}" ] && [ "${NODE_RANK:-0}" -eq 0 ]; then
    hash=$(sed -n 's/.*"weights_hash": "\([0-9a-f]*\)".*/\1/p' "$OUT/train.json")
    if [ "$hash" != "$EXPECT" ]; then
        echo "${0##*/}: the weights have the hash $hash, expected $EXPECT" >&2
        exit 1
    fi
    echo "the weights have the hash that was expected"
fi

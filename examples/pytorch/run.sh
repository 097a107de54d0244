#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The worked example: a tensor-parallel MLP in PyTorch, right and broken in several ways, four gloo processes on this
# machine's CPU; `anyrank verify` says what is wrong with each. Needs python3 and, the first time, PyPI for torch.
#   examples/pytorch/run.sh [FOLDER]     where the virtual environment and the dumps go; default anyrank-pytorch
# PYTHON names an interpreter that has torch already; ANYRANK the command, which is otherwise that of the build tree or
# the installed one.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:-anyrank-pytorch}
anyrank=${ANYRANK:-$here/../../build/anyrank}
[ -x "$anyrank" ] || anyrank=$(command -v anyrank || true)
if [ -z "$anyrank" ]; then
    echo "run.sh: there is no anyrank: ./quickstart builds it, or ANYRANK=FILE names one" >&2
    exit 2
fi
mkdir -p "$folder"
if [ -z "${PYTHON:-}" ]; then
    PYTHON=$folder/venv/bin/python
    if ! "$PYTHON" -c 'import torch' 2>/dev/null; then
        echo "installing torch into $folder/venv (some gigabytes)" >&2
        python3 -m venv "$folder/venv"
        "$folder/venv/bin/pip" install --quiet torch
    fi
fi
export PYTHONPATH="$here/../../python${PYTHONPATH:+:$PYTHONPATH}"
dumps=$folder/dumps
rm -rf "$dumps"
"$PYTHON" "$here/tp_mlp.py" --folder "$dumps"
status=0
# look FOLDER CODE: what verify says of it, and must exit with.
look() {
    echo "=== $1"
    code=0
    "$anyrank" verify "$dumps/one" "$dumps/$1" --rtol 1e-4 --atol 1e-5 || code=$?
    if [ "$code" -ne "$2" ]; then
        echo "run.sh: $1: exit status $code, expected $2" >&2
        status=1
    fi
}
for bug in none dx_not_reduced bias_every_rank sum_not_reduced wrong_shard norm_grad_doubled; do
    "$PYTHON" "$here/tp_mlp.py" --folder "$dumps" --tp 4 --bug $bug
    look $bug "$([ $bug = none ] && echo 0 || echo 1)"
done
"$PYTHON" "$here/tp_mlp.py" --folder "$dumps" --tp 4 --dtensor
look dtensor 0
exit $status

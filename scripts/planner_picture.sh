#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Draws the planner's picture, planner.svg, into docs/pictures, or DIR.
#
#   scripts/planner_picture.sh [build/anyrank [DIR]]
set -eu

anyrank=${1:-build/anyrank}
root=$(cd "$(dirname "$0")/.." && pwd)
pictures=$(cd "${2:-$root/docs/pictures}" && pwd)

"$anyrank" plan llama-3-70b --gpus 64 --batch 256 --seq 8192 --quiet --top 12 --json - |
    PYTHONPATH=$root/python python3 -m anyrank.page - --out "$pictures/planner.svg"

#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Draws the planner's pictures into docs/pictures: planner.svg, and with chromium, where there is one, the page of the
# layouts as planner.png. Into DIR: planner.svg alone.
#
#   scripts/planner_picture.sh [build/anyrank [DIR]]
set -eu

anyrank=${1:-build/anyrank}
pictures=$(cd "${2:-$(dirname "$0")/../docs/pictures}" && pwd)

root=$(cd "$(dirname "$0")/.." && pwd)

# draw TOP OUT
draw() {
    "$anyrank" plan llama-3-70b --gpus 64 --batch 256 --seq 8192 --quiet --top "$1" --json - |
        PYTHONPATH=$root/python python3 -m anyrank.page - --out "$2"
}

draw 12 "$pictures/planner.svg"
if [ $# -gt 1 ] || ! command -v chromium >/dev/null 2>&1; then exit 0; fi
page=$(mktemp -d)/plan.html
draw 0 "$page"
sandbox=
if [ "$(id -u)" = 0 ]; then sandbox=--no-sandbox; fi # chromium runs for root without one alone
chromium --headless $sandbox --hide-scrollbars --virtual-time-budget=3000 --window-size=1100,1150 \
    --screenshot="$pictures/planner.png" "file://$page"
rm -r "$(dirname "$page")"

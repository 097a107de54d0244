#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Draws the planner's pictures into docs/pictures: planner.svg, and with chromium the page of --html as planner.png, in
# dark mode and on a phone.
#
#   scripts/planner_picture.sh [build/anyrank]
set -eu

anyrank=${1:-build/anyrank}
pictures=$(cd "$(dirname "$0")/../docs/pictures" && pwd)
page=$(mktemp -d)/plan.html

plan() { "$anyrank" plan llama-3-70b --gpus 64 --batch 256 --seq 8192 --quiet "$@"; }
shot() {
    chromium --headless --hide-scrollbars --virtual-time-budget=3000 --window-size="$2" \
        --screenshot="$pictures/$1" "file://$page"
}

plan --top 12 --svg "$pictures/planner.svg"
plan --top 0 --html "$page"
shot planner.png 1100,1150
rm -r "$(dirname "$page")"

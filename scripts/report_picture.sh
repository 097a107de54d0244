#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Takes verify-report.png, the upper part of the page that find-a-bug.md has `anyrank verify --html` write. Needs Chromium.
#   scripts/report_picture.sh report.html
set -eu
page=$(realpath "$1")
cd "$(dirname "$0")/.."
"${CHROMIUM:-chromium}" --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1000,700 \
    --screenshot=docs/pictures/verify-report.png "file://$page"

#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes static pages of README.md and docs/, with search, which a browser opens from a folder or from any server:
#
#   scripts/site.sh OUT      writes OUT/index.html; OUT is made anew
#
# The generator and all that it needs (scripts/site_tools.txt) are installed into ~/.cache/anyrank/site-venv (or
# $ANYRANK_SITE_VENV), from where pip finds packages. A link that leads nowhere fails. Exit status: 0 made, 1 a page is
# wrong, 2 wrong usage, 3 the generator could not be installed.
set -eu
case ${1:-} in
    -h | --help) sed -n '3,9s/^# \{0,1\}//p' "$0"; exit 0 ;;
    '' | -*) echo "site.sh: expected one folder to write: scripts/site.sh OUT" >&2; exit 2 ;;
esac
[ $# -eq 1 ] || { echo "site.sh: expected one folder to write: scripts/site.sh OUT" >&2; exit 2; }
if [ -e "$1" ] && [ ! -e "$1/index.html" ] && [ -n "$(ls -A "$1")" ]; then
    echo "site.sh: $1 is there and has no site in it, which would be replaced" >&2
    exit 2
fi
mkdir -p "$1"
out=$(cd "$1" && pwd -P)
cd "$(dirname "$0")/.."
wanted=scripts/site_tools.txt
venv=${ANYRANK_SITE_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/anyrank/site-venv}
if ! cmp -s "$wanted" "$venv/installed.txt"; then
    rm -rf "$venv"
    mkdir -p "$(dirname "$venv")"
    log=$(mktemp)
    if ! { "${PYTHON:-python3}" -m venv "$venv" &&
        "$venv/bin/python" -m pip install --disable-pip-version-check -r "$wanted"; } > "$log" 2>&1; then
        tail -n 30 "$log" >&2
        rm -f "$log"
        echo "site.sh: what scripts/site_tools.txt lists could not be installed; pip's messages are above" >&2
        exit 3
    fi
    rm -f "$log"
    cp "$wanted" "$venv/installed.txt"
fi
export PYTHONDONTWRITEBYTECODE=1 NO_MKDOCS_2_WARNING=1
# Not with --quiet: warnings that are not printed are not counted either.
said=$("$venv/bin/python" -m mkdocs build --strict --clean -f scripts/site.yml -d "$out" 2>&1) ||
    { echo "$said" | grep -v '^INFO' >&2; exit 1; }
echo "site.sh: $out/index.html"

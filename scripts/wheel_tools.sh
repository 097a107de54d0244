#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs the tools of scripts/wheel_tools.txt below build/wheel/tools, from where pip finds packages, unless they are
# there, and prints the path of the zig among them. Exit status 77 where no package index is reached.
set -eu
cd "$(dirname "$0")/.."
tools=$(pwd -P)/build/wheel/tools
mkdir -p build/wheel
exec 9> build/wheel/tools.lock
flock 9 # two that begin at once install them once
if ! cmp -s scripts/wheel_tools.txt "$tools/installed.txt"; then
    rm -rf "$tools"
    "${PYTHON:-python3}" -m venv "$tools" >&2
    if ! "$tools/bin/python" -m pip install --disable-pip-version-check -r scripts/wheel_tools.txt > "$tools/pip.log" 2>&1; then
        tail -n 40 "$tools/pip.log" >&2
        grep -qE 'Could not fetch|Temporary failure|No matching distribution|ConnectionError' "$tools/pip.log" || exit 1
        echo "the tools of scripts/wheel_tools.txt cannot be installed here: no package index is reached" >&2
        exit 77
    fi
    cp scripts/wheel_tools.txt "$tools/installed.txt"
fi
"$tools/bin/python" -c 'import os, ziglang; print(os.path.join(os.path.dirname(ziglang.__file__), "zig"))'

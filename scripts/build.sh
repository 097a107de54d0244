#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Configures and builds one preset, and shows how far it is.
#
#   scripts/build.sh PRESET [-DNAME=VALUE ...]
#
# PRESET: release (in build/), cuda, aarch64, posix, debug, asan or tsan (in build/PRESET/).
#
# On a terminal one line moves; elsewhere one line is printed at the end. Everything the tools say goes to
# BUILD_DIR/build.log, whose errors are printed if they fail. ANYRANK_JOBS sets how many compilers run at once (default:
# the number of processors). Exit status: the failing tool's.
set -eu

preset=${1:?usage: scripts/build.sh PRESET [-DNAME=VALUE ...]}
shift
cd "$(dirname "$0")/.."
case $preset in
    release) dir=build ;;
    *) dir=build/$preset ;;
esac
jobs=${ANYRANK_JOBS:-$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)}
mkdir -p "$dir"
log=$dir/build.log
started=$(date +%s)

# A tree that was moved or copied has a cache that speaks of another place, and CMake refuses it.
if [ -f "$dir/CMakeCache.txt" ] && ! grep -qxF "CMAKE_HOME_DIRECTORY:INTERNAL=$(pwd -P)" "$dir/CMakeCache.txt"; then
    rm -rf "$dir/CMakeCache.txt" "$dir/CMakeFiles"
fi

# The presets name no generator, and CMake's default is make; ninja builds in a tenth less time. A tree that has one
# keeps it.
if [ -z "${CMAKE_GENERATOR:-}" ] && [ ! -f "$dir/CMakeCache.txt" ] && command -v ninja >/dev/null 2>&1; then
    export CMAKE_GENERATOR=Ninja
fi

fail() {
    echo "$preset: $1 failed (exit status $2); from $log:" >&2
    # With several compilers at work the last lines are seldom the ones that tell.
    if grep -q -E 'error:|undefined reference|CMake Error' "$log"; then
        grep -A 8 -E 'error:|undefined reference|CMake Error' "$log" | head -n 60 >&2
    else
        tail -n 40 "$log" >&2
    fi
    exit "$2"
}

status=0
cmake --preset "$preset" "$@" > "$log" 2>&1 || status=$?
[ $status -eq 0 ] || fail "cmake --preset $preset" $status

if [ -t 1 ]; then
    # make says "[ 12%] Building ...", ninja "[3/40] Building ...": both begin a line with what is shown.
    { cmake --build "$dir" -j "$jobs" 2>&1 && echo 0 > "$dir/build.status" || echo $? > "$dir/build.status"; } |
        while IFS= read -r line; do
            printf '%s\n' "$line" >> "$log"
            case $line in
                '['*) printf '\r\033[K%.78s' "$preset: $line" ;;
            esac
        done
    printf '\r\033[K'
    status=$(cat "$dir/build.status")
else
    cmake --build "$dir" -j "$jobs" >> "$log" 2>&1 || status=$?
fi
[ "$status" -eq 0 ] || fail "cmake --build $dir" "$status"
echo "built $dir ($preset) in $(($(date +%s) - started)) s"

#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes the Python package's source distribution and its wheel, and says for which systems the wheel is:
#
#   scripts/wheel.sh [--out DIR]             of this machine, into dist/
#   scripts/wheel.sh --aarch64 [--out DIR]   of 64-bit ARM on another processor, after scripts/install_deps.sh --aarch64
#
# The wheel is built from the source distribution, so that this is complete. gcc compiles, zig links against glibc 2.28
# (scripts/cmake/manylinux.cmake), auditwheel checks. scripts/wheel_tools.sh installs these tools; compiler, CMake, BLAS
# and jansson are this machine's (scripts/install_deps.sh --wheel). Its glibc is at most 2.37, as Debian 12's: newer
# headers ask for functions that 2.28 has not. Exit status 77 where no package index is reached.
set -eu
cd "$(dirname "$0")/.."
root=$(pwd -P)
arch=$(uname -m) out=$root/dist
while [ $# -gt 0 ]; do
    case $1 in
        --aarch64) arch=aarch64 ;;
        --out)
            mkdir -p "${2:?wheel.sh: --out needs a folder}"
            out=$(cd "$2" && pwd -P)
            shift
            ;;
        -h | --help) sed -n '3,11s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) echo "wheel.sh: unknown option $1; it takes --aarch64 and --out DIR" >&2; exit 2 ;;
    esac
    shift
done
case $arch in
    x86_64 | aarch64) ;;
    *) echo "wheel.sh: no wheels for $arch: x86_64 and aarch64 are tried" >&2; exit 2 ;;
esac
work=$root/build/wheel tools=$root/build/wheel/tools
if [ "$arch" != "$(uname -m)" ] && [ ! -e "$root/build/aarch64/sysroot/usr/lib/aarch64-linux-gnu/libblis.a" ]; then
    echo "wheel.sh: no libraries of arm64 in build/aarch64/sysroot: scripts/install_deps.sh --aarch64 puts them there" >&2
    exit 2
fi
options=python/anyrank/_options.py # this machine's command writes it, in a build of its own wheel too
if [ "$arch" != "$(uname -m)" ] && [ ! -e $options ] && [ ! -e "$work/_options.py" ]; then
    echo "wheel.sh: no $options, which this machine's command writes: make this machine's wheel first" >&2
    exit 2
fi

log=$work/$arch.log
mkdir -p "$work" "$out"
: > "$log"
# Runs a command whose output is for the log, and for the terminal if it fails.
quietly() {
    "$@" >> "$log" 2>&1 || { status=$?; tail -n 40 "$log" >&2; echo "wheel.sh: failed: $* (all of it: $log)" >&2; exit $status; }
}

quietly scripts/wheel_tools.sh

# Files of a source distribution have no time by which make would see that they changed: every build is whole.
rm -rf "$work/source" "$work/raw" "${work:?}/$arch"
mkdir -p "$work/source"
quietly "$tools/bin/python" -m build --sdist --no-isolation --outdir "$work/raw" .
sdist=$(ls "$work/raw"/*.tar.gz)
tar -xzf "$sdist" -C "$work/source" --strip-components 1
if [ "$arch" != "$(uname -m)" ] && [ ! -e "$work/source/$options" ]; then
    cp "$work/_options.py" "$work/source/$options"
fi

ANYRANK_ZIG=$(scripts/wheel_tools.sh)
export ANYRANK_ZIG ANYRANK_WHEEL_ARCH="$arch" _PYTHON_HOST_PLATFORM="linux-$arch"
export ZIG_GLOBAL_CACHE_DIR="$work/zig" ZIG_LOCAL_CACHE_DIR="$work/zig"
quietly "$tools/bin/python" -m build --wheel --no-isolation --outdir "$work/raw" -C build-dir="$work/$arch" \
    -C cmake.define.CMAKE_TOOLCHAIN_FILE="$root/scripts/cmake/manylinux.cmake" -C cmake.define.ANYRANK_STATIC=ON "$work/source"
wheel=$(ls "$work/raw"/*.whl)
cp "$work/source/$options" "$work/_options.py"
PATH="$tools/bin:$PATH" quietly "$tools/bin/auditwheel" repair --plat auto --only-plat -w "$out" "$wheel"
cp "$sdist" "$out/"
made=$(ls -t "$out"/anyrank-*_"$arch".whl | head -n 1)
"$tools/bin/auditwheel" show "$made"
for file in "$out/$(basename "$sdist")" "$made"; do
    echo "$(($(wc -c < "$file") / 1024)) KB  $file"
done
tag=${made##*/anyrank-*-py3-}
echo "tag: py3-${tag%.whl}"

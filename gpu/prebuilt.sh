#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds the command and the programs of gpu/device-check.sh for machines that have a GPU and a C library, and need
# have nothing else: a BLAS, jansson, OpenMP and CUDA's run-time library are inside, cuBLAS and NCCL are looked for there.
#
#   gpu/prebuilt.sh [--arch A] [--out DIR] [--jobs N] [--host]
#
#   --arch A   CUDA architectures, as CMake has them: 90 (default: code for it, and PTX for later ones), 90a, 80;90
#   --out DIR  where to (default build/prebuilt); an earlier one there is replaced
#   --jobs N   compilers at once (default: the number of processors)
#   --host     without the CUDA device, where there is no nvcc: the CPU and the emulated device
#
# DIR has one program and links to it by the names anyrank, conformance_main, gpu_smoke, bench_gemm, bench_block and
# bench_nccl, data/ (the bundled models, which anyrank finds there), lib/ (for machines without libgcc_s) and
# manifest.txt, one fact a line: version, commit, what it was built by and for, and the program's size and SHA-256. It may
# be copied anywhere. DIR.tgz is the same as an archive, for gpu/device-check.sh --prebuilt. Building takes minutes, in
# build/static (with --host in build/static-host).
set -eu

arch=90 out='' jobs='' cuda=ON
refuse() { echo "prebuilt.sh: $1 (--help lists the options)" >&2; exit 2; }
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) sed -n '3,17s/^# \{0,1\}//p' "$0"; exit 0 ;;
        --host) cuda=OFF ;;
        --arch | --out | --jobs)
            [ $# -ge 2 ] || refuse "$1 needs a value"
            case $1 in
                --arch) arch=$2 ;;
                --out) out=$2 ;;
                --jobs) jobs=$2 ;;
            esac
            shift ;;
        *) refuse "unknown option $1" ;;
    esac
    shift
done
[ -z "$out" ] || { mkdir -p "$out" && out=$(cd "$out" && pwd); }
cd "$(dirname "$0")/.."
root=$(pwd)
out=${out:-$root/build/prebuilt}
[ ! -d "$out" ] || [ -z "$(ls -A "$out")" ] || [ -f "$out/manifest.txt" ] ||
    refuse "--out: $out is a folder with other things in it"
build=$root/build/static
[ $cuda = ON ] || build=$build-host
case ${jobs:-1} in *[!0-9]* | 0*) refuse "--jobs: '$jobs' is no number from 1 on" ;; esac
case $arch in '' | *[!0-9a-z\;-]*) refuse "--arch: '$arch' is no list of CUDA architectures, as 90 or '80;90'" ;; esac
jobs=${jobs:-$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)}
program=gpu_programs names="anyrank conformance_main gpu_smoke bench_gemm bench_block bench_nccl"

# --- build ------------------------------------------------------------------------------------------------------------

# A command looks for its data where an installed one has them: here beside it.
set -- -S "$root" -B "$build" -DCMAKE_BUILD_TYPE=Release -DANYRANK_STATIC=ON -DANYRANK_CRITERION=OFF \
    -DCMAKE_INSTALL_DATADIR=bin/data -DANYRANK_CUDA=$cuda "-DCMAKE_CUDA_ARCHITECTURES=$arch"
if [ ! -f "$build/CMakeCache.txt" ] && command -v ninja >/dev/null; then set -- "$@" -GNinja; fi
cmake "$@" >&2
cmake --build "$build" -j "$jobs" --target $program >&2

# --- what goes along --------------------------------------------------------------------------------------------------

mkdir -p "$out"
rm -rf "$out/data" "$out/manifest.txt" "$out.tgz"
mkdir "$out/data"
cp -R ref/data "$out/data/anyrank"
strip -o "$out/$program" "$build/tests/$program"
for name in $names; do ln -sf $program "$out/$name"; done
cd "$out"

# The C library loads it when a thread of OpenMP ends; gpu/check/programs.sh says where this one is used.
mkdir -p lib
cp "$(cc -print-file-name=libgcc_s.so.1)" lib/

# All that it may ask of another machine is a C library.
others=$(objdump -p $program | sed -n 's/^ *NEEDED *//p' |
    grep -v -x -E '(libc|libm|libpthread|libdl|librt|ld-linux[-a-z0-9]*)\.so\.[0-9]+' || true)
[ -z "$others" ] || { echo "prebuilt.sh: $program also needs these:" $others >&2; exit 1; }
./anyrank info >/dev/null

# --- the manifest -----------------------------------------------------------------------------------------------------

commit=$(git -C "$root" rev-parse HEAD 2>/dev/null || echo unknown)
[ -z "$(git -C "$root" status --porcelain 2>/dev/null)" ] || commit="$commit, with changes"
nvcc=$(sed -n 's/^CMAKE_CUDA_COMPILER:[A-Z]*=//p' "$build/CMakeCache.txt")
{
    ./anyrank --version | sed -n '1s/^anyrank \([^ ]*\).*/version \1/p'
    echo "commit $commit"
    if [ $cuda = ON ]; then
        echo "arch $arch"
        echo "nvcc $("$nvcc" --version | sed -n 's/.*release .*, V\([0-9.]*\).*/\1/p')"
    else
        echo "arch none"
    fi
    echo "machine $(uname -m)"
    echo "glibc $(objdump -T $program | sed -n 's/.*(\{0,1\}GLIBC_\([0-9.]*\).*/\1/p' | sort -V | tail -n 1) or newer"
    echo "file $program $(wc -c < $program) $(sha256sum < $program | cut -d ' ' -f 1)"
} > manifest.txt
cat manifest.txt
tar -czf "$out.tgz" .
archive=$(wc -c < "$out.tgz")
tree=$(cd "$root" && git ls-files -z 2>/dev/null | xargs -0 cat 2>/dev/null | wc -c)
echo "prebuilt.sh: $out.tgz, $archive bytes; with the sources, $tree bytes: $(((archive + tree) / 1048576)) MiB"

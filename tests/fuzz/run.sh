#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Drives the readers of other people's files, and of a connection's first bytes, with libFuzzer, under AddressSanitizer and
# UndefinedBehaviorSanitizer:
#   tests/fuzz/run.sh [SECONDS [TARGET ...]]         processor seconds a target (default 60); all targets if none is named
#   tests/fuzz/run.sh --runs INPUTS [TARGET ...]     so many inputs a target instead, from one seed
# Needs clang with libFuzzer (CC=clang). Builds in BUILD (default build/fuzz); what it finds stays there, and the seeds in
# tests/fuzz/corpus as they are. A line a target: inputs, coverage, corpus, findings. Exit status 1 if there are findings,
# 77 without such a clang.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
build=${BUILD:-$root/build/fuzz}
clang=${CC:-clang}
runs=''
if [ "${1:-}" = --runs ]; then
    runs=$2
    shift
fi
seconds=${1:-60}
shift || true
[ $# -gt 0 ] || set -- safetensors header index config plan schedule map placement npy dump

mkdir -p "$build"
if ! echo 'int LLVMFuzzerTestOneInput(void) { return 0; }' |
    "$clang" -fsanitize=fuzzer -x c - -o "$build/probe" 2>/dev/null; then
    echo "no $clang with libFuzzer here (scripts/install_deps.sh --lint installs it)"
    exit 77
fi
CC=$clang cmake -S "$root" -B "$build" -G Ninja -DANYRANK_TESTS=OFF -DANYRANK_CUDA=OFF -DANYRANK_OPENMP=OFF \
    -DANYRANK_SANITIZE=address -DCMAKE_BUILD_TYPE=None -DCMAKE_C_FLAGS="-O1 -g -w -fsanitize=fuzzer-no-link" >"$build/build.log"
cmake --build "$build" --target anyrank -j "${JOBS:-2}" >>"$build/build.log"

flags=(-O1 -g -w -std=gnu17 -D_GNU_SOURCE "-I$root/src" "-I$root" "-I$root/include" "-fsanitize=fuzzer,address,undefined"
       -fno-sanitize-recover=all)
mapfile -t blas < <(sed -n 's/^BLIS_LIBRARY:FILEPATH=\(.*so\)$/\1/p' "$build/CMakeCache.txt")
libraries=("$build/libanyrank.a" -ljansson "${blas[@]}" -lpthread -lm)

# Where the header's length stands, and how many bytes it takes: .npy of version 1.
length_of() {
    case $1 in
    safetensors) echo "-DFUZZ_LENGTH_AT=0 -DFUZZ_LENGTH_BYTES=8" ;;
    npy) echo "-DFUZZ_LENGTH_AT=8 -DFUZZ_LENGTH_BYTES=2" ;;
    esac
}

# Runs one target for its inputs or processor seconds: on a busy machine the clock would stop it early.
drive() {
    local name=$1 found="$build/found-$1" log="$build/$1.log" limits=(-timeout=20) fixed=()
    if [ -n "$runs" ]; then
        rm -rf "$build/corpus-$name"
        limits=(-timeout=1200 -seed=1 "-runs=$runs")
        if setarch -R true 2>/dev/null; then fixed=(setarch -R); fi # addresses are among what is tried
    fi
    mkdir -p "$build/corpus-$name" "$found"
    nice -n 19 "${fixed[@]}" "$build/fuzz-$name" -dict="$root/tests/fuzz/$name.dict" -max_len=4096 "${limits[@]}" -rss_limit_mb=2048 \
        -print_final_stats=1 -artifact_prefix="$found/" "$build/corpus-$name" "$root/tests/fuzz/corpus/$name" >"$log" 2>&1 &
    local pid=$! used
    while [ -z "$runs" ] && used=$(ps -o cputimes= -p $pid) && [ "${used// /}" -lt "$seconds" ]; do
        sleep 1
    done
    [ -n "$runs" ] || kill -INT $pid 2>/dev/null || true
    wait $pid || true
    summary "$name" "$log" "$found"
}

summary() {
    local inputs coverage
    inputs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$2")
    coverage=$(grep -o 'cov: [0-9]* ft: [0-9]* corp: [0-9]*' "$2" | tail -1)
    printf '%-12s %12s inputs, %s, findings: %s\n' "$1" "${inputs:-?}" "$coverage" "$(find "$3" -type f | wc -l)"
}

for name in "$@"; do
    # shellcheck disable=SC2046
    "$clang" "${flags[@]}" -DFUZZ_TARGET=fuzz_"$name" $(length_of "$name") "$root/tests/fuzz/entry.c" "${libraries[@]}" \
        -o "$build/fuzz-$name"
    drive "$name"
done
findings=$(find "$build" -path '*/found-*' -type f | wc -l)
[ "$findings" -eq 0 ]

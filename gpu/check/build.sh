#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Step "build" of gpu/device-check.sh: the programs of the other steps.
# shellcheck disable=SC2154 # device-check.sh exports what it knows
set -u
have() { command -v "$1" >/dev/null 2>&1; }

[ -d /usr/local/cuda/bin ] && PATH=$PATH:/usr/local/cuda/bin
set -- -S "$root" -B "$build" -DCMAKE_BUILD_TYPE=Release -DANYRANK_TESTS=ON -DANYRANK_CRITERION=OFF -DANYRANK_MPI=OFF
if have ninja; then set -- "$@" -GNinja; fi
if [ "$host" = yes ]; then
    set -- "$@" -DANYRANK_CUDA=OFF
    targets="anyrank_cli conformance_main gpu_smoke bench_gemm bench_block"
else
    have nvcc || [ -n "${CUDACXX:-}" ] || { echo "no nvcc here, and no --prebuilt that starts"; exit 1; }
    CUDACXX=${CUDACXX:-$(command -v nvcc)}
    export CUDACXX
    set -- "$@" -DANYRANK_CUDA=ON "-DCMAKE_CUDA_ARCHITECTURES=$arch"
    targets="anyrank_cli conformance_main gpu_smoke bench_gemm bench_block bench_nccl"
fi
cmake "$@" || { echo "cmake failed: --deps names .deb files of what is missing"; exit 1; }
# shellcheck disable=SC2086
cmake --build "$build" -j "$jobs" --target $targets || { echo "the build failed"; exit 1; }
echo "built $targets in $build"

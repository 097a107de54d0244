#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The baseline is what everything else is compared with, so it must not call what it judges. This lists every symbol
# that the objects of ref/baseline need and do not define among themselves, and fails unless each is allowed.
# Usage: scripts/check_baseline_symbols.sh BUILD_DIR
set -eu

# The C library's memory and strings and its matching of globs, printing to a buffer, the correctly rounded functions of libm (and those that set
# or read a sign or an exponent), the compiler's conversion of a 128-bit integer and its parallel loops (OpenMP of GCC, of clang), status, checked sizes.
allowed='
calloc malloc free memcpy memmove memset memcmp strcmp strlen strchr snprintf fnmatch
fma sqrt rint fabs copysign ldexp
__floattidf GOMP_parallel omp_get_thread_num omp_get_num_threads
__kmpc_fork_call __kmpc_for_static_init_8u __kmpc_for_static_fini __kmpc_push_num_threads __kmpc_global_thread_num
ar_error_set ari_mul_size
'
# What a compiler adds on its own: stack protector, fortified forms, the choice of an instruction set, position-independent code, sanitizers, coverage.
added='^(__cpu_model|__cpu_features2|__cpu_indicator_init|_GLOBAL_OFFSET_TABLE_|__stack_chk_fail|__[a-z]+_chk|__(asan|ubsan|tsan|lsan|sanitizer|gcov)_.*)$'

if [ $# -ne 1 ] || [ ! -d "$1" ]; then
    echo "usage: $0 BUILD_DIR" >&2
    exit 2
fi
objects=$(find "$1/CMakeFiles" -path '*ref/baseline/*.o' | sort)
if [ -z "$objects" ]; then
    echo "check_baseline_symbols: no object of ref/baseline under $1: build first" >&2
    exit 2
fi

# shellcheck disable=SC2086  # one argument an object
nm -A $objects | awk -v allowed="$allowed" -v added="$added" '
    { symbol = $NF; sub(/@.*/, "", symbol); kind = $(NF - 1); object = $1; sub(/:.*/, "", object) }
    kind ~ /^[Uvw]$/ { needed[symbol] = needed[symbol] " " object; next }
    { defined[symbol] = 1 }
    END {
        n = split(allowed, names)
        for (i = 1; i <= n; i++)
            fine[names[i]] = 1
        for (symbol in needed)
            if (!(symbol in defined)) {
                outside++
                if (!(symbol in fine) && symbol !~ added) {
                    printf "check_baseline_symbols: %s is not allowed; needed by%s\n", symbol, needed[symbol]
                    bad++
                }
            }
        printf "baseline: %d symbols from outside, %d not allowed\n", outside, bad
        exit bad > 0
    }'

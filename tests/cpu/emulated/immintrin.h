/* SPDX-License-Identifier: Apache-2.0 */
/* What `#include <immintrin.h>` of ref/cpu/gemm_ifma.c finds in the tests' own build of it: this folder is searched
 * before the compiler's. */
#include "tests/cpu/emulated/avx512.h"

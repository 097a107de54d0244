/* SPDX-License-Identifier: Apache-2.0 */
/* ref/cpu/exact/ifma.c with the instructions of avx.h for the processor's. */
#define ARI_HAVE_X86_PATHS 1
/* The library has these names. */
#define ari_exact_ifma emulated_exact_ifma
#define ari_exact_avx2 emulated_exact_avx2

#include "ref/cpu/device.h"
#include "ref/cpu/exact/panels.h"
/* After the headers of others: a compiler that is told that the processor has AVX-512 uses it for plain C as well. */
#define target(features)
#include "ref/cpu/exact/ifma.c"

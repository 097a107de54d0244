/* SPDX-License-Identifier: Apache-2.0 */
/* ref/cpu/exact/k16_avx512vnni.c with the instructions of avx.h for the processor's. */
#define ARI_HAVE_X86_PATHS 1
/* The library has this name. */
#define ari_exact_avx512vnni emulated_exact_avx512vnni

#include "ref/cpu/device.h"
#include "ref/cpu/exact/panels.h"
/* After the headers of others: a compiler that is told that the processor has the instructions uses them for plain C. */
#define target(features)
#include "ref/cpu/exact/k16_avx512vnni.c"

/* SPDX-License-Identifier: Apache-2.0 */
/* ref/cpu/exact/arm.c with the instructions of neon.h for the processor's. */
#define ARI_HAVE_ARM_PATHS 1
/* The library has these names. */
#define ari_exact_smmla emulated_exact_smmla
#define ari_exact_sdot emulated_exact_sdot
#define ari_exact_neon emulated_exact_neon

#include "ref/cpu/device.h"
#include "ref/cpu/exact/digits.h"
/* After the headers of others: a compiler that is told that the processor has the instructions uses them for plain C as
 * well. */
#define target(features)
#include "ref/cpu/exact/arm.c"

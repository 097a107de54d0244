/* SPDX-License-Identifier: Apache-2.0 */
/* ref/cpu/exact/amx.c with the instructions of amx.h for the processor's. */
#define ARI_HAVE_X86_PATHS 1
/* The library has this name. */
#define ari_exact_amx emulated_exact_amx

#include "ref/cpu/device.h"
#include "ref/cpu/exact/sums.h"
/* After the headers of others: other processors' compilers do not know the features. */
#define target(features)
#include "ref/cpu/exact/amx.c"

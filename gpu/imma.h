/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_GPU_IMMA_H
#define ARI_GPU_IMMA_H

/* How the GPU makes the integer sums of an exact contraction: an integer of 26 bits is four digits of base 128, and the
 * products of digits are int8 matrix products into int32 (IMMA, the tensor cores' integer instructions). The same bits
 * whichever way. */
#include "anyrank/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum ari_imma {
    ARI_IMMA_16,  /* all 16 products of digits, in 7 sums of one weight each */
    ARI_IMMA_10,  /* 10 products, by Karatsuba's rule applied twice, in 9 sums */
    ARI_IMMA_AUTO /* by the number of terms */
} ari_imma;

#define ARI_IMMA_VARIABLE "ANYRANK_IMMA_PATH"

/** What, for a device made now, the environment variable ANYRANK_IMMA_PATH ("imma16", "imma10") forces; ARI_IMMA_AUTO
 * where it is not set. Errors: AR_ERR_ARG (another value). */
AR_NODISCARD ar_status ari_imma_choose(ari_imma *path);

#ifdef __cplusplus
}
#endif

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_VERIFY_ESTIMATE_H
#define ARI_VERIFY_ESTIMATE_H

#include "anyrank/config.h"

typedef struct ari_estimate {
    size_t bytes;     /* of memory at the peak, all ranks and the baseline together; generous */
    double macs;      /* multiply-adds of the baseline */
    double seconds;   /* rough, of the whole check */
    size_t available; /* bytes of memory this machine can give now */
} ari_estimate;

/** Refuses a config whose layers alone do not fit, without a look at one after the other: to be called before anything
 *  that goes through them, which takes minutes where there are 2^31. Errors: AR_ERR_ARG, AR_ERR_OVERFLOW. */
AR_NODISCARD ar_status ari_estimate_layers(const ar_config *c);
/** What a check of this size takes. Errors: AR_ERR_OVERFLOW (absurd sizes). */
AR_NODISCARD ar_status ari_estimate_check(ari_estimate *e, const ar_config *c, size_t batch, size_t seq, int largest_tp,
                                          size_t layouts);
/** AR_ERR_MEMORY... is for the machine; a check that cannot fit is the caller's: AR_ERR_ARG, with both sizes. */
AR_NODISCARD ar_status ari_estimate_fits(const ari_estimate *e);

#endif

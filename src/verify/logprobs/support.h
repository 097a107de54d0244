/* SPDX-License-Identifier: Apache-2.0 */
/* Log-probabilities as a sampler has them: of logits over a temperature, in a support that is not the whole
 * vocabulary. */
#ifndef ARI_VERIFY_LOGPROBS_SUPPORT_H
#define ARI_VERIFY_LOGPROBS_SUPPORT_H

#include "verify/logprobs/logprobs.h"

typedef enum ari_support {
    ARI_ALL,
    ARI_LARGEST_K, /* the k largest logits */
    ARI_LARGEST_P, /* the fewest of the largest whose probabilities add up to p or more */
    ARI_LEAST_P,   /* probabilities of at least p times the largest */
    ARI_SUPPORTS
} ari_support;

typedef struct ari_sampler {
    double temperature, number; /* number: k or p */
    double left;                /* squares of the differences that it leaves */
} ari_sampler;

/** The sampler of each kind that leaves least of the differences, with a temperature of 1 where another one does not
 *  leave much less. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_samplers_fit(ari_sampler found[ARI_SUPPORTS], const ari_lp_case *c);

#endif

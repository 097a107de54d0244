/* SPDX-License-Identifier: Apache-2.0 */
/* What a router has made, on the host, where its faults change it: it is small. */
#pragma once

#include "ref/layers/faults.h"

/* Of the tokens of a pass. */
typedef struct ari_routed_host {
    size_t tokens, experts, k;
    float *z, *p, *weight, *g; /* [tokens, experts], then [tokens, k] */
    int32_t *expert;           /* [tokens, k] */
} ari_routed_host;

/** z, g: NULL where they are not wanted. ari_routed_host_fini, also after a failure. Errors: AR_ERR_MEMORY, those of the
 *  device. */
AR_NODISCARD ar_status ari_routed_host_init(ari_routed_host *r, ar_ctx *ctx, const ari_chosen *of, const ar_tensor *z,
                                            const ar_tensor *g);
void ari_routed_host_fini(ari_routed_host *r);
/** A tensor's numbers, int32 or as fp32. Gives; free(). Errors: AR_ERR_MEMORY, those of the device. */
AR_NODISCARD ar_status ari_to_host(ar_ctx *ctx, void **gives, const ar_tensor *t);
/** route_backward of r's g and weight by a rule that does not divide. Errors: those of the device. */
AR_NODISCARD ar_status ari_routed_host_backward(const ari_routed_host *r, ar_ctx *ctx, const ar_tensor *dz,
                                                const ari_chosen *of, const ar_route_rule *rule);

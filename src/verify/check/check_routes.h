/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "ref/context/context.h"
#include "sim/plan/ops.h"
#include "verify/reference/reference.h"

/** What moves in a run as the routes say, from the baseline's ones and the layout alone: each token's experts, and where
 *  they and the token are. */
AR_NODISCARD ar_status ari_check_routed(ari_routed *routed, const ari_reference *ref, const ari_step_case *c);

/* A rank of a dry run, whose experts are those that the baseline has chosen. */
typedef struct ari_routed_rank {
    const ari_reference *ref;
    const ari_step_case *c;
    int rank;
} ari_routed_rank;
/** The read of ari_known_routes; user: an ari_routed_rank. Errors: AR_ERR_INTERNAL (the baseline has no such router,
 *  the layout no such tokens). */
AR_NODISCARD ar_status ari_check_read_routes(void *user, const ar_ctx *ctx, int32_t *expert, const size_t shape[3],
                                             const char *router, int sharer);

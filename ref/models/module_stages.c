/* SPDX-License-Identifier: Apache-2.0 */
/* A user's list of modules, cut into the stages of a pipeline. */
#include <string.h>

#include "ref/core/size.h"
#include "ref/layers/experts/balance.h"
#include "ref/models/stages.h"

ar_status ar_sequential_cut(ar_module *m, ar_ctx *ctx, size_t first, size_t layers, int sample_ndim,
                            const size_t *sample_shape)
{
    ar_parallel p = ctx->layout;
    const size_t n = m->ops->children ? m->ops->children(m, NULL, 0) : 0;
    const size_t ranks = (size_t)ar_comm_size(ctx->pipeline), all = ranks * (size_t)p.virtual_stages;
    ari_stages stages = {.n = p.virtual_stages, .layers = n, .between = {.ndim = sample_ndim}};
    ARI_OWNED ari_staged *child = NULL;
    if (first + layers > n || sample_ndim < 1 || sample_ndim > AR_SAMPLE_DIMS)
        return ar_error_set(AR_ERR_ARG, "%s: %zu of %zu modules from %zu on, and samples of %d dimensions", m->name,
                            layers, n, first, sample_ndim);
    AR_TRY(ari_sequential_recompute(m, first, first + layers, &ctx->recompute));
    p.schedule = p.virtual_stages > 1 ? AR_PP_INTERLEAVED : AR_PP_1F1B;
    AR_TRY(ari_stages_check_layers(&p, layers, first + layers < n));
    AR_TRY(ari_balance_routers(&stages.routers, m));
    memcpy(stages.between.shape, sample_shape, (size_t)sample_ndim * sizeof *sample_shape);
    AR_TRY(ARI_ALLOC_ZERO(&child, n, "stages"));
    for (size_t at = 0; at < all; at++) {
        size_t begin, count;
        ar_stage_layers(&begin, &count, &p.stages, layers, all, at);
        const size_t from = at == 0 ? 0 : first + begin, to = at + 1 == all ? n : first + begin + count;
        for (size_t i = from; i < to; i++)
            child[i] = (ari_staged){.rank = (int)(at % ranks), .stage = (int)(at / ranks), .layer = i, .unit = true};
    }
    return ari_sequential_keep(m, child, &stages, ctx);
}

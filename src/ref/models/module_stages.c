/* SPDX-License-Identifier: Apache-2.0 */
/* A user's list of modules, cut into the stages of a pipeline. */
#include <stdlib.h>

#include "ref/core/size.h"
#include "ref/layers/parts.h"
#include "ref/models/stages.h"

ar_status ar_sequential_cut(ar_module *m, ar_ctx *ctx, size_t first, size_t layers, int sample_ndim,
                            const size_t *sample_shape)
{
    ar_parallel p = ctx->layout;
    const size_t n = m->ops->children ? m->ops->children(m, NULL, 0) : 0, own = (size_t)p.virtual_stages;
    const size_t ranks = (size_t)ar_comm_size(ctx->pipeline), rank = (size_t)ar_comm_rank(ctx->pipeline);
    ari_between between = {.ndim = sample_ndim};
    ari_range *stage = NULL;
    if (first + layers > n || sample_ndim < 1 || sample_ndim > AR_SAMPLE_DIMS)
        return ar_error_set(AR_ERR_ARG, "%s: %zu of %zu modules from %zu on, and samples of %d dimensions", m->name,
                            layers, n, first, sample_ndim);
    AR_TRY(ari_sequential_recompute(m, first, first + layers, &ctx->recompute));
    p.schedule = own > 1 ? AR_PP_INTERLEAVED : AR_PP_1F1B;
    AR_TRY(ari_stages_check_layers(&p, layers, first + layers < n));
    for (int d = 0; d < sample_ndim; d++)
        between.shape[d] = sample_shape[d];
    AR_TRY(ARI_ALLOC_ZERO(&stage, own, "stages"));
    for (size_t i = 0; i < own; i++) {
        const size_t at = i * ranks + rank;
        size_t begin, count;
        ar_stage_layers(&begin, &count, &p.stages, layers, ranks * own, at);
        stage[i] = (ari_range){at == 0 ? 0 : first + begin, at + 1 == ranks * own ? n : first + begin + count};
    }
    const ar_status st = ari_sequential_keep(m, stage, own, &between);
    free(stage);
    return st;
}

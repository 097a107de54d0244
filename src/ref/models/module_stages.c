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
    size_t *end = NULL;
    int *rank_of = NULL;
    ar_status st = AR_OK;
    if (first + layers > n || sample_ndim < 1 || sample_ndim > AR_SAMPLE_DIMS)
        return ar_error_set(AR_ERR_ARG, "%s: %zu of %zu modules from %zu on, and samples of %d dimensions", m->name,
                            layers, n, first, sample_ndim);
    AR_TRY(ari_sequential_recompute(m, first, first + layers, &ctx->recompute));
    p.schedule = own > 1 ? AR_PP_INTERLEAVED : AR_PP_1F1B;
    AR_TRY(ari_stages_check_layers(&p, layers, first + layers < n));
    for (int d = 0; d < sample_ndim; d++)
        between.shape[d] = sample_shape[d];
    AR_TRY_TO(done, st, ARI_ALLOC_ZERO(&end, own, "stages"));
    AR_TRY_TO(done, st, ARI_ALLOC_ZERO(&rank_of, n, "stages"));
    for (size_t at = 0; at < ranks * own; at++) {
        size_t begin, count;
        ar_stage_layers(&begin, &count, &p.stages, layers, ranks * own, at);
        const size_t from = at == 0 ? 0 : first + begin, to = at + 1 == ranks * own ? n : first + begin + count;
        for (size_t i = from; i < to; i++)
            rank_of[i] = (int)(at % ranks);
        if (at % ranks == rank)
            end[at / ranks] = to - from + (at / ranks > 0 ? end[at / ranks - 1] : 0);
    }
    st = ari_sequential_keep(m, end, own, rank_of, ctx, &between);
done:
    free(rank_of);
    free(end);
    return st;
}

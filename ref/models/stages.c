/* SPDX-License-Identifier: Apache-2.0 */
/* Assigns layers to the stages of a pipeline, and checks which layouts of stages are legal. */
#include "ref/models/stages.h"

#include <limits.h>
#include <string.h>

#include "anyrank/config.h"
#include "ref/core/schedule_private.h"
#include "ref/core/size.h"
#include "ref/core/text.h"
#include "ref/layers/experts/balance.h"
#include "ref/models/family.h"
#include "ref/models/parallel_private.h"
#include "ref/pipeline/schedule_private.h"
#include "ref/placement/context_private.h"

int ari_parallel_stages(const ar_parallel *p)
{
    const int64_t n = (int64_t)ari_at_least_one(p->pp) * ari_at_least_one(p->virtual_stages);
    return n > INT_MAX ? INT_MAX : (int)n; /* a value that no check accepts */
}

static ar_status copy_schedule(ar_pipeline_schedule **out, const ar_pipeline_schedule *s)
{
    const ar_pp_operation *lists[AR_MAX_STAGES];
    size_t counts[AR_MAX_STAGES];
    const ar_pipeline_shape shape = ari_pipeline_schedule_shape(s);
    for (int r = 0; r < shape.ranks; r++)
        lists[r] = ari_pipeline_schedule_rank(s, r, &counts[r]);
    return ari_pipeline_schedule_from_lists(out, shape, lists, counts);
}

ar_status ari_parallel_schedule(ar_pipeline_schedule **out, const ar_parallel *p)
{
    return p->own_schedule
               ? copy_schedule(out, p->own_schedule)
               : ari_pipeline_schedule_create(out, p->schedule, ari_at_least_one(p->pp),
                                              ari_at_least_one(p->virtual_stages), ari_at_least_one(p->micro_batches));
}

void ari_stages_text(char out[ARI_STAGES_TEXT], const ar_stages *s)
{
    ari_text t = ari_text_in(out, ARI_STAGES_TEXT);
    for (int i = 0; i < s->n && i < AR_MAX_STAGES; i++)
        ari_say(&t, "%s%d", i > 0 ? "," : "", s->layers[i]);
}

static ar_status check_given(const ar_stages *stages, size_t layers, bool has_end, size_t n)
{
    size_t sum = 0;
    if ((size_t)stages->n != n)
        return ar_error_set(AR_ERR_ARG, "layers are given for %d stages of %zu: give one number for each", stages->n,
                            n);
    for (size_t i = 0; i < n; i++) {
        if (stages->layers[i] == 0 && i > 0 && i + 1 < n)
            return ar_error_set(AR_ERR_ARG,
                                "stage %zu has no layers; only the first, which has the embedding, and the last, which "
                                "has the head, can do without",
                                i);
        sum += stages->layers[i];
    }
    if (stages->layers[n - 1] == 0 && !has_end)
        return ar_error_set(AR_ERR_ARG,
                            "stage %zu has nothing: no layers, and the model neither a final norm nor a head", n - 1);
    if (sum != layers)
        return ar_error_set(AR_ERR_ARG, "the layers given for %zu stages are %zu; the model has %zu", n, sum, layers);
    return AR_OK;
}

ar_status ari_given_schedule_check(const ar_parallel *p)
{
    if (!p->own_schedule)
        return AR_OK;
    const int stages = ari_parallel_stages(p);
    const ar_pipeline_shape s = ari_pipeline_schedule_shape(p->own_schedule);
    const int micro = ari_at_least_one(p->micro_batches);
    if (s.ranks == p->pp && s.stages == stages && s.micro_batches == micro)
        return AR_OK;
    return ar_error_set(AR_ERR_ARG,
                        "the schedule is one of %d ranks, %d stages and %d micro-batches, the layout (pp=%d) of %d "
                        "ranks, %d stages and %d micro-batches",
                        s.ranks, s.stages, s.micro_batches, p->pp, p->pp, stages, micro);
}

static ar_status stages_check_layers(const ar_parallel *p, size_t layers, bool has_end);

ar_status ari_stages_check(const ar_parallel *p, const ar_config *c)
{
    return stages_check_layers(p, c->layers, c->final_norm || ari_part_path(ari_family_of(c->arch), ARI_HEAD));
}

/* Checks the stages for a number of layers. has_end: the last stage has something besides layers. */
static ar_status stages_check_layers(const ar_parallel *p, size_t layers, bool has_end)
{
    const size_t n = (size_t)ari_parallel_stages(p);
    if ((unsigned)p->schedule >= AR_PP_SCHEDULES)
        return ar_error_set(AR_ERR_ARG, "schedule %d, expected 0 (1f1b) to %d", (int)p->schedule, AR_PP_SCHEDULES - 1);
    if (ari_at_least_one(p->pp) == 1) {
        if (n > 1 || p->stages.n > 0 || p->own_schedule)
            return ar_error_set(AR_ERR_ARG, "%s without a pipeline: give a pp of at least 2",
                                n > 1             ? "virtual stages"
                                : p->own_schedule ? "a schedule"
                                                  : "layers of stages");
        return AR_OK;
    }
    if (p->forward_first)
        return ar_error_set(AR_ERR_ARG, "forward first in a pipeline, whose order is its schedule's: take gpipe");
    AR_TRY(ari_given_schedule_check(p));
    if (!p->own_schedule && (p->schedule == AR_PP_INTERLEAVED) != (n > (size_t)p->pp))
        return ar_error_set(AR_ERR_ARG, "schedule %s with %zu stages on %d ranks: %s",
                            ari_pp_schedule_name(p->schedule), n, p->pp,
                            n > (size_t)p->pp ? "several stages of a rank take turns in interleaved"
                                              : "interleaved takes turns between the stages of a rank: give virtual "
                                                "stages of at least 2");
    if (n > AR_MAX_STAGES)
        return ar_error_set(AR_ERR_ARG, "%zu stages, at most %d", n, AR_MAX_STAGES);
    if (p->stages.n > 0)
        return check_given(&p->stages, layers, has_end, n);
    if (n > layers)
        return ar_error_set(AR_ERR_INDIVISIBLE,
                            "%zu layer%s cannot be split over %zu stages (pp=%d); use at most one stage for each layer",
                            layers, ARI_PLURAL(layers), n, p->pp);
    return AR_OK;
}

/* --- stages of a module ------------------------------------------------------------------------------------------- */

/* A user's list of modules, cut into the stages of a pipeline. */

ar_status ar_sequential_cut(ar_module *m, ar_ctx *ctx, size_t first_layer, size_t layers, int sample_ndim,
                            const size_t *sample_shape)
{
    ar_parallel p = ctx->layout;
    const size_t n = m->ops->children ? m->ops->children(m, NULL, 0) : 0;
    const size_t ranks = (size_t)ar_comm_size(ctx->pipeline), total_stages = ranks * (size_t)p.virtual_stages;
    ari_stages stages = {.n = p.virtual_stages, .layers = n, .boundary = {.ndim = sample_ndim}};
    ARI_OWNED ari_staged *child = NULL;
    if (first_layer + layers > n || sample_ndim < 1 || sample_ndim > AR_SAMPLE_DIMS)
        return ar_error_set(AR_ERR_ARG, "%s: %zu of %zu modules from %zu on, and samples of %d dimensions", m->name,
                            layers, n, first_layer, sample_ndim);
    AR_TRY(ari_sequential_recompute(m, first_layer, first_layer + layers, &ctx->recompute));
    p.schedule = p.virtual_stages > 1 ? AR_PP_INTERLEAVED : AR_PP_1F1B;
    AR_TRY(stages_check_layers(&p, layers, first_layer + layers < n));
    AR_TRY(ari_balance_routers(&stages.routers, m));
    memcpy(stages.boundary.shape, sample_shape, (size_t)sample_ndim * sizeof *sample_shape);
    AR_TRY(ARI_ALLOC_ZERO(&child, n, "stages"));
    for (size_t stage = 0; stage < total_stages; stage++) {
        size_t begin, count;
        ari_stage_layers(&begin, &count, &p.stages, layers, total_stages, stage);
        const size_t child_begin = stage == 0 ? 0 : first_layer + begin,
                     child_end = stage + 1 == total_stages ? n : first_layer + begin + count;
        for (size_t i = child_begin; i < child_end; i++)
            child[i] =
                (ari_staged){.rank = (int)(stage % ranks), .stage = (int)(stage / ranks), .layer = i, .unit = true};
    }
    return ari_sequential_keep(m, child, &stages, ctx);
}

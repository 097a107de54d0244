/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/context/context.h"
#include "ref/core/record.h"
#include "ref/core/size.h"
#include "ref/layers/experts/balance.h"
#include "ref/layers/experts/scores.h"
#include "ref/layers/faults.h"
#include "ref/layers/loss.h"
#include "ref/layers/parts.h"
#include "ref/layers/share.h"
#include "ref/models/family.h"
#include "ref/models/model.h"
#include "ref/models/stages.h"

struct ar_model {
    ar_config config;
    int rank, ranks, stages; /* of the pipeline; stages: of this rank */
    ar_stages given;
    bool first, last;        /* this rank has the embedding; what comes after the blocks */
    ar_embedding *embedding; /* on the last rank of a pipeline the table that a tied head shares with the first's */
    ar_module **blocks;      /* [config.layers]; NULL: another rank's */
    ar_module *final_norm;   /* NULL: none */
    ar_lm_head *head;        /* NULL: the loss is the sum of the output */
    ar_param sum;            /* that sum, without a head: only its gradient is used */
};

/* Stage i of this rank's, as one of the pipeline. */
typedef struct stage {
    bool first, last;
    size_t begin, end; /* layers */
} stage;

static stage stage_of(const ar_model *m, int i)
{
    const size_t all = (size_t)(m->ranks * m->stages), at = (size_t)(i * m->ranks + m->rank);
    stage s = {.first = at == 0, .last = at + 1 == all};
    ar_stage_layers(&s.begin, &s.end, &m->given, m->config.layers, all, at);
    s.end += s.begin;
    return s;
}

size_t ar_model_units(const ar_model *m, ar_unit *out, size_t cap, int *root)
{
    size_t count = 0;
    for (int i = 0; i < m->stages; i++) {
        const stage s = stage_of(m, i);
        for (size_t layer = s.begin; layer < s.end; layer++, count++) {
            if (count < cap)
                out[count] = (ar_unit){m->blocks[layer], i};
        }
    }
    *root = m->first ? 0 : m->stages - 1;
    return count;
}

static ar_status create_embedding(ar_model *m, ar_ctx *ctx, ar_embedding_split split, const ari_family *f)
{
    const ar_config *c = &m->config;
    const char *positions = m->first && c->learned_positions ? ari_part_path(f, ARI_POSITIONS) : NULL;
    if (!m->first && !(m->last && c->tied))
        return AR_OK;
    AR_TRY(ar_embedding_create(&m->embedding, ctx, split, ari_part_path(f, ARI_TOKENS), c->vocab, c->hidden,
                               c->initializer_range, positions, c->max_positions, f->embedded));
    ar_embedding_scale(m->embedding, c->embed_scale);
    if (c->pads)
        ar_embedding_pad(m->embedding, c->pad_id);
    ar_embedding_token(m->embedding)->ends = m->ranks > 1 && c->tied;
    return AR_OK;
}

static ar_status create_blocks(ar_model *m, ar_ctx *ctx, const ar_plan *plan, bool sequence, const stage *s)
{
    for (size_t i = s->begin; i < s->end; i++) {
        ar_block_options o;
        ar_block_split block;
        char name[96];
        AR_TRY(ar_config_block(&m->config, i, &o, name, sizeof name));
        AR_TRY(ar_plan_block(plan, &m->config, i, sequence, &block));
        o.split = &block;
        AR_TRY(ar_block_create(&m->blocks[i], ctx, name, &o));
    }
    return AR_OK;
}

/* Creates the parts after the blocks. */
static ar_status create_end(ar_model *m, ar_ctx *ctx, const ar_outer_split *split, const ari_family *f)
{
    const ar_config *c = &m->config;
    const char *head = ari_part_path(f, ARI_HEAD);
    const ari_norm_options norm = {.kind = c->norm, .h = c->hidden, .eps = c->norm_eps, .plus_one = c->norm_plus_one};
    if (!m->last)
        return AR_OK;
    if (c->final_norm)
        AR_TRY(ari_norm_create(&m->final_norm, ctx, ari_part_path(f, ARI_FINAL_NORM), &norm,
                               (ar_tp_redistribution){ari_placed_stream(ctx), split->final_norm}));
    if (!head)
        return ari_loss_init(&m->sum, ctx, ari_ctx_sp(ctx));
    AR_TRY(ar_lm_head_create(&m->head, ctx, &split->head, head, c->vocab, c->hidden,
                             c->tied ? ar_embedding_token(m->embedding) : NULL));
    ar_lm_head_cap(m->head, c->logit_cap);
    ar_lm_head_scale(m->head, c->logit_scale);
    return AR_OK;
}

/* The context's pipeline may not be one that ar_parallel_check has seen. */
static ar_status check_pipeline(const ar_ctx *ctx, const ar_config *c)
{
    ar_parallel p = ctx->layout;
    p.schedule = p.virtual_stages > 1 ? AR_PP_INTERLEAVED : AR_PP_1F1B;
    return ari_stages_check(&p, c);
}

ar_status ar_model_create(ar_model **gives, ar_ctx *ctx, const ar_config *c, const ar_plan *plan)
{
    const ar_plan fallback = {0};
    const ari_family *f = ari_family_of(c->arch);
    if (!plan)
        plan = &fallback;
    const int tp = ar_comm_size(ar_ctx_tp(ctx));
    const bool sequence = ar_plan_by_tokens(plan, tp, ari_ctx_sp(ctx));
    ar_outer_split split;
    AR_TRY(ari_config_check_tp(c, tp, ari_experts_whole(&ctx->layout) ? 1 : tp, plan));
    AR_TRY(check_pipeline(ctx, c));
    AR_TRY(ar_plan_outer(plan, c, sequence, &split));
    AR_TRY(ari_streams_check(c, ctx->seed));
    ar_model *m = NULL;
    ar_status st = AR_OK;
    AR_TRY(ari_alloc_zero((void **)&m, 1, sizeof *m, "a model"));
    m->config = *c;
    ctx->layers = c->layers;
    m->rank = ar_comm_rank(ctx->pipeline);
    m->ranks = ar_comm_size(ctx->pipeline);
    m->stages = ctx->layout.virtual_stages;
    m->given = ctx->layout.stages;
    m->first = m->rank == 0;
    m->last = m->rank + 1 == m->ranks;
    AR_TRY_TO(failed, st, ari_alloc_zero((void **)&m->blocks, c->layers, sizeof *m->blocks, "blocks"));
    AR_TRY_TO(failed, st, create_embedding(m, ctx, split.tokens, f));
    for (int i = 0; i < m->stages; i++) {
        const stage s = stage_of(m, i);
        AR_TRY_TO(failed, st, create_blocks(m, ctx, plan, sequence, &s));
    }
    AR_TRY_TO(failed, st, create_end(m, ctx, &split, f));
    *gives = m;
    return AR_OK;
failed:
    ar_model_destroy(m);
    return st;
}

void ar_model_destroy(ar_model *m)
{
    if (!m)
        return;
    ar_lm_head_destroy(m->head);
    ar_param_fini(&m->sum);
    ar_module_destroy(m->final_norm);
    for (size_t i = 0; m->blocks && i < m->config.layers; i++)
        ar_module_destroy(m->blocks[i]);
    ar_embedding_destroy(m->embedding);
    free(m->blocks);
    free(m);
}

static void put_param(ar_param **out, size_t cap, size_t *count, ar_param *p)
{
    if (*count < cap)
        out[*count] = p;
    *count += *count < SIZE_MAX;
}

static void put_module(ar_param **out, size_t cap, size_t *count, ar_module *m)
{
    const size_t room = *count < cap ? cap - *count : 0;
    const size_t n = ar_module_params(m, room ? out + *count : NULL, room, false);
    *count = n == SIZE_MAX || *count == SIZE_MAX ? SIZE_MAX : *count + n;
}

size_t ar_model_params(ar_model *m, ar_param **out, size_t cap)
{
    size_t count = 0;
    if (m->first)
        put_param(out, cap, &count, ar_embedding_token(m->embedding));
    if (m->first && ar_embedding_position(m->embedding))
        put_param(out, cap, &count, ar_embedding_position(m->embedding));
    for (size_t i = 0; i < m->config.layers; i++) {
        if (m->blocks[i])
            put_module(out, cap, &count, m->blocks[i]);
    }
    if (m->final_norm)
        put_module(out, cap, &count, m->final_norm);
    if (m->head && (!m->config.tied || !m->first))
        put_param(out, cap, &count, ar_lm_head_weight(m->head));
    return count;
}

typedef struct weight_source {
    uint64_t seed;
    const float *(*find)(void *, const char *, size_t); /* NULL: fresh */
    void *user;
} weight_source;

static ar_status set_one(ar_param *p, ar_ctx *ctx, const weight_source *s)
{
    if (!s->find) {
        AR_TRY(ar_param_fresh(p, ctx, s->seed));
    } else {
        char other[sizeof p->name];
        size_t count = 1;
        for (int d = 0; d < p->layout.ndim; d++)
            count *= p->layout.shape[d];
        const float *full = s->find(s->user, ari_fault_layer_name(other, sizeof other, ctx, p->name, true), count);
        if (!full)
            return ar_error_set(AR_ERR_NOT_FOUND, "the weights hold no tensor '%s' of %zu elements", p->name, count);
        AR_TRY(ar_param_set(p, ctx, full));
    }
    return AR_OK;
}

ar_status ari_model_list(ar_param ***gives, size_t *n, ar_model *m)
{
    ar_param **all = NULL;
    *n = ar_model_params(m, NULL, 0);
    if (*n == SIZE_MAX)
        return ar_error_set(AR_ERR_MEMORY, "no memory to list parameters");
    AR_TRY(ari_alloc((void **)&all, *n, sizeof *all, "a list of parameters"));
    if (ar_model_params(m, all, *n) != *n) {
        free(all);
        return ar_error_set(AR_ERR_MEMORY, "no memory to list parameters");
    }
    *gives = all;
    return AR_OK;
}

static ar_status set_all(ar_model *m, ar_ctx *ctx, weight_source *s)
{
    size_t n = 0;
    ar_param **all = NULL;
    ar_status st = AR_OK;
    AR_TRY(ari_model_list(&all, &n, m));
    ari_span_begin("weights");
    for (size_t i = 0; i < n; i++)
        AR_TRY_TO(done, st, set_one(all[i], ctx, s));
    AR_TRY_TO(done, st, ar_params_broadcast(all, n, ctx));
    for (size_t i = 0; i < n; i++)
        AR_TRY_TO(done, st, ari_value_tap(all[i], ctx, 'i'));
done:
    free(all);
    return ari_span_end(st);
}

ar_status ar_model_fresh(ar_model *m, ar_ctx *ctx, uint64_t seed)
{
    weight_source s = {.seed = seed};
    AR_TRY(ari_streams_check(&m->config, seed));
    return set_all(m, ctx, &s);
}

ar_status ar_model_set(ar_model *m, ar_ctx *ctx, const float *(*find)(void *, const char *, size_t), void *user)
{
    weight_source s = {.find = find, .user = user};
    return set_all(m, ctx, &s);
}

bool ari_model_counts(const ar_model *m, const ar_ctx *ctx)
{
    return ar_config_balance(&m->config, &ctx->loss) >= AR_BALANCE_BATCH;
}

ar_status ari_model_share_counts(ar_model *m, ar_ctx *ctx)
{
    const bool together = ar_config_balance(&m->config, &ctx->loss) == AR_BALANCE_LAYERS;
    return ari_balance_share(m->blocks, m->config.layers, ctx, together ? m->config.experts.n : 0);
}

/* The losses of all layers' routers, added up in their order. */
static ar_status router_losses(const ar_model *m, ar_ctx *ctx, double *sum)
{
    float *of = NULL;
    *sum = 0.0;
    if (!ar_config_router_losses(&m->config, &ctx->loss))
        return AR_OK;
    AR_TRY(ARI_ALLOC_ZERO(&of, m->config.layers, "losses of routers"));
    ar_status st = AR_OK;
    for (size_t i = 0; i < m->config.layers && st == AR_OK; i++) {
        double value = 0.0;
        st = ari_balance_value(&m->blocks[i], 1, ctx, &value);
        of[i] = (float)value;
    }
    if (st == AR_OK)
        st = ari_combine(ctx, ctx->pipeline, of, m->config.layers, AR_F32, AR_SUM, "routers");
    for (size_t i = 0; i < m->config.layers; i++)
        *sum += (double)of[i];
    free(of);
    return st;
}

ar_status ari_model_update_biases(ar_model *m, ar_ctx *ctx)
{
    return ari_scores_update(m->blocks, m->config.layers, ctx);
}

ar_status ar_model_zero_grad(ar_model *m, ar_ctx *ctx)
{
    AR_TRY(ari_scores_zero(m->blocks, m->config.layers));
    if (ar_config_router_losses(&m->config, &ctx->loss))
        AR_TRY(ari_balance_zero(m->blocks, m->config.layers, ctx));
    if (m->last)
        AR_TRY(m->head ? ar_lm_head_zero(m->head, ctx) : ar_param_zero_grad(&m->sum, ctx));
    if (m->embedding)
        AR_TRY(ar_param_zero_grad(ar_embedding_token(m->embedding), ctx));
    if (m->embedding && ar_embedding_position(m->embedding))
        AR_TRY(ar_param_zero_grad(ar_embedding_position(m->embedding), ctx));
    for (size_t i = 0; i < m->config.layers; i++) {
        if (m->blocks[i])
            AR_TRY(ar_module_zero_grad(m->blocks[i], ctx));
    }
    if (m->final_norm)
        AR_TRY(ar_module_zero_grad(m->final_norm, ctx));
    return m->head && !m->config.tied ? ar_param_zero_grad(ar_lm_head_weight(m->head), ctx) : AR_OK;
}

ar_status ar_model_reduce_grads(ar_model *m, ar_ctx *ctx)
{
    size_t n = 0;
    ar_param **all = NULL;
    AR_TRY(ari_model_list(&all, &n, m));
    ari_span_begin("reduce gradients");
    const ar_status st = ari_span_end(ar_params_reduce(all, n, ctx));
    free(all);
    return st;
}

ar_status ar_model_loss(ar_model *m, ar_ctx *ctx, float *loss, size_t targets)
{
    double more = 0.0;
    *loss = 0.0f;
    ari_span_begin("loss");
    ar_status st = router_losses(m, ctx, &more);
    if (st == AR_OK && m->last)
        st = m->head ? ar_lm_head_loss(m->head, ctx, loss, targets, more)
                     : ari_loss_value(&m->sum, ctx, loss, 1.0, more);
    return ari_span_end(st == AR_OK ? ari_loss_share(ctx, loss) : st);
}

ar_status ari_model_between(const ar_model *m, ar_ctx *ctx, ar_tensor *t, const ar_batch *batch)
{
    const ar_positions own = ari_own_positions(ctx, batch->seq, true);
    const size_t shape[3] = {batch->batch, ar_positions_count(&own), m->config.hidden};
    ctx->use = ARI_USE_BETWEEN;
    return ar_ctx_tensor(ctx, t, ctx->activations, 3, shape);
}

/* --- forward ------------------------------------------------------------------------------------------------------ */

static ar_status forward_module(ar_module *module, ar_ctx *ctx, ar_saved *saved, ar_tensor *x, const ar_batch *batch)
{
    ar_tensor y;
    AR_TRY(ar_module_forward(module, ctx, saved, &y, x, batch));
    *x = y;
    return AR_OK;
}

static ar_status forward_end(ar_model *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *x, const ar_batch *batch)
{
    const ari_family *f = ari_family_of(m->config.arch);
    if (m->ranks > 1 && m->head && ar_faulty(ctx, AR_FAULT_pp_loss_last_micro_batch))
        AR_TRY(ar_lm_head_zero(m->head, ctx));
    ctx->use = ARI_USE_OUTER;
    if (m->final_norm)
        AR_TRY(forward_module(m->final_norm, ctx, saved, x, batch));
    ari_span_begin("%s:fwd", m->head ? ari_part_path(f, ARI_HEAD) : "loss");
    return ari_span_end(m->head ? ar_lm_head_forward(m->head, ctx, saved, x, batch) : ari_loss_add(&m->sum, ctx, x));
}

ar_status ar_model_stage_forward(ar_model *m, ar_ctx *ctx, ar_saved *saved, int i, ar_tensor *y, const ar_tensor *x,
                                 const ar_batch *batch)
{
    const stage s = stage_of(m, i);
    ar_tensor at;
    ar_ctx_place(ctx, batch);
    ctx->use = ARI_USE_OUTER;
    if (s.first) {
        ari_span_begin("%s:fwd", ari_family_of(m->config.arch)->embedded);
        AR_TRY(ari_span_end(ar_embedding_forward(m->embedding, ctx, saved, &at, batch)));
    } else {
        at = *x;
    }
    ctx->use = ARI_USE_BETWEEN;
    for (size_t layer = s.begin; layer < s.end; layer++)
        AR_TRY(forward_module(m->blocks[layer], ctx, saved, &at, batch));
    if (s.last && !ctx->counting)
        return forward_end(m, ctx, saved, &at, batch);
    if (!s.last)
        *y = at;
    return AR_OK;
}

static ar_status check_whole(const ar_model *m)
{
    return m->ranks == 1 ? AR_OK
                         : ar_error_set(AR_ERR_ARG,
                                        "rank %d of a pipeline of %d has some stages of the model: go "
                                        "through them with ar_model_stage_forward and .._backward",
                                        m->rank, m->ranks);
}

ar_status ar_model_forward(ar_model *m, ar_ctx *ctx, ar_saved *saved, const ar_batch *batch)
{
    AR_TRY(check_whole(m));
    return ar_model_stage_forward(m, ctx, saved, 0, NULL, NULL, batch);
}

/* --- backward ----------------------------------------------------------------------------------------------------- */

/* dy of what comes after the blocks. */
static ar_status backward_loss(ar_model *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *dy, const ar_batch *batch)
{
    if (m->head) {
        ari_span_begin("%s:bwd", ari_part_path(ari_family_of(m->config.arch), ARI_HEAD));
        return ari_span_end(ar_lm_head_backward(m->head, ctx, saved, dy, batch));
    }
    AR_TRY(ari_model_between(m, ctx, dy, batch));
    return ARI_KERNEL(ctx, fill, dy, (float)ctx->loss_scale);
}

/* dy becomes the gradient of the module's input. */
static ar_status backward_module(ar_module *module, ar_ctx *ctx, ar_saved *saved, ar_tensor *dy, const ar_batch *batch)
{
    ar_tensor dx;
    AR_TRY(ar_module_backward(module, ctx, saved, &dx, dy, batch));
    ar_ctx_release(ctx, dy);
    *dy = dx;
    return AR_OK;
}

ar_status ar_model_stage_backward(ar_model *m, ar_ctx *ctx, ar_saved *saved, int i, ar_tensor *dx, const ar_tensor *dy,
                                  const ar_batch *batch)
{
    const stage s = stage_of(m, i);
    ar_tensor at;
    ar_ctx_place(ctx, batch);
    ctx->use = ARI_USE_OUTER;
    if (s.last)
        AR_TRY(backward_loss(m, ctx, saved, &at, batch));
    else
        at = *dy;
    if (s.last && m->final_norm)
        AR_TRY(backward_module(m->final_norm, ctx, saved, &at, batch));
    ctx->use = ARI_USE_BETWEEN;
    for (size_t layer = s.end; layer-- > s.begin;)
        AR_TRY(backward_module(m->blocks[layer], ctx, saved, &at, batch));
    if (!s.first) {
        *dx = at;
        return AR_OK;
    }
    ctx->use = ARI_USE_OUTER;
    ari_span_begin("%s:bwd", ari_family_of(m->config.arch)->embedded);
    return ari_span_end(ar_embedding_backward(m->embedding, ctx, saved, &at, batch));
}

ar_status ar_model_backward(ar_model *m, ar_ctx *ctx, ar_saved *saved, const ar_batch *batch)
{
    AR_TRY(check_whole(m));
    return ar_model_stage_backward(m, ctx, saved, 0, NULL, NULL, batch);
}

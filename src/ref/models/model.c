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
    ar_module **blocks;      /* [ar_config_blocks]; NULL: another rank's */
    ar_module *final_norm;   /* NULL: none */
    ar_lm_head *head;        /* NULL: the loss is the sum of the output */
    ar_param sum;            /* that sum, without a head: only its gradient is used */
    ar_lm_head *further[AR_MAX_MTP]; /* heads of the blocks for further tokens, with the same weight */
    size_t targets[AR_MAX_MTP];      /* of these, of the global batch */
};

/* Stage i of this rank's, as one of the pipeline. */
typedef struct stage {
    bool first, last;
    size_t begin, end; /* layers; after those of the last come the blocks for further tokens */
} stage;

static size_t blocks_of(const ar_model *m)
{
    return ar_config_blocks(&m->config);
}

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
        for (size_t layer = s.begin; layer < (s.last ? blocks_of(m) : s.end); layer++, count++) {
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
    if (!m->first && !(m->last && (c->tied || c->mtp > 0)))
        return AR_OK;
    AR_TRY(ar_embedding_create(&m->embedding, ctx, split, ari_part_path(f, ARI_TOKENS), c->vocab, c->hidden,
                               c->initializer_range, positions, c->max_positions, f->embedded));
    ar_embedding_scale(m->embedding, c->embed_scale);
    if (c->pads)
        ar_embedding_pad(m->embedding, c->pad_id);
    ar_embedding_token(m->embedding)->ends = m->ranks > 1 && (c->tied || c->mtp > 0);
    return AR_OK;
}

static ar_status create_block(ar_model *m, ar_ctx *ctx, const ar_plan *plan, bool sequence, size_t layer)
{
    const ar_config *c = &m->config;
    const ari_family *f = ari_family_of(c->arch);
    ar_block_options o;
    ar_block_split block;
    char name[96];
    AR_TRY(ar_config_block(c, layer, &o, name, sizeof name));
    AR_TRY(ar_plan_block(plan, c, layer, sequence, &block));
    o.split = &block;
    if (layer < c->layers)
        return ar_block_create(&m->blocks[layer], ctx, name, &o);
    const ari_mtp_options mtp = {.block = &o,
                                 .embedding = m->embedding,
                                 .norm = c->norm,
                                 .norm_eps = c->norm_eps,
                                 .norm_plus_one = c->norm_plus_one,
                                 .norm_no_bias = c->norm_no_bias,
                                 .tokens = "embed_tokens",
                                 .tokens_norm = ari_part_path(f, ARI_TOKENS_NORM),
                                 .entered_norm = ari_part_path(f, ARI_ENTERED_NORM),
                                 .joined = ari_part_path(f, ARI_JOINED),
                                 .made_norm = ari_part_path(f, ARI_MTP_NORM)};
    return ari_mtp_create(&m->blocks[layer], ctx, name, &mtp);
}

static ar_status create_blocks(ar_model *m, ar_ctx *ctx, const ar_plan *plan, bool sequence, const stage *s)
{
    for (size_t i = s->begin; i < s->end; i++)
        AR_TRY(create_block(m, ctx, plan, sequence, i));
    for (size_t i = m->config.layers; i < blocks_of(m) && s->last; i++)
        AR_TRY(create_block(m, ctx, plan, sequence, i));
    return AR_OK;
}

static void set_logits(const ar_model *m, ar_lm_head *head)
{
    ar_lm_head_cap(head, m->config.logit_cap);
    ar_lm_head_scale(head, m->config.logit_scale);
}

/* Each has the weight of the head, and 1/D of the weight of their losses. */
static ar_status create_further(ar_model *m, ar_ctx *ctx, const ar_outer_split *split)
{
    const ar_config *c = &m->config;
    for (size_t i = 0; i < c->mtp; i++) {
        char name[160], layer[24];
        snprintf(layer, sizeof layer, "%zu", c->layers + i);
        ari_role_path(name, sizeof name, c->arch, layer, ARI_MTP_HEAD);
        AR_TRY(ar_lm_head_create(&m->further[i], ctx, &split->head, name, c->vocab, c->hidden,
                                 ar_lm_head_weight(m->head)));
        set_logits(m, m->further[i]);
        ari_lm_head_weigh(m->further[i], c->mtp_weight / (double)c->mtp);
    }
    return AR_OK;
}

/* Creates the parts after the blocks. */
static ar_status create_end(ar_model *m, ar_ctx *ctx, const ar_outer_split *split, const ari_family *f)
{
    const ar_config *c = &m->config;
    const char *head = ari_part_path(f, ARI_HEAD);
    const ari_norm_options norm = {
        .kind = c->norm, .h = c->hidden, .eps = c->norm_eps, .plus_one = c->norm_plus_one, .no_bias = c->norm_no_bias};
    if (!m->last)
        return AR_OK;
    if (c->final_norm)
        AR_TRY(ari_norm_create(&m->final_norm, ctx, ari_part_path(f, ARI_FINAL_NORM), &norm,
                               (ar_tp_redistribution){ari_placed_stream(ctx), split->final_norm}));
    if (!head)
        return ari_loss_init(&m->sum, ctx, ari_ctx_sp(ctx));
    AR_TRY(ar_lm_head_create(&m->head, ctx, &split->head, head, c->vocab, c->hidden,
                             c->tied ? ar_embedding_token(m->embedding) : NULL));
    set_logits(m, m->head);
    return create_further(m, ctx, split);
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
    AR_TRY_TO(failed, st, ari_alloc_zero((void **)&m->blocks, ar_config_blocks(c), sizeof *m->blocks, "blocks"));
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
    for (size_t i = 0; i < AR_MAX_MTP; i++)
        ar_lm_head_destroy(m->further[i]);
    ar_lm_head_destroy(m->head);
    ar_param_fini(&m->sum);
    ar_module_destroy(m->final_norm);
    for (size_t i = 0; m->blocks && i < blocks_of(m); i++)
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
    for (size_t i = 0; i < blocks_of(m); i++) {
        if (m->blocks[i])
            put_module(out, cap, &count, m->blocks[i]);
    }
    if (m->final_norm)
        put_module(out, cap, &count, m->final_norm);
    if (m->head && (!m->config.tied || !m->first))
        put_param(out, cap, &count, ar_lm_head_weight(m->head));
    if (m->embedding && !m->first && !m->config.tied)
        put_param(out, cap, &count, ar_embedding_token(m->embedding));
    return count;
}

bool ari_model_counts(const ar_model *m, const ar_ctx *ctx)
{
    return ar_config_balance(&m->config, &ctx->loss) >= AR_BALANCE_BATCH;
}

ar_status ari_model_share_counts(ar_model *m, ar_ctx *ctx)
{
    const bool together = ar_config_balance(&m->config, &ctx->loss) == AR_BALANCE_LAYERS;
    return ari_balance_share(m->blocks, blocks_of(m), ctx, together ? m->config.experts.n : 0);
}

/* The losses of all layers' routers, added up in their order. */
static ar_status router_losses(const ar_model *m, ar_ctx *ctx, double *sum)
{
    float *of = NULL;
    *sum = 0.0;
    if (!ar_config_router_losses(&m->config, &ctx->loss))
        return AR_OK;
    AR_TRY(ARI_ALLOC_ZERO(&of, blocks_of(m), "losses of routers"));
    ar_status st = AR_OK;
    for (size_t i = 0; i < blocks_of(m) && st == AR_OK; i++) {
        double value = 0.0;
        st = ari_balance_value(&m->blocks[i], 1, ctx, &value);
        of[i] = (float)value;
    }
    if (st == AR_OK)
        st = ari_combine(ctx, ctx->pipeline, of, blocks_of(m), AR_F32, AR_SUM, "routers");
    for (size_t i = 0; i < blocks_of(m); i++)
        *sum += (double)of[i];
    free(of);
    return st;
}

ar_status ari_model_update_biases(ar_model *m, ar_ctx *ctx)
{
    return ari_scores_update(m->blocks, blocks_of(m), ctx);
}

/* With the mistake of not reaching a module's children the parameters of blocks, whose names have a number, keep theirs. */
static ar_status zero_each(ar_param *const *params, size_t n, ar_ctx *ctx)
{
    for (size_t i = 0; i < n; i++)
        if (!strpbrk(params[i]->name, "0123456789") || !ar_faulty(ctx, AR_FAULT_zero_grad_not_recursive))
            AR_TRY(ar_param_zero_grad(params[i], ctx));
    return AR_OK;
}

static ar_status for_params(ar_model *m, ar_ctx *ctx, ar_status (*f)(ar_param *const *params, size_t n, ar_ctx *ctx))
{
    size_t n = 0;
    ar_param **all = NULL;
    AR_TRY(ari_model_list(&all, &n, m));
    const ar_status st = f(all, n, ctx);
    free(all);
    return st;
}

ar_status ar_model_zero_grad(ar_model *m, ar_ctx *ctx)
{
    AR_TRY(ari_scores_zero(m->blocks, blocks_of(m)));
    if (ar_config_router_losses(&m->config, &ctx->loss))
        AR_TRY(ari_balance_zero(m->blocks, blocks_of(m), ctx));
    if (m->last)
        AR_TRY(m->head ? ar_lm_head_zero(m->head, ctx) : ar_param_zero_grad(&m->sum, ctx));
    for (size_t i = 0; i < m->config.mtp && m->last; i++)
        AR_TRY(ar_lm_head_zero(m->further[i], ctx));
    return for_params(m, ctx, zero_each);
}

ar_status ar_model_reduce_grads(ar_model *m, ar_ctx *ctx)
{
    ari_span_begin("reduce gradients");
    return ari_span_end(for_params(m, ctx, ar_params_reduce));
}

const ar_config *ari_model_config(const ar_model *m)
{
    return &m->config;
}

void ari_model_mtp_targets(ar_model *m, const size_t *targets)
{
    for (size_t i = 0; i < m->config.mtp; i++)
        m->targets[i] = targets[i];
}

/* The losses of the blocks for further tokens, each over its own targets. */
static ar_status further_losses(ar_model *m, ar_ctx *ctx, double *sum)
{
    for (size_t i = 0; i < m->config.mtp && m->last; i++) {
        double share = 0.0;
        AR_TRY(ari_lm_head_share(m->further[i], ctx, &share, m->targets[i]));
        *sum += share;
    }
    return AR_OK;
}

ar_status ar_model_loss(ar_model *m, ar_ctx *ctx, float *loss, size_t targets)
{
    double more = 0.0;
    *loss = 0.0f;
    ari_span_begin("loss");
    ar_status st = router_losses(m, ctx, &more);
    if (st == AR_OK)
        st = further_losses(m, ctx, &more);
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

static ar_status forward_head(ar_lm_head *head, const char *name, ar_ctx *ctx, ar_saved *saved, ar_tensor *x,
                              const ar_batch *batch)
{
    ctx->use = ARI_USE_OUTER;
    ari_span_begin("%s:fwd", name);
    return ari_span_end(ar_lm_head_forward(head, ctx, saved, x, batch));
}

/* Block i for further tokens, and its head unless routes are counted. x becomes what it makes. */
static ar_status forward_further(ar_model *m, size_t i, ar_ctx *ctx, ar_saved *saved, ar_tensor *x,
                                 const ar_batch *batch)
{
    ar_module *block = m->blocks[m->config.layers + i];
    int64_t *memory = NULL;
    ar_batch rolled;
    ctx->use = ARI_USE_BETWEEN;
    AR_TRY(ari_fault_roll(ctx, &rolled, &memory, batch, i + 1));
    m->targets[i] = batch->global_batch > 0 ? rolled.targets : ar_batch_targets(&rolled);
    ar_status st = forward_module(block, ctx, saved, x, &rolled);
    if (st == AR_OK && !ctx->counting)
        st = forward_head(m->further[i], block->name, ctx, saved, x, &rolled);
    free(memory);
    return st;
}

static ar_status forward_end(ar_model *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *x, const ar_batch *batch)
{
    const ari_family *f = ari_family_of(m->config.arch);
    if (ctx->counting && m->config.mtp == 0)
        return AR_OK;
    if (m->ranks > 1 && m->head && ar_faulty(ctx, AR_FAULT_pp_loss_last_micro_batch))
        AR_TRY(ar_lm_head_zero(m->head, ctx));
    ctx->use = ARI_USE_OUTER;
    if (m->final_norm)
        AR_TRY(forward_module(m->final_norm, ctx, saved, x, batch));
    if (!m->head) {
        ari_span_begin("loss:fwd");
        ari_work_moves(ARI_GPU_MOVES_LOSS, false, ar_tensor_count(x));
        return ari_span_end(ari_loss_add(&m->sum, ctx, x));
    }
    if (!ctx->counting)
        AR_TRY(forward_head(m->head, ari_part_path(f, ARI_HEAD), ctx, saved, x, batch));
    for (size_t i = 0; i < m->config.mtp; i++)
        AR_TRY(forward_further(m, i, ctx, saved, x, batch));
    return AR_OK;
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
    if (s.last)
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

/* dy becomes the gradient of the module's input. */
static ar_status backward_module(ar_module *module, ar_ctx *ctx, ar_saved *saved, ar_tensor *dy, const ar_batch *batch)
{
    ar_tensor dx;
    AR_TRY(ar_module_backward(module, ctx, saved, &dx, dy, batch));
    ar_ctx_release(ctx, dy);
    *dy = dx;
    return AR_OK;
}

static ar_status backward_head(ar_lm_head *head, const char *name, ar_ctx *ctx, ar_saved *saved, ar_tensor *dy,
                               const ar_batch *batch)
{
    ctx->use = ARI_USE_OUTER;
    ari_span_begin("%s:bwd", name);
    return ari_span_end(ar_lm_head_backward(head, ctx, saved, dy, batch));
}

/* dy = dy + more, which ends; without more it stays. */
static ar_status add_further(ar_ctx *ctx, ar_tensor *dy, ar_tensor *more, bool any)
{
    if (!any)
        return AR_OK;
    AR_TRY(ARI_KERNEL(ctx, add, dy, dy, more));
    ar_ctx_release(ctx, more);
    return AR_OK;
}

/* Of block i for further tokens: dy becomes the gradient of what it takes, from that of what it makes (any: unless it is the
 * last one), and its head's. */
static ar_status backward_further(ar_model *m, size_t i, ar_ctx *ctx, ar_saved *saved, ar_tensor *dy,
                                  const ar_batch *batch, bool any)
{
    ar_module *block = m->blocks[m->config.layers + i];
    int64_t *memory = NULL;
    ar_batch rolled;
    ar_tensor at;
    ar_param *weight = ar_lm_head_weight(m->head);
    AR_TRY(ari_fault_roll(ctx, &rolled, &memory, batch, i + 1));
    ari_fault_further_use(ctx, weight, true);
    ar_status st = backward_head(m->further[i], block->name, ctx, saved, &at, &rolled);
    ari_fault_further_use(ctx, weight, false);
    if (st == AR_OK)
        st = add_further(ctx, &at, dy, any);
    ctx->use = ARI_USE_BETWEEN;
    if (st == AR_OK)
        st = backward_module(block, ctx, saved, &at, &rolled);
    *dy = at;
    free(memory);
    return st;
}

/* dy of what comes after the blocks. */
static ar_status backward_loss(ar_model *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *dy, const ar_batch *batch)
{
    ar_tensor further;
    if (!m->head) {
        AR_TRY(ari_model_between(m, ctx, dy, batch));
        ari_work_moves(ARI_GPU_MOVES_LOSS, true, ar_tensor_count(dy));
        return ARI_KERNEL(ctx, fill, dy, (float)ctx->loss_scale);
    }
    for (size_t i = m->config.mtp; i-- > 0;)
        AR_TRY(backward_further(m, i, ctx, saved, &further, batch, i + 1 < m->config.mtp));
    AR_TRY(backward_head(m->head, ari_part_path(ari_family_of(m->config.arch), ARI_HEAD), ctx, saved, dy, batch));
    return add_further(ctx, dy, &further, m->config.mtp > 0);
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

/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/model.h"
#include "anyrank/context.h"

#include <stdio.h>
#include <stdlib.h>

#include "ref/context/context.h"
#include "ref/core/record.h"
#include "ref/core/size.h"
#include "ref/layers/faults.h"
#include "ref/layers/layers_private.h"
#include "ref/layers/loss.h"
#include "ref/layers/param_private.h"
#include "ref/layers/parts.h"
#include "ref/models/family.h"
#include "ref/models/model.h"
#include "ref/models/model_private.h"
#include "ref/models/plan_private.h"
#include "ref/models/stages.h"
#include "ref/placement/context_private.h"

ARI_OWNER(ar_model, ar_model_destroy)

enum {
    OUTER = 8
}; /* largest number of modules besides the blocks: an embedding, a norm, heads, the head of a chain of blocks */

struct ar_model {
    ar_config config;
    ar_module *module; /* list of the rank's modules, borrowed in child[] */
    ar_loss *loss;     /* the loss, on the rank with the pipeline's last stage */
};

/* The modules of a model during construction. */
typedef struct maker {
    ar_ctx *ctx;
    const ar_config *c;
    const ari_family *f;
    const ar_plan *plan;
    ar_outer_split split;
    bool sequence;
    int rank, ranks; /* of the pipeline */
    ar_module **child;
    ari_staged *child_stage; /* [n] stage of each child */
    size_t n;
    ari_stages stages;
    ar_module *embedding; /* on a pipeline's last rank, the table that a tied head shares with the first rank */
    ar_loss *loss;
} maker;

static void append_module(maker *k, ar_module *module, ari_staged staged)
{
    staged.rank = k->rank;
    k->child[k->n] = module;
    k->child_stage[k->n++] = staged;
}

static ar_status create_embedding(maker *k)
{
    const ar_config *c = k->c;
    const bool is_first = k->rank == 0;
    const char *positions = is_first && c->learned_positions ? ari_part_path(k->f, ARI_POSITIONS) : NULL;
    if (!is_first && !(k->rank + 1 == k->ranks && (c->tied || c->mtp > 0)))
        return AR_OK;
    AR_TRY(ar_embedding_create(&k->embedding, k->ctx, k->split.tokens, ari_part_path(k->f, ARI_TOKENS), c->vocab,
                               c->hidden, c->initializer_range, positions, c->max_positions, k->f->embedded));
    ari_embedding_scale(k->embedding, c->embed_scale);
    if (c->pads)
        ari_embedding_pad(k->embedding, c->pad_id);
    ari_embedding_token(k->embedding)->ends = k->ranks > 1 && (c->tied || c->mtp > 0);
    if (is_first)
        append_module(k, k->embedding, (ari_staged){.stage = 0});
    return AR_OK;
}

static ar_status create_block(maker *k, size_t layer, int stage)
{
    const ar_config *c = k->c;
    ar_block_options o;
    ar_block_split block;
    ar_module *module = NULL;
    char name[96];
    AR_TRY(ari_config_block(c, layer, &o, name, sizeof name));
    AR_TRY(ari_plan_block(k->plan, c, layer, k->sequence, &block));
    o.split = &block;
    const ari_mtp_options mtp = {.block = &o,
                                 .embedding = k->embedding,
                                 .tokens = "embed_tokens",
                                 .tokens_norm = ari_part_path(k->f, ARI_TOKENS_NORM),
                                 .entered_norm = ari_part_path(k->f, ARI_ENTERED_NORM),
                                 .joined = ari_part_path(k->f, ARI_JOINED),
                                 .made_norm = ari_part_path(k->f, ARI_MTP_NORM)};
    AR_TRY(layer < c->layers ? ar_block_create(&module, k->ctx, name, &o)
                             : ari_mtp_create(&module, k->ctx, name, &mtp));
    append_module(k, module, (ari_staged){.stage = stage, .layer = layer, .unit = true});
    return AR_OK;
}

/* Creates a head and the loss of its logits with this weight. tied NULL: the head has a separate weight. */
static ar_status create_head(maker *k, ar_loss **loss, const char *name, ar_param *tied, double weight, int stage)
{
    const ar_config *c = k->c;
    ar_module *module = NULL;
    const ari_head_options o = {.name = name, .cap = c->logit_cap, .scale = c->logit_scale, .weight = weight};
    AR_TRY(ar_logits_create(&module, k->ctx, &k->split.head, name, c->vocab, c->hidden, tied));
    append_module(k, module, (ari_staged){.stage = stage, .uncounted = true});
    return ari_head_loss_create(loss, k->ctx, c->vocab, k->split.head.output, &o);
}

/* Creates heads for further tokens, which share the head's weight; each loss has 1/D of their total weight. */
static ar_status create_further(maker *k, ar_param *weight)
{
    const ar_config *c = k->c;
    for (size_t i = 0; i < c->mtp; i++) {
        char name[160], layer[24];
        ar_loss *loss = NULL;
        snprintf(layer, sizeof layer, "%zu", c->layers + i);
        ari_role_path(name, sizeof name, c->arch, layer, ARI_MTP_HEAD);
        AR_TRY(create_block(k, c->layers + i, -1));
        AR_TRY(create_head(k, &loss, name, weight, c->mtp_weight / (double)c->mtp, -1));
        ari_further_add(k->stages.further, k->child[k->n - 2], k->child[k->n - 1], loss);
    }
    return AR_OK;
}

/* Creates the parts after the blocks. */
static ar_status create_end(maker *k)
{
    const ar_config *c = k->c;
    const char *head = ari_part_path(k->f, ARI_HEAD);
    const int stage = k->stages.n - 1;
    const ari_norm_options norm = {
        .kind = c->norm, .h = c->hidden, .eps = c->norm_eps, .plus_one = c->norm_plus_one, .no_bias = c->norm_no_bias};
    ar_param *weight = NULL;
    ar_module *module = NULL;
    if (c->final_norm) {
        AR_TRY(ari_norm_create(&module, k->ctx, ari_part_path(k->f, ARI_FINAL_NORM), &norm,
                               (ar_tp_redistribution){ari_placed_stream(k->ctx), k->split.final_norm}));
        append_module(k, module, (ari_staged){.stage = stage, .uncounted = c->mtp == 0});
    }
    if (!head)
        return ari_sum_loss_create(&k->loss, k->ctx, c->hidden);
    if (c->mtp > 0) {
        AR_TRY(ari_further_create(&k->stages.further, k->ctx, "further", c->mtp_weight));
        append_module(k, k->stages.further, (ari_staged){.stage = stage});
    }
    AR_TRY(create_head(k, &k->loss, head, c->tied ? ari_embedding_token(k->embedding) : NULL, 1.0, stage));
    ar_module_params(k->child[k->n - 1], &weight, 1, false);
    return create_further(k, weight);
}

static ar_status create_parts(maker *k)
{
    const ar_stages *layout_stages = &k->ctx->layout.stages;
    const size_t total_stages = (size_t)(k->ranks * k->stages.n);
    AR_TRY(create_embedding(k));
    for (int i = 0; i < k->stages.n; i++) {
        size_t begin, count;
        ari_stage_layers(&begin, &count, layout_stages, k->c->layers, total_stages, (size_t)(i * k->ranks + k->rank));
        for (size_t layer = begin; layer < begin + count; layer++)
            AR_TRY(create_block(k, layer, i));
    }
    if (k->rank + 1 < k->ranks)
        return AR_OK;
    AR_TRY(create_end(k));
    if (k->embedding && k->rank > 0)
        append_module(k, k->embedding, (ari_staged){.stage = -1});
    return AR_OK;
}

/* Checks the context's pipeline, which may not have passed ari_parallel_check. */
static ar_status check_pipeline(const ar_ctx *ctx, const ar_config *c)
{
    ar_parallel p = ctx->layout;
    p.schedule = p.virtual_stages > 1 ? AR_PP_INTERLEAVED : AR_PP_1F1B;
    return ari_stages_check(&p, c);
}

static ar_status create_list(ar_model *m, maker *k)
{
    const size_t max_modules = ar_config_blocks(k->c) + OUTER + AR_MAX_MTP;
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, ARI_ALLOC_ZERO(&k->child, max_modules, "a model's modules"));
    AR_TRY_TO(done, st, ARI_ALLOC_ZERO(&k->child_stage, max_modules, "a model's modules"));
    st = create_parts(k);
    m->loss = k->loss;
done:
    if (st != AR_OK && k->rank > 0) /* otherwise the list owns it */
        ar_module_destroy(k->embedding);
    st = ar_sequential_made(&m->module, "model", k->child, k->n, st);
    if (st == AR_OK)
        st = ari_sequential_keep(m->module, k->child_stage, &k->stages, k->ctx);
    free(k->child);
    free(k->child_stage);
    return st;
}

ar_status ar_model_create(ar_model **out, ar_ctx *ctx, const ar_config *c, const ar_plan *plan)
{
    const ar_plan fallback = {0};
    AR_TRY(ari_config_expect(c));
    const ar_balance balance = ar_config_balance(c, &ctx->loss);
    const int tp = ar_comm_size(ar_ctx_tp(ctx));
    maker k = {.ctx = ctx,
               .c = c,
               .f = ari_family_of(c->arch),
               .plan = plan ? plan : &fallback,
               .rank = ar_comm_rank(ctx->pipeline),
               .ranks = ar_comm_size(ctx->pipeline),
               .stages = {.n = ctx->layout.virtual_stages,
                          .layers = ar_config_blocks(c),
                          .boundary = {.ndim = 2, .shape = {0, c->hidden}},
                          .routers = {.losses = ar_config_router_losses(c, &ctx->loss),
                                      .counts = balance >= AR_BALANCE_BATCH,
                                      .experts = balance == AR_BALANCE_LAYERS ? c->experts.n : 0},
                          .fresh = true,
                          .depths = c->mtp}};
    ARI_OWNED_BY(ar_model_destroy) ar_model *m = NULL;
    k.sequence = ari_plan_by_tokens(k.plan, tp, ari_ctx_sp(ctx));
    AR_TRY(ari_config_check_tp(c, tp, ari_experts_unsplit(&ctx->layout) ? 1 : tp, k.plan));
    AR_TRY(check_pipeline(ctx, c));
    AR_TRY(ari_plan_outer(k.plan, c, k.sequence, &k.split));
    AR_TRY(ari_streams_check(c, ctx->seed));
    AR_TRY(ARI_ALLOC_ZERO(&m, 1, "a model"));
    m->config = *c;
    ctx->layers = c->layers;
    AR_TRY(create_list(m, &k));
    ARI_GIVE(out, m);
    return AR_OK;
}

void ar_model_destroy(ar_model *m)
{
    if (!m)
        return;
    ar_loss_destroy(m->loss);
    ar_module_destroy(m->module);
    free(m);
}

ar_module *ar_model_module(ar_model *m)
{
    return m->module;
}

ar_loss *ari_model_criterion(ar_model *m)
{
    return m->loss;
}

/* Borrowed from the model. */
static const ar_config *model_config(const ar_model *m)
{
    return &m->config;
}

/* --- all of it ---------------------------------------------------------------------------------------------------- */

static ar_status check_whole(const ar_model *m, const ar_ctx *ctx)
{
    const int ranks = ar_comm_size(ctx->pipeline);
    return ranks == 1 ? AR_OK
                      : ar_error_set(AR_ERR_ARG,
                                     "%s: rank %d of a pipeline of %d has some stages: ar_train_step goes through "
                                     "them",
                                     m->config.name, ar_comm_rank(ctx->pipeline), ranks);
}

ar_status ari_model_forward(ar_model *m, ar_ctx *ctx, ar_saved *saved, const ar_batch *batch)
{
    AR_TRY(check_whole(m, ctx));
    return ari_stage_forward(m->module, m->loss, ctx, saved, 0, NULL, NULL, batch);
}

ar_status ari_model_backward(ar_model *m, ar_ctx *ctx, ar_saved *saved, const ar_batch *batch)
{
    AR_TRY(check_whole(m, ctx));
    return ari_stage_backward(m->module, m->loss, ctx, saved, 0, NULL, NULL, batch);
}

ar_status ari_model_loss(ar_model *m, ar_ctx *ctx, float *loss, size_t targets)
{
    return ari_trained_loss(m->module, m->loss, ctx, loss, targets);
}

ar_status ari_model_zero_grad(ar_model *m, ar_ctx *ctx)
{
    return ari_trained_zero(m->module, m->loss, ctx);
}

/* --- weights ------------------------------------------------------------------------------------------------------ */

/* Source of parameter values: fresh or given. */

typedef struct weight_source {
    uint64_t seed;
    const float *(*find)(void *, const char *, size_t); /* NULL: fresh */
    void *user;
} weight_source;

static ar_status set_one(ar_param *p, ar_ctx *ctx, const weight_source *s)
{
    if (!s->find) {
        AR_TRY(ari_param_fresh(p, ctx, s->seed));
    } else {
        char name_buffer[sizeof p->name];
        const size_t count = ari_volume(p->layout.shape, p->layout.ndim);
        const float *full =
            s->find(s->user, ari_fault_layer_name(name_buffer, sizeof name_buffer, ctx, p->name), count);
        if (!full)
            return ar_error_set(AR_ERR_NOT_FOUND, "the weights hold no tensor '%s' of %zu elements", p->name, count);
        AR_TRY(ar_param_set(p, ctx, full));
    }
    return AR_OK;
}

static ar_status set_all(ar_model *m, ar_ctx *ctx, weight_source *s)
{
    size_t n = 0;
    ARI_OWNED ar_param **params = NULL;
    ar_status st = AR_OK;
    AR_TRY(ari_module_list(&params, &n, ar_model_module(m)));
    ari_span_begin("weights");
    for (size_t i = 0; i < n; i++)
        AR_TRY_TO(done, st, set_one(params[i], ctx, s));
    AR_TRY_TO(done, st, ari_params_broadcast(params, n, ctx));
    for (size_t i = 0; i < n; i++)
        AR_TRY_TO(done, st, ari_value_tap(params[i], ctx, 'i'));
done:
    return ari_span_end(st);
}

ar_status ar_model_fresh(ar_model *m, ar_ctx *ctx, uint64_t seed)
{
    weight_source s = {.seed = seed};
    AR_TRY(ari_streams_check(model_config(m), seed));
    return set_all(m, ctx, &s);
}

ar_status ari_model_set(ar_model *m, ar_ctx *ctx, const float *(*find)(void *, const char *, size_t), void *user)
{
    weight_source s = {.find = find, .user = user};
    return set_all(m, ctx, &s);
}

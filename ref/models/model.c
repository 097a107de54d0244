/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/context.h"
#include "ref/core/record.h"
#include "ref/core/size.h"
#include "ref/layers/loss.h"
#include "ref/layers/parts.h"
#include "ref/models/family.h"
#include "ref/models/model.h"

struct ar_model {
    ar_config config;
    ar_embedding *embedding;
    ar_module **blocks;    /* [config.layers] */
    ar_module *final_norm; /* NULL: none */
    ar_lm_head *head;      /* NULL: the loss is the sum of the output */
    ar_param sum;          /* that sum, without a head: only its gradient is used */
};

ar_status ar_model_create(ar_model **gives, ar_ctx *ctx, const ar_config *c, const ar_plan *plan)
{
    const ar_plan fallback = {0};
    const ari_family *f = ari_family_of(c->arch);
    const char *head = ari_part_path(f, ARI_HEAD);
    if (!plan)
        plan = &fallback;
    const int tp = ar_comm_size(ar_ctx_tp(ctx));
    const bool sequence = ar_plan_by_tokens(plan, tp, ari_ctx_sp(ctx));
    ar_outer_split split;
    AR_TRY(ar_config_check_tp(c, tp, plan));
    AR_TRY(ar_plan_outer(plan, c, sequence, &split));
    AR_TRY(ari_streams_check(c, ctx->seed));
    ar_model *m = NULL;
    ar_status st = AR_OK;
    AR_TRY(ari_alloc_zero((void **)&m, 1, sizeof *m, "a model"));
    m->config = *c;
    AR_TRY_TO(failed, st, ari_alloc_zero((void **)&m->blocks, c->layers, sizeof *m->blocks, "blocks"));
    AR_TRY_TO(failed, st,
              ar_embedding_create(&m->embedding, ctx, split.tokens, ari_part_path(f, ARI_TOKENS), c->vocab, c->hidden,
                                  c->initializer_range, c->learned_positions ? ari_part_path(f, ARI_POSITIONS) : NULL,
                                  c->max_positions, f->embedded));
    for (size_t i = 0; i < c->layers; i++) {
        ar_block_options o;
        ar_block_split block;
        char name[96];
        AR_TRY_TO(failed, st, ar_config_block(c, i, &o, name, sizeof name));
        AR_TRY_TO(failed, st, ar_plan_block(plan, c, i, sequence, &block));
        o.split = &block;
        AR_TRY_TO(failed, st, ar_block_create(&m->blocks[i], ctx, name, &o));
    }
    if (c->final_norm)
        AR_TRY_TO(failed, st,
                  ari_norm_create(&m->final_norm, ctx, ari_part_path(f, ARI_FINAL_NORM), c->norm, c->hidden,
                                  c->norm_eps, (ar_hop){ari_placed_stream(ctx), split.final_norm}));
    if (head)
        AR_TRY_TO(failed, st,
                  ar_lm_head_create(&m->head, ctx, &split.head, head, c->vocab, c->hidden,
                                    c->tied ? ar_embedding_token(m->embedding) : NULL));
    else
        AR_TRY_TO(failed, st, ari_loss_init(&m->sum, ctx, ari_ctx_sp(ctx)));
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

static void put(ar_param **out, size_t cap, size_t *count, ar_param *p)
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
    put(out, cap, &count, ar_embedding_token(m->embedding));
    if (ar_embedding_position(m->embedding))
        put(out, cap, &count, ar_embedding_position(m->embedding));
    for (size_t i = 0; i < m->config.layers; i++)
        put_module(out, cap, &count, m->blocks[i]);
    if (m->final_norm)
        put_module(out, cap, &count, m->final_norm);
    if (m->head && !m->config.tied)
        put(out, cap, &count, ar_lm_head_weight(m->head));
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
        size_t count = 1;
        for (int d = 0; d < p->layout.ndim; d++)
            count *= p->layout.shape[d];
        const float *full = s->find(s->user, p->name, count);
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
        AR_TRY_TO(done, st, ar_param_tap(all[i], ctx, 'i', &all[i]->value));
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

ar_status ar_model_zero_grad(ar_model *m, ar_ctx *ctx)
{
    AR_TRY(m->head ? ar_lm_head_zero(m->head, ctx) : ar_param_zero_grad(&m->sum, ctx));
    AR_TRY(ar_param_zero_grad(ar_embedding_token(m->embedding), ctx));
    if (ar_embedding_position(m->embedding))
        AR_TRY(ar_param_zero_grad(ar_embedding_position(m->embedding), ctx));
    for (size_t i = 0; i < m->config.layers; i++)
        AR_TRY(ar_module_zero_grad(m->blocks[i], ctx));
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
    ari_span_begin("loss");
    return ari_span_end(m->head ? ar_lm_head_loss(m->head, ctx, loss, targets)
                                : ari_loss_value(&m->sum, ctx, loss, 1.0));
}

ar_status ar_model_forward(ar_model *m, ar_ctx *ctx, ar_saved *saved, const ar_batch *batch)
{
    const ari_family *f = ari_family_of(m->config.arch);
    ar_tensor x, y;
    ar_ctx_place(ctx, batch);
    ari_span_begin("%s:fwd", f->embedded);
    AR_TRY(ari_span_end(ar_embedding_forward(m->embedding, ctx, saved, &x, batch)));
    for (size_t i = 0; i < m->config.layers; i++) {
        AR_TRY(ar_module_forward(m->blocks[i], ctx, saved, &y, &x, batch));
        x = y;
    }
    if (m->final_norm) {
        AR_TRY(ar_module_forward(m->final_norm, ctx, saved, &y, &x, batch));
        x = y;
    }
    ari_span_begin("%s:fwd", m->head ? ari_part_path(f, ARI_HEAD) : "loss");
    return ari_span_end(m->head ? ar_lm_head_forward(m->head, ctx, saved, &x, batch) : ari_loss_add(&m->sum, ctx, &x));
}

ar_status ar_model_backward(ar_model *m, ar_ctx *ctx, ar_saved *saved, const ar_batch *batch)
{
    const ari_family *f = ari_family_of(m->config.arch);
    ar_tensor dx, dy;
    ar_ctx_place(ctx, batch);
    if (m->head) {
        ari_span_begin("%s:bwd", ari_part_path(f, ARI_HEAD));
        AR_TRY(ari_span_end(ar_lm_head_backward(m->head, ctx, saved, &dy, batch)));
    } else {
        const ar_positions own = ari_own_positions(ctx, batch->seq, true);
        const size_t shape[3] = {batch->batch, ar_positions_count(&own), m->config.hidden};
        AR_TRY(ar_ctx_tensor(ctx, &dy, ctx->activations, 3, shape));
        AR_TRY(ARI_KERNEL(ctx, fill, &dy, (float)ctx->loss_scale));
    }
    if (m->final_norm) {
        AR_TRY(ar_module_backward(m->final_norm, ctx, saved, &dx, &dy, batch));
        ar_ctx_release(ctx, &dy);
        dy = dx;
    }
    for (size_t i = m->config.layers; i-- > 0;) {
        AR_TRY(ar_module_backward(m->blocks[i], ctx, saved, &dx, &dy, batch));
        ar_ctx_release(ctx, &dy);
        dy = dx;
    }
    ari_span_begin("%s:bwd", f->embedded);
    return ari_span_end(ar_embedding_backward(m->embedding, ctx, saved, &dy, batch));
}

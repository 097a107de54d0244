/* SPDX-License-Identifier: Apache-2.0 */
#include "support/own_lm.h"
#include "anyrank/activation.h"
#include "anyrank/context.h"
#include "ref/layers/layers_private.h"

#include <stdio.h>
#include <stdlib.h>

enum { FFN = 24, HEADS = 4, KV_HEADS = 2, STEPS = 4, SAVED_X = 0, SAVED_UP, SAVED_ACT, SAVED_GATE };

typedef struct own_mlp {
    ar_module base;
    ar_param up, bias, gate, down;
} own_mlp;

static ar_status mlp_forward(ar_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                             const ar_batch *batch)
{
    own_mlp *l = (own_mlp *)m;
    ar_tensor in, up, act, gate, gated, terms;
    (void)batch;
    AR_TRY(ar_enter_region(ctx, &in, x));
    AR_TRY(ar_contract(ctx, &up, &in, &l->up));
    AR_TRY(ar_bias_act_forward(ctx, &act, &up, &l->bias, AR_ACT_GELU_TANH));
    AR_TRY(ar_contract(ctx, &gate, &in, &l->gate));
    AR_TRY(ar_mul(ctx, &gated, &act, &gate));
    AR_TRY(ar_contract(ctx, &terms, &gated, &l->down));
    AR_TRY(ar_saved_push(saved, l, SAVED_X, &in));
    AR_TRY(ar_saved_push(saved, l, SAVED_UP, &up));
    AR_TRY(ar_saved_push(saved, l, SAVED_ACT, &act));
    AR_TRY(ar_saved_push(saved, l, SAVED_GATE, &gate));
    return ar_leave_region(ctx, y, &terms);
}

static ar_status mlp_backward(ar_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dy,
                              const ar_batch *batch)
{
    own_mlp *l = (own_mlp *)m;
    ar_tensor in, up, act, gate, gated, dout, dgated, dact, d[2], din;
    (void)batch;
    AR_TRY(ar_saved_pop(saved, l, SAVED_X, &in));
    AR_TRY(ar_saved_pop(saved, l, SAVED_UP, &up));
    AR_TRY(ar_saved_pop(saved, l, SAVED_ACT, &act));
    AR_TRY(ar_saved_pop(saved, l, SAVED_GATE, &gate));
    AR_TRY(ar_leave_region_backward(ctx, &dout, dy));
    AR_TRY(ar_mul(ctx, &gated, &act, &gate));
    AR_TRY(ar_contract_backward(ctx, &dgated, &dout, &gated, &l->down));
    AR_TRY(ar_mul(ctx, &dact, &dgated, &gate));
    AR_TRY(ar_mul(ctx, &d[1], &dgated, &act));
    AR_TRY(ar_bias_act_backward(ctx, &d[0], &dact, &up, &l->bias, AR_ACT_GELU_TANH));
    AR_TRY(ar_contract_backward_all(ctx, &din, d, &in, (ar_param *[]){&l->up, &l->gate}, 2));
    return ar_enter_region_backward(ctx, dx, &din);
}

static size_t mlp_params(const ar_module *m, ar_param **out, size_t cap)
{
    own_mlp *l = (own_mlp *)(uintptr_t)m;
    ar_param *const all[] = {&l->up, &l->bias, &l->gate, &l->down};
    for (size_t i = 0; i < 4 && i < cap; i++)
        out[i] = all[i];
    return 4;
}

static void mlp_destroy(ar_module *m)
{
    own_mlp *l = (own_mlp *)m;
    ar_param_fini(&l->up);
    ar_param_fini(&l->bias);
    ar_param_fini(&l->gate);
    ar_param_fini(&l->down);
    free(l);
}

static ar_status init_bias(ar_param *p, ar_ctx *ctx, const char *name)
{
    char full[128];
    ar_layout layout;
    const size_t n = FFN;
    snprintf(full, sizeof full, "%s.bias", name);
    AR_TRY(ar_layout_shard(&layout, 1, &n, 0, ar_comm_rank(ar_ctx_tp(ctx)), ar_comm_size(ar_ctx_tp(ctx))));
    AR_TRY(ar_param_init(p, ctx, full, &layout, false));
    p->init = AR_INIT_UNIFORM_BIAS;
    p->fan_in = OWN_LM_HIDDEN;
    p->fan_out = FFN;
    return AR_OK;
}

static ar_status mlp_create(ar_module **gives, ar_ctx *ctx, const char *name)
{
    static const ar_module_ops ops = {.kind = "own_mlp",
                                      .forward = mlp_forward,
                                      .backward = mlp_backward,
                                      .selective = true,
                                      .params = mlp_params,
                                      .destroy = mlp_destroy};
    own_mlp *l = calloc(1, sizeof *l);
    if (!l)
        return AR_ERR_MEMORY;
    *gives = &l->base;
    AR_TRY(ar_module_init(&l->base, &ops, name, AR_HELD_WHOLE));
    AR_TRY(ar_param_init_shard(&l->up, ctx, name, "up", (size_t[]){FFN, OWN_LM_HIDDEN}, 0, AR_INIT_XAVIER_NORMAL));
    AR_TRY(init_bias(&l->bias, ctx, name));
    AR_TRY(ar_param_init_shard(&l->gate, ctx, name, "gate", (size_t[]){FFN, OWN_LM_HIDDEN}, 0, AR_INIT_XAVIER_NORMAL));
    return ar_param_init_shard(&l->down, ctx, name, "down", (size_t[]){OWN_LM_HIDDEN, FFN}, 1, AR_INIT_XAVIER_NORMAL);
}

/* branch after a norm, around which x goes. */
static ar_status add_branch(ar_module **gives, ar_ctx *ctx, const char *block, const char *part, ar_module *branch)
{
    char name[64];
    ar_module *both[2] = {NULL, branch};
    snprintf(name, sizeof name, "%s.%s_norm", block, part);
    ar_status st = ar_norm_create(&both[0], ctx, name, AR_NORM_RMS, OWN_LM_HIDDEN, 1e-5);
    snprintf(name, sizeof name, "%s.%s_sum", block, part);
    return ar_residual_made(gives, name, both, 2, AR_HELD_WHOLE, st);
}

static ar_status add_attention(ar_module **gives, ar_ctx *ctx, const char *block)
{
    const ar_attention_options o = {.hidden = OWN_LM_HIDDEN,
                                    .heads = HEADS,
                                    .kv_heads = KV_HEADS,
                                    .head_dim = 2,
                                    .causal = true,
                                    .rope = {.kind = AR_ROPE_DEFAULT, .theta = 10000.0},
                                    .max_positions = OWN_LM_SEQ};
    char name[64];
    ar_module *m = NULL;
    snprintf(name, sizeof name, "%s.attention", block);
    AR_TRY(ar_attention_create(&m, ctx, name, &o));
    return add_branch(gives, ctx, block, "attention", m);
}

static ar_status add_mlp(ar_module **gives, ar_ctx *ctx, const char *block)
{
    char name[64];
    ar_module *m = NULL;
    snprintf(name, sizeof name, "%s.mlp", block);
    const ar_status st = mlp_create(&m, ctx, name);
    if (st != AR_OK) {
        ar_module_destroy(m);
        return st;
    }
    return add_branch(gives, ctx, block, "mlp", m);
}

static ar_status build(void *user, ar_ctx *ctx, ar_module **module, ar_loss **loss)
{
    const own_lm *lm = user;
    ar_module *m[2 * OWN_LM_BLOCKS + 3] = {NULL};
    size_t n = 0;
    ar_status st = AR_OK;
    AR_TRY(ar_embedding_create(&m[n++], ctx, AR_EMBEDDING_VOCAB, "embed", OWN_LM_VOCAB, OWN_LM_HIDDEN, 0.5, NULL, 0,
                               NULL));
    for (int i = 0; i < OWN_LM_BLOCKS; i++) {
        char block[32];
        snprintf(block, sizeof block, "block.%d", i);
        AR_TRY_TO(made, st, add_attention(&m[n++], ctx, block));
        AR_TRY_TO(made, st, add_mlp(&m[n++], ctx, block));
    }
    AR_TRY_TO(made, st, ar_norm_create(&m[n++], ctx, "norm", AR_NORM_RMS, OWN_LM_HIDDEN, 1e-5));
    AR_TRY_TO(made, st,
              ar_logits_create(&m[n++], ctx, NULL, lm->copied ? "embed" : "logits", OWN_LM_VOCAB, OWN_LM_HIDDEN,
                               lm->tied ? ari_embedding_token(m[0]) : NULL));
made:
    AR_TRY(ar_sequential_made(module, "lm", m, n, st));
    AR_TRY(ar_sequential_cut(*module, ctx, 1, 2 * OWN_LM_BLOCKS, 2, (size_t[]){OWN_LM_SEQ, OWN_LM_HIDDEN}));
    return ar_cross_entropy_create(loss, ctx, "loss", OWN_LM_VOCAB, AR_HELD_SHARD);
}

static ar_status batch(void *user, int step, ar_batch *b)
{
    static int64_t ids[STEPS + 1][OWN_LM_BATCH * OWN_LM_SEQ];
    int64_t *own = ids[step <= STEPS ? step : 0];
    (void)user;
    for (int i = 0; i < OWN_LM_BATCH * OWN_LM_SEQ; i++)
        own[i] = (i * 7919 + step * 131 + 5) % 1009 % OWN_LM_VOCAB;
    *b = (ar_batch){.batch = OWN_LM_BATCH, .seq = OWN_LM_SEQ, .input_ids = own};
    return AR_OK;
}

ar_module_case own_lm_case(const own_lm *lm)
{
    return (ar_module_case){.name = "own lm", .build = build, .batch = batch, .user = (void *)(uintptr_t)lm};
}

/* SPDX-License-Identifier: Apache-2.0 */
/* A language model of one's own on token ids: an embedding, pre-norm branches with residuals, logits. It is checked
 * under layouts that share out positions, layers, features and samples. */
#include "anyrank/activation.h"
#include "anyrank/check_module.h"
#include "anyrank/layers.h"
#include <stdio.h>

enum { BATCH = 4, SEQ = 8, HIDDEN = 8, VOCAB = 13, LAYERS = 4, MODULES = LAYERS + 3 };

/* x + branch(norm(x)), the branch an attention or an MLP by turns. */
static ar_status add_layer(ar_module **gives, ar_ctx *ctx, int i)
{
    const ar_attention_options attention = {.hidden = HIDDEN,
                                            .heads = 4,
                                            .kv_heads = 2,
                                            .head_dim = 2,
                                            .causal = true,
                                            .rope = {.kind = AR_ROPE_DEFAULT, .theta = 1e4},
                                            .max_positions = SEQ};
    const ar_mlp_options mlp = {.hidden = HIDDEN, .ffn = 16, .activation = AR_ACT_SILU, .gated = true};
    char name[3][32];
    ar_module *m[2] = {NULL};
    snprintf(name[0], sizeof *name, "layer.%d.norm", i);
    snprintf(name[1], sizeof *name, "layer.%d.%s", i, i % 2 ? "mlp" : "attention");
    snprintf(name[2], sizeof *name, "layer.%d", i);
    ar_status st = ar_norm_create(&m[0], ctx, name[0], AR_NORM_RMS, HIDDEN, 1e-5);
    if (st == AR_OK)
        st = i % 2 ? ar_mlp_create(&m[1], ctx, name[1], &mlp) : ar_attention_create(&m[1], ctx, name[1], &attention);
    return ar_residual_made(gives, name[2], m, 2, AR_HELD_WHOLE, st);
}

static ar_status build(void *user, ar_ctx *ctx, ar_module **module, ar_loss **loss)
{
    const size_t between[] = {SEQ, HIDDEN};
    ar_module *m[MODULES] = {NULL};
    ar_status st = AR_OK;
    (void)user;
    AR_TRY(ar_embedding_create(&m[0], ctx, AR_EMBEDDING_VOCAB, "embed", VOCAB, HIDDEN, 0.5, NULL, 0, NULL));
    for (int i = 0; i < LAYERS; i++)
        AR_TRY_TO(made, st, add_layer(&m[1 + i], ctx, i));
    AR_TRY_TO(made, st, ar_norm_create(&m[LAYERS + 1], ctx, "norm", AR_NORM_RMS, HIDDEN, 1e-5));
    AR_TRY_TO(made, st, ar_logits_create(&m[LAYERS + 2], ctx, NULL, "logits", VOCAB, HIDDEN, NULL));
made:
    AR_TRY(ar_sequential_made(module, "lm", m, MODULES, st));
    AR_TRY(ar_sequential_cut(*module, ctx, 1, LAYERS, 2, between)); /* into a pipeline's stages */
    return ar_cross_entropy_create(loss, ctx, "loss", VOCAB, AR_HELD_SHARD);
}

/* Without labels the next ids are predicted. */
static ar_status batch(void *user, int step, ar_batch *b)
{
    static int64_t ids[BATCH * SEQ];
    (void)user, (void)step;
    for (int i = 0; i < BATCH * SEQ; i++)
        ids[i] = i * i % VOCAB;
    *b = (ar_batch){.batch = BATCH, .seq = SEQ, .input_ids = ids};
    return AR_OK;
}

int main(void)
{
    const ar_parallel layouts[] = {{.tp = 2, .sp = true},
                                   {.cp = 2, .cp_inner = 2},
                                   {.cp = 4, .zigzag = true, .zero = 1},
                                   {.pp = 2, .micro_batches = 4},
                                   {.dp = 2, .zero = 3},
                                   {.tp = 2, .dp = 2, .cp = 2, .pp = 2, .sp = true, .zero = 2}};
    const ar_module_case c = {"own language model", build, batch, NULL, false};
    ar_check_module_options o = {.run = {.parallel = {.tp = 2}, .steps = 20}, .parallel = layouts, .layouts = 6};
    static char text[8192];
    bool right = false;
    o.run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    printf("%s", ar_prove_module(&right, text, sizeof text, &c, &o) ? ar_error_message() : text);
    return right ? 0 : 1;
}

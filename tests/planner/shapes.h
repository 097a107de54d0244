/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/config.h"
#include "support/row.h"
#include "tests/support/test.h"
#include "verify/plan/planner.h"

/* A bundled model's config. */
static inline ar_config shape_bundled(const char *name)
{
    char path[512];
    ar_config c;
    cr_assert_ok(ar_model_path(path, sizeof path, name));
    cr_assert_ok(ar_config_load(&c, path));
    return c;
}

/* Llama's and GPT's forms in other sizes. */
static inline ar_config shape_llama(size_t layers, size_t hidden, size_t ffn, size_t heads, size_t kv_heads,
                                    size_t vocab)
{
    ar_config c = shape_bundled("llama-3-8b");
    c.layers = layers;
    c.hidden = hidden;
    c.ffn = ffn;
    c.heads = heads;
    c.kv_heads = kv_heads;
    c.head_dim = hidden / heads;
    c.vocab = vocab;
    return c;
}

static inline ar_config shape_gpt(size_t layers, size_t hidden, size_t heads, size_t vocab)
{
    ar_config c = shape_bundled("gpt3-175b");
    c.layers = layers;
    c.hidden = hidden;
    c.ffn = 4 * hidden;
    c.heads = c.kv_heads = heads;
    c.head_dim = hidden / heads;
    c.vocab = vocab;
    return c;
}

/* A layout of one micro-batch of `batch` sequences a rank, trained with AdamW; its other fields are the caller's. */
static inline ari_planned shape_planned(const ar_config *c, int tp, bool sp, size_t batch, size_t seq)
{
    return (ari_planned)ROW(.step = {.config = c,
                                     .run = {.parallel = {.tp = tp, .sp = sp},
                                             .batch = batch,
                                             .seq = seq,
                                             .steps = 1,
                                             .numerics = AR_NUMERICS_NATIVE,
                                             .optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW)}});
}

static inline ari_memory shape_memory(const ari_planned *p)
{
    ari_memory m;
    cr_assert_ok(ari_memory_production(&m, p));
    return m;
}

/* What blocks keep between the passes. */
static inline double shape_kept(const ari_memory *m)
{
    return m->bytes[ARI_MEMORY_ATTENTION] + m->bytes[ARI_MEMORY_MLP] + m->bytes[ARI_MEMORY_BETWEEN];
}

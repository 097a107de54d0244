/* SPDX-License-Identifier: Apache-2.0 */
/* Random small models on random legal numbers of ranks: every tensor has the baseline's bits. The seed is printed, and
 * ANYRANK_TEST_SEED repeats a run; without it the seeds are always the same. */
#include "ref/models/model_private.h"
#include "ref/models/plan_private.h"
#include "support/bits.h"
#include "support/match.h"
#include "tests/support/test.h"

enum { MODELS = 100, MOST_TOKENS = 27, MOST_MASK = 3 * 8 * 81 };

typedef struct draw {
    match_case m;
    int tp;
    int64_t ids[MOST_TOKENS], labels[MOST_TOKENS];
    uint8_t padding[MOST_TOKENS];
    float additive[MOST_MASK];
} draw;

/* A number in [0, n), from the middle of a linear congruential state. */
static size_t pick(uint64_t *state, size_t n)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (size_t)(*state >> 33) % n;
}

static bool coin(uint64_t *state)
{
    return pick(state, 2) == 1;
}

/* Of every kind, and of a part of the heads; sequences are longer than the first ones or not. */
static void draw_rope(ar_rope *r, uint64_t *s, bool turns, size_t head_dim)
{
    *r = (ar_rope){.theta = coin(s) ? 10000.0 : 500000.0,
                   .factor = coin(s) ? 1.0 : 4.0,
                   .rotary_dim = turns && coin(s) ? 2 * (1 + pick(s, head_dim / 2)) : 0,
                   .low_freq_factor = 0.5,
                   .high_freq_factor = 2.0,
                   .beta_fast = 2.0,
                   .beta_slow = 0.125,
                   .truncate = coin(s),
                   .attention_factor = coin(s) ? 1.5 : 0.0,
                   .original_positions = 2 + pick(s, 8)};
    r->kind = turns ? (ar_rope_kind)(AR_ROPE_DEFAULT + pick(s, AR_ROPE_LONGROPE)) : AR_ROPE_NONE;
    for (size_t i = 0; i < head_dim / 2; i++) {
        r->short_factor[i] = 1.0f + (float)pick(s, 8) / 8.0f;
        r->long_factor[i] = 2.0f + (float)pick(s, 100) / 8.0f;
    }
    if (r->kind == AR_ROPE_DYNAMIC && ar_rope_dim(r, head_dim) <= 2)
        r->kind = AR_ROPE_YARN;
}

/* Only what is legal: the heads and the MLP's width divide, KV heads too; the vocabulary need not. */
static void draw_config(draw *d, uint64_t *s)
{
    static const int tps[] = {2, 2, 3, 4, 4, 5, 8};
    static const size_t vocabularies[] = {2, 3, 5, 7, 13, 16, 31, 64, 97, 127};
    const ar_arch arch = (ar_arch)pick(s, 5);
    ar_config *c = &d->m.config;
    d->tp = tps[pick(s, sizeof tps / sizeof tps[0])];
    *c = match_config(arch, 1 + pick(s, 2));
    c->kv_heads = (size_t)d->tp * (d->tp < 4 ? 1 + pick(s, 2) : 1);
    c->heads = c->kv_heads * (arch == AR_ARCH_GPT2 || c->kv_heads > 4 ? 1 : 1 + pick(s, 2));
    const bool turns = arch == AR_ARCH_GPT2 ? false : coin(s);
    c->head_dim = turns ? 2 * (1 + pick(s, 4)) : 1 + pick(s, 8);
    draw_rope(&c->rope, s, turns, c->head_dim);
    d->m.run.plan.mlp_order = coin(s) ? AR_MLP_COLUMN_ROW : AR_MLP_ROW_COLUMN;
    c->hidden = d->m.run.plan.mlp_order == AR_MLP_ROW_COLUMN ? (size_t)d->tp * (1 + pick(s, 8)) : 1 + pick(s, 40);
    c->ffn = (size_t)d->tp * (1 + pick(s, 10));
    c->vocab = vocabularies[pick(s, sizeof vocabularies / sizeof vocabularies[0])];
    c->activation = (ar_activation)pick(s, AR_ACT_NONE);
    c->norm = coin(s) ? AR_NORM_RMS : AR_NORM_LAYER;
    c->qkv_bias = coin(s);
    c->out_bias = coin(s);
    c->mlp_bias = coin(s);
    c->causal = coin(s);
    c->tied = arch != AR_ARCH_STACK && coin(s);
    match_draw_norms(c, pick(s, 1u << 30));
    if (c->arch == AR_ARCH_LLAMA && !c->mlp_bias && coin(s))
        c->arch = AR_ARCH_PHI3; /* its KV heads divide */
    d->m.run.sim.algorithm = coin(s) ? AR_SIM_RING : AR_SIM_DIRECT;
}

static void draw_batch(draw *d, uint64_t *s)
{
    const ar_config *c = &d->m.config;
    ar_batch *b = &d->m.batch;
    *b = (ar_batch){.batch = 1 + pick(s, 3), .seq = 1 + pick(s, c->max_positions), .input_ids = d->ids};
    for (size_t i = 0; i < b->batch * b->seq; i++) {
        d->ids[i] = (int64_t)pick(s, c->vocab);
        d->labels[i] = pick(s, 4) == 0 ? AR_IGNORE_INDEX : (int64_t)pick(s, c->vocab);
        d->padding[i] = pick(s, 3) > 0;
    }
    b->labels = coin(s) ? d->labels : NULL;
    b->padding_mask = coin(s) ? d->padding : NULL;
    if (pick(s, 3) > 0)
        return;
    b->additive_mask = d->additive;
    b->mask_batch = coin(s) ? b->batch : 1;
    b->mask_heads = coin(s) ? c->heads : 1;
    fill_values(d->additive, MOST_MASK, (unsigned)pick(s, 1000), 4.0);
    for (size_t i = 0; i < MOST_MASK; i++)
        d->additive[i] = pick(s, 5) == 0 ? -INFINITY : d->additive[i];
}

static void describe(const draw *d, char *to, size_t cap)
{
    const ar_config *c = &d->m.config;
    snprintf(
        to, cap,
        "tp %d arch %d L %zu h %zu heads %zu/%zu d %zu ffn %zu V %zu act %d norm %d rope %d causal %d tied %d "
        "bias %d%d%d order %d ring %d b %zu s %zu labels %d padding %d additive %d place %d qk %d plus %d caps %g %g scale %g",
        d->tp, (int)c->arch, c->layers, c->hidden, c->heads, c->kv_heads, c->head_dim, c->ffn, c->vocab,
        (int)c->activation, (int)c->norm, (int)c->rope.kind, c->causal, c->tied, c->qkv_bias, c->out_bias, c->mlp_bias,
        (int)d->m.run.plan.mlp_order, d->m.run.sim.algorithm == AR_SIM_RING, d->m.batch.batch, d->m.batch.seq,
        d->m.batch.labels != NULL, d->m.batch.padding_mask != NULL, d->m.batch.additive_mask != NULL,
        (int)c->norm_place, (int)c->qk_norm, c->norm_plus_one, c->score_cap, c->logit_cap, c->embed_scale);
}

Test(random_models, every_tensor_has_the_baselines_bits)
{
    const char *given = getenv("ANYRANK_TEST_SEED");
    const uint64_t first = given ? strtoull(given, NULL, 10) : 20240611u;
    int ranks[17] = {0}, masked = 0, grouped = 0;
    for (uint64_t i = 0; i < MODELS; i++) {
        static draw d;
        ar_plan plan = {0};
        char text[600];
        uint64_t state = first + i;
        d = (draw){.m = {.seed = (unsigned)i}};
        pick(&state, 2);
        draw_config(&d, &state);
        draw_batch(&d, &state);
        describe(&d, text, sizeof text);
        cr_assert_ok(ari_plan_add_mlp_order(&plan, d.m.config.arch, d.m.run.plan.mlp_order));
        cr_assert_eq(ari_config_check_ranks(&d.m.config, d.tp, &plan), AR_OK, "%s: %s", text, ar_error_message());
        cr_assert_eq(match(&d.m, (int[]){d.tp, 0}, NULL), AR_OK, "ANYRANK_TEST_SEED=%llu, model %d: %s: %s",
                     (unsigned long long)first, (int)i, text, ar_error_message());
        ranks[d.tp]++;
        masked += d.m.batch.additive_mask || d.m.batch.padding_mask;
        grouped += d.m.config.heads > d.m.config.kv_heads;
    }
    fprintf(stderr, "ANYRANK_TEST_SEED=%llu: %d models; tp 2: %d, 3: %d, 4: %d, 5: %d, 8: %d; masked %d, grouped %d\n",
            (unsigned long long)first, (int)MODELS, ranks[2], ranks[3], ranks[4], ranks[5], ranks[8], masked, grouped);
    cr_assert(ranks[2] > 0 && ranks[4] > 0 && ranks[8] > 0 && masked > MODELS / 4 && grouped > MODELS / 10);
}

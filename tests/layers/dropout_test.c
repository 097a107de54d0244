/* SPDX-License-Identifier: Apache-2.0 */
/* Dropout inside models: every tensor has the baseline's bits on any number of ranks, with sequence parallelism and
 * copies of KV heads too; which elements are dropped depends on nothing but their place in the global batch. */
#include "ref/context/context.h"
#include "ref/context/context_private.h"
#include "ref/layers/parts.h"
#include "ref/numerics/philox.h"
#include "support/match.h"
#include "tests/support/test.h"

enum { B = 3, S = 8, MOST = 16 };

static const int64_t ids[B * S] = {0, 10, 5, 5, 3, 9, 1, 7, 2, 2, 4, 10, 0, 6, 8, 1, 1, 2, 3, 5, 8, 10, 0, 4};

static match_case model_of(ar_arch arch, double p)
{
    return (match_case){.config = match_config(arch, 2),
                        .batch = {.batch = B, .seq = S, .input_ids = ids},
                        .seed = 41,
                        .run.dropout = p};
}

Test(dropout, models_of_every_architecture_have_the_baselines_bits)
{
    static const int tps[] = {1, 2, 4, 0};
    static const ar_arch archs[3] = {AR_ARCH_LLAMA, AR_ARCH_GPT2, AR_ARCH_STACK};
    static const size_t sites[3] = {10, 10, 10}; /* forward 3, backward 2 in each of two blocks */
    for (int i = 0; i < 3; i++) {
        size_t with = 0, without = 0;
        match_case plain = model_of(archs[i], 0.0);
        cr_assert_ok(match(&plain, tps, &without));
        for (int sp = 0; sp < 2; sp++) {
            match_case c = model_of(archs[i], 0.3);
            c.run.parallel.sp = sp;
            cr_assert_eq(match(&c, tps, &with), AR_OK, "arch %d, sp %d: %s", i, sp, ar_error_message());
            cr_assert_eq(with, without + sites[i], "arch %d: %zu tensors, %zu without", i, with, without);
        }
    }
}

enum { SAMPLES = 5, POSITIONS = 6, LONGEST = 9, WIDTH = 7, HEADS = 4 };

/* Rows [first, first + count) of a global batch of ones, dropped on one rank of a group. */
typedef struct part {
    size_t first, count;
    uint32_t step;
    float tokens[MOST][SAMPLES * POSITIONS * WIDTH], heads[MOST][SAMPLES * HEADS * POSITIONS * POSITIONS];
} part;

static ar_status ones(ar_ctx *ctx, ar_tensor *t, int ndim, const size_t *shape)
{
    AR_TRY(ar_ctx_tensor(ctx, t, AR_F32, ndim, shape));
    return ctx->device->ops->fill(ctx->device, ctx->queue, t, 1.0f);
}

static ar_status drop_part(ar_ctx *ctx, void *user)
{
    part *p = user;
    const size_t n = ranks_of(ctx), r = rank_of(ctx), own = ari_ctx_sp(ctx) ? POSITIONS / n : POSITIONS;
    const size_t shape[3] = {p->count, own, WIDTH}, heads[4] = {p->count, HEADS / n, POSITIONS, POSITIONS};
    const ar_batch batch = {.batch = p->count, .seq = POSITIONS, .global_batch = SAMPLES, .first_sample = p->first};
    ari_dropout tokens, probs;
    ar_tensor t;
    ari_ctx_place_batch(ctx, &batch);
    ar_ctx_begin_step(ctx, p->step);
    AR_TRY(ari_dropout_init(&tokens, "mlp", ARI_DROPPED_MLP, WIDTH, LONGEST));
    AR_TRY(ari_dropout_init(&probs, "attn", ARI_DROPPED_PROBS, HEADS, LONGEST));
    AR_TRY(ones(ctx, &t, 3, shape));
    AR_TRY(ari_drop_tokens(&tokens, ctx, 'f', &t, &t));
    AR_TRY(ar_ctx_download(ctx, p->tokens[r], &t));
    AR_TRY(ones(ctx, &t, 4, heads));
    AR_TRY(ari_drop_heads(&probs, ctx, &t, &t, (const size_t[AR_MAX_DIMS]){0, r * (HEADS / n)}));
    return ar_ctx_download(ctx, p->heads[r], &t);
}

static void run_part(part *p, int ranks, bool sp)
{
    const ar_run o = {.parallel.tp = ranks, .parallel.sp = sp, .dropout = 0.4, .seed = 99};
    cr_assert_ok(rank_run(&o, drop_part, p));
}

/* By the definition, from the element's place in the global batch. */
static float expected_of(const char *name, uint64_t number, uint32_t step)
{
    const uint32_t bits = ari_random_u32(ari_stream_key(99, name), number, step, 0);
    return bits >= 1717986918u ? (float)(1.0 / 0.6) : 0.0f;
}

static void expect_part(const part *p, size_t ranks, bool sp)
{
    const size_t own = sp ? POSITIONS / ranks : POSITIONS, heads = HEADS / ranks;
    for (size_t r = 0; r < ranks; r++) {
        for (size_t i = 0; i < p->count * own * WIDTH; i++) {
            const size_t sample = p->first + i / (own * WIDTH), s = (sp ? r * own : 0) + i / WIDTH % own;
            const float e = expected_of("mlp.dropout", (sample * LONGEST + s) * WIDTH + i % WIDTH, p->step);
            cr_assert_eq(ari_bits32(p->tokens[r][i]), ari_bits32(e), "rank %zu, token element %zu", r, i);
        }
        for (size_t i = 0; i < p->count * heads * POSITIONS * POSITIONS; i++) {
            const size_t key = i % POSITIONS, query = i / POSITIONS % POSITIONS;
            const size_t head = r * heads + i / (POSITIONS * POSITIONS) % heads;
            const size_t sample = p->first + i / (heads * POSITIONS * POSITIONS);
            const uint64_t number = ((sample * HEADS + head) * LONGEST + query) * LONGEST + key;
            cr_assert_eq(ari_bits32(p->heads[r][i]), ari_bits32(expected_of("attn.attn_dropout", number, p->step)),
                         "rank %zu, probability %zu", r, i);
        }
    }
}

Test(dropout, a_mask_depends_on_the_place_in_the_global_batch_alone)
{
    static part p;
    for (size_t first = 0; first < SAMPLES; first++) {
        for (size_t count = 1; first + count <= SAMPLES; count++) {
            for (int ranks = 1; ranks <= 2; ranks++) {
                for (int sp = 0; sp < 2; sp++) {
                    p = (part){.first = first, .count = count, .step = 3};
                    run_part(&p, ranks, sp);
                    expect_part(&p, (size_t)ranks, sp && ranks > 1);
                }
            }
        }
    }
}

Test(dropout, another_step_drops_other_elements)
{
    static part p, q;
    p = (part){.count = SAMPLES, .step = 1};
    q = (part){.count = SAMPLES, .step = 2};
    run_part(&p, 1, false);
    run_part(&q, 1, false);
    expect_part(&q, 1, false);
    cr_assert_neq(memcmp(p.tokens, q.tokens, sizeof p.tokens), 0);
    cr_assert_neq(memcmp(p.heads, q.heads, sizeof p.heads), 0);
}

/* Five standard deviations of a binomial. */
Test(dropout, the_share_of_dropped_elements_is_the_probability)
{
    static const double ps[] = {0.01, 0.1, 0.5, 0.9};
    const uint64_t key = ari_stream_key(7, "share"), n = 1000000;
    for (size_t k = 0; k < 4; k++) {
        uint64_t kept = 0;
        for (uint64_t i = 0; i < n; i++)
            kept += ari_dropout_keep(key, i, 1, ari_dropout_threshold(ps[k]));
        const double share = 1.0 - (double)kept / (double)n;
        cr_assert_lt(fabs(share - ps[k]), 5.0 * sqrt(ps[k] * (1.0 - ps[k]) / (double)n), "p = %g: %g", ps[k], share);
    }
}

static ar_status too_long(ar_ctx *ctx, void *user)
{
    const size_t shape[3] = {1, LONGEST + 1, WIDTH};
    ari_dropout d;
    ar_tensor t;
    (void)user;
    AR_TRY(ari_dropout_init(&d, "mlp", ARI_DROPPED_MLP, WIDTH, LONGEST));
    AR_TRY(ones(ctx, &t, 3, shape));
    return ari_drop_tokens(&d, ctx, 'f', &t, &t);
}

/* The numbers of `user` samples of 2^40 positions of 2^20 features: 16 fill 64 bits. */
static ar_status too_many(ar_ctx *ctx, void *user)
{
    const size_t shape[3] = {1, 1, 1};
    const size_t *samples = user;
    const ar_batch batch = {.batch = 1, .seq = 1, .global_batch = *samples, .first_sample = *samples - 1};
    ari_dropout d;
    ar_tensor t;
    ari_ctx_place_batch(ctx, &batch);
    AR_TRY(ari_dropout_init(&d, "mlp", ARI_DROPPED_MLP, (size_t)1 << 20, (size_t)1 << 40));
    AR_TRY(ones(ctx, &t, 3, shape));
    return ari_drop_tokens(&d, ctx, 'f', &t, &t);
}

Test(dropout, elements_without_a_number_are_refused)
{
    const ar_run o = {.parallel.tp = 1, .dropout = 0.5};
    size_t samples = 15;
    cr_assert_refused(rank_run(&o, too_long, NULL), AR_ERR_SHAPE, "mlp.dropout");
    cr_assert_ok(rank_run(&o, too_many, &samples));
    samples = 16;
    cr_assert_eq(rank_run(&o, too_many, &samples), AR_ERR_OVERFLOW, "%s", ar_error_message());
}

Test(dropout, a_probability_outside_the_unit_interval_is_refused)
{
    static const double bad[] = {-0.1, 1.0, 1.5, INFINITY};
    for (size_t i = 0; i < 4; i++) {
        const ar_run o = {.parallel.tp = 1, .dropout = bad[i]};
        cr_assert_eq(rank_run(&o, rank_nothing, NULL), AR_ERR_ARG, "%g", bad[i]);
    }
    const ar_run nan = {.parallel.tp = 1, .dropout = NAN}, most = {.parallel.tp = 1, .dropout = 1.0 - 0x1p-53};
    cr_assert_eq(rank_run(&nan, rank_nothing, NULL), AR_ERR_ARG);
    cr_assert_ok(rank_run(&most, rank_nothing, NULL));
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Predicted traffic: closed forms worked out by hand (docs/parallelism.md), and what runs really count. */
#include "tests/verify/support.h"

#include "sim/plan/bytes.h"
#include "verify/cluster_run.h"

TestSuite(traffic, .timeout = 120);

static uint64_t predicted(const ar_config *c, ar_mlp_order order, int tp, size_t batch, size_t seq,
                          ar_numerics numerics, bool forward_only)
{
    uint64_t bytes = 0;
    const ari_traffic_case t = {.config = c,
                                .plan = plan_of(c->arch, order),
                                .tp = tp,
                                .batch = batch,
                                .seq = seq,
                                .numerics = numerics,
                                .forward_only = forward_only};
    cr_assert_eq(ari_traffic_bytes(&bytes, &t), AR_OK, "%s", ar_error_message());
    return bytes;
}

/* Elements of 4 bytes that one rank sends in native numerics for `layers` blocks: those of 2 layers less those of 1. */
static uint64_t sent_per_layer(const char *one_layer, const char *two_layers, int tp, size_t batch, size_t seq,
                               bool forward_only)
{
    const ar_config one = config_of(one_layer), two = config_of(two_layers);
    const uint64_t bytes = predicted(&two, AR_MLP_COLUMN_ROW, tp, batch, seq, AR_NUMERICS_NATIVE, forward_only) -
                           predicted(&one, AR_MLP_COLUMN_ROW, tp, batch, seq, AR_NUMERICS_NATIVE, forward_only);
    cr_assert_eq(bytes % (4u * (unsigned)tp), 0);
    return bytes / (4u * (unsigned)tp);
}

/* An all-reduce of n elements over N ranks sends 2(N-1)/N * n a rank; a layer has two forward and two backward. */
Test(traffic, native_layers_send_what_rings_send)
{
    /* b, s, h, N = 4, 512, 768, 2: 1,572,864 an all-reduce */
    const char *one = STACK(1000, 768, 3072, 1, 12, 12), *two = STACK(1000, 768, 3072, 2, 12, 12);
    cr_expect_eq(sent_per_layer(one, two, 2, 4, 512, true), 3145728);
    cr_expect_eq(sent_per_layer(one, two, 2, 4, 512, false), 6291456);
    /* b, s, h, N = 2, 4096, 4096, 8: 58,720,256 an all-reduce */
    const char *big = STACK(1000, 4096, 11008, 1, 32, 8), *bigger = STACK(1000, 4096, 11008, 2, 32, 8);
    cr_expect_eq(sent_per_layer(big, bigger, 8, 2, 4096, true), 117440512);
    cr_expect_eq(sent_per_layer(big, bigger, 8, 2, 4096, false), 234881024);
    /* The embedding is one all-reduce more, and the stack has no head. */
    const ar_config c = config_of(one);
    cr_expect_eq(predicted(&c, AR_MLP_COLUMN_ROW, 2, 4, 512, AR_NUMERICS_NATIVE, true),
                 2u * 4u * (3145728u + 1572864u));
}

/* Forward, all ranks: an all-reduce in the middle ([tokens, ffn]) and an all-gather at the end, in place of one
 * all-reduce. Tokens 10, h 12, ffn 24, N 3. */
Test(traffic, row_then_column_costs_a_collective_more)
{
    const ar_config c = config_of(STACK(30, 12, 24, 1, 12, 12));
    const uint64_t usual = predicted(&c, AR_MLP_COLUMN_ROW, 3, 2, 5, AR_NUMERICS_NATIVE, true);
    const uint64_t other = predicted(&c, AR_MLP_ROW_COLUMN, 3, 2, 5, AR_NUMERICS_NATIVE, true);
    const uint64_t all_reduce_h = 2 * 2 * 10 * 12 * 4, all_reduce_ffn = 2 * 2 * 10 * 24 * 4,
                   all_gather = 2 * 10 * 12 * 4;
    cr_expect_eq(other - usual, all_reduce_ffn + all_gather - all_reduce_h);
}

/* Exact numerics, in full, for a stack of one block: N ranks, T tokens, hidden h, ffn f, q heads' features q, k and v
 * together 2k. Everything times N-1. A sum over the ranks of [T, cols]: exponents of B's rows (cols) and of A's (T),
 * each an all-reduce of 4 bytes; partial sums scattered in 8 or 16 bytes; rounded values gathered in 4. */
static uint64_t fold(uint64_t rows, uint64_t cols, uint64_t terms)
{
    return 8 * cols + 8 * rows + (terms > 8191 ? 16 : 8) * rows * cols + 4 * rows * cols;
}

Test(traffic, exact_stack_of_one_block_by_hand)
{
    const uint64_t n = 3, t = 10, h = 12, f = 24, q = 12, k = 12;
    const ar_config c = config_of(STACK(30, 12, 24, 1, 12, 12));
    const uint64_t embedding = 8 * t * h;
    /* c of a column-parallel weight is 4 bytes a column, reduced: q|k|v and w1 share theirs. */
    const uint64_t forward = 8 * h + fold(t, h, q) + 8 * h + fold(t, h, f);
    /* Row-parallel: c of wo, of w2 (h rows each), and per token of the sharded input in dW. */
    const uint64_t backward = 2 * (8 * h + 8 * t) + fold(t, h, f) + fold(t, h, q + 2 * k);
    cr_expect_eq(predicted(&c, AR_MLP_COLUMN_ROW, 3, 2, 5, AR_NUMERICS_EXACT, true), (n - 1) * (embedding + forward));
    cr_expect_eq(predicted(&c, AR_MLP_COLUMN_ROW, 3, 2, 5, AR_NUMERICS_EXACT, false),
                 (n - 1) * (embedding + forward + backward));
}

/* The head: c of its weight, per token a maximum (4), a denominator (8), a target (4), dX over the vocabulary. */
static uint64_t head_bytes(const char *llama)
{
    const ar_config c = config_of(llama);
    ar_config body = c;
    body.arch = AR_ARCH_STACK; /* the same blocks, no head */
    return predicted(&c, AR_MLP_COLUMN_ROW, 2, 2, 5, AR_NUMERICS_EXACT, false) -
           predicted(&body, AR_MLP_COLUMN_ROW, 2, 2, 5, AR_NUMERICS_EXACT, false);
}

Test(traffic, more_than_8191_terms_are_scattered_in_16_bytes)
{
    const uint64_t t = 10, h = 12, head = 8 * h + 8 * t + 16 * t + 8 * t;
    cr_expect_eq(head_bytes(LLAMA(8191, 12, 24, 1, 12, 12, 2, false)), head + fold(t, h, 8191));
    cr_expect_eq(head_bytes(LLAMA(8192, 12, 24, 1, 12, 12, 2, false)), head + fold(t, h, 8192));
    cr_expect_eq(fold(t, h, 8192) - fold(t, h, 8191), 8 * t * h);
}

Test(traffic, one_rank_moves_nothing_and_absurd_sizes_are_refused)
{
    uint64_t bytes = 0;
    const ar_config c = config_of(tiny_models[TINY_LLAMA]);
    cr_expect_eq(predicted(&c, AR_MLP_COLUMN_ROW, 1, 2, 5, AR_NUMERICS_EXACT, false), 0);
    const ari_traffic_case huge = {.config = &c, .tp = 2, .batch = (size_t)1 << 40, .seq = (size_t)1 << 40};
    cr_expect_eq(ari_traffic_bytes(&bytes, &huge), AR_ERR_OVERFLOW);
    const ari_traffic_case wide = {.config = &c, .tp = 2, .batch = (size_t)1 << 30, .seq = (size_t)1 << 28};
    cr_expect_eq(ari_traffic_bytes(&bytes, &wide), AR_ERR_OVERFLOW);
}

/* --- counted ------------------------------------------------------------------------------------------------------ */

static uint64_t counted(const ar_config *c, ar_mlp_order order, int tp, ar_numerics numerics, bool forward_only,
                        ar_sim_algorithm algorithm)
{
    static const int64_t ids[6] = {3, 1, 29, 8, 5, 9};
    const ar_batch batch = {.batch = 2, .seq = 3, .input_ids = ids};
    ari_cluster_result result;
    const ari_cluster_options o = {.config = c,
                                   .plan = plan_of(c->arch, order),
                                   .tp = tp,
                                   .batch = &batch,
                                   .numerics = numerics,
                                   .forward_only = forward_only,
                                   .threads = 1,
                                   .sim = {.algorithm = algorithm, .timeout_ns = 60000000000u}};
    cr_assert_eq(ari_cluster_run(&result, &o), AR_OK, "%s", ar_error_message());
    return result.bytes;
}

static const char *const counted_models[] = {LLAMA(31, 24, 36, 2, 24, 12, 4, false),
                                             LLAMA(31, 24, 36, 1, 12, 12, 2, true), GPT2(31, 24, 36, 2, 12),
                                             STACK(31, 24, 36, 2, 24, 12), LLAMA(8200, 12, 12, 1, 12, 12, 2, false)};

static void count_all(ar_numerics numerics, const char *what)
{
    static const int ranks[] = {1, 2, 3, 4, 6, 12};
    for (size_t m = 0; m < sizeof counted_models / sizeof *counted_models; m++) {
        const ar_config c = config_of(counted_models[m]);
        for (size_t i = 0; i < sizeof ranks / sizeof *ranks; i++) {
            for (int k = 0; k < 8; k++) { /* both MLP orders, with and without backward, both ways to move data */
                const ar_mlp_order order = k & 1 ? AR_MLP_ROW_COLUMN : AR_MLP_COLUMN_ROW;
                const bool forward_only = (k & 2) != 0;
                const ar_sim_algorithm algorithm = k & 4 ? AR_SIM_RING : AR_SIM_DIRECT;
                const uint64_t want = predicted(&c, order, ranks[i], 2, 3, numerics, forward_only);
                const uint64_t got = counted(&c, order, ranks[i], numerics, forward_only, algorithm);
                cr_expect_eq(got, want, "%s, model %zu, tp=%d, case %d: %zu counted, %zu predicted", what, m, ranks[i],
                             k, (size_t)got, (size_t)want);
            }
        }
    }
}

Test(traffic, exact_runs_count_what_is_predicted)
{
    count_all(AR_NUMERICS_EXACT, "exact");
}

Test(traffic, native_runs_count_what_is_predicted)
{
    count_all(AR_NUMERICS_NATIVE, "native");
}

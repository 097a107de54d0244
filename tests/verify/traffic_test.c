/* SPDX-License-Identifier: Apache-2.0 */
/* Predicted traffic: by hand where sums need two limbs or copies of KV heads meet, what a layer makes of collectives, and
 * that one left out shows. That runs of all kinds count what is predicted every check holds, and random_layouts_test. */
#include "support/together.h"
#include "tests/verify/support.h"
#include "verify/bytes/bytes.h"

static uint64_t predicted(const ari_step_case *c)
{
    uint64_t bytes = 0;
    cr_assert_ok(ari_bytes_predict(&bytes, c));
    return bytes;
}

/* Exact, forward and backward, no update, one micro-batch. */
static ari_step_case exact_of(const ar_config *c, ar_parallel parallel, size_t batch, size_t seq)
{
    return (ari_step_case){.config = c, .run = {.parallel = parallel, .batch = batch, .seq = seq}};
}

/* Exact numerics, for a stack of one block: N ranks, T tokens, hidden h, ffn f, q heads' features q, k and v together
 * 2k. Everything times N-1. A sum over the ranks of [T, cols]: exponents of B's rows (cols) and of A's (T), each an
 * all-reduce of 4 bytes; partial sums scattered in 8 or 16 bytes; rounded values gathered in 4, unless each rank keeps
 * its own positions. */
static uint64_t scatter(uint64_t rows, uint64_t cols, uint64_t terms)
{
    return 8 * cols + 8 * rows + (terms > 8191 ? 16 : 8) * rows * cols;
}

static uint64_t fold(uint64_t rows, uint64_t cols, uint64_t terms)
{
    return scatter(rows, cols, terms) + 4 * rows * cols;
}

/* The head: c of its weight, per token a maximum (4), a denominator (8), a target (4), dX over the vocabulary. */
static uint64_t head_bytes(const char *llama, ar_parallel parallel)
{
    const ar_config c = config_of(llama);
    ar_config body = c;
    body.arch = AR_ARCH_STACK; /* the same blocks, no head */
    const ari_step_case with = exact_of(&c, parallel, 2, 6), without = exact_of(&body, parallel, 2, 6);
    return predicted(&with) - predicted(&without);
}

CLAIM(more_than_8191_terms_are_scattered_in_16_bytes)
{
    const uint64_t t = 12, h = 12, head = 8 * h + 8 * t + 16 * t + 8 * t;
    const ar_parallel tp = {.tp = 2}, sp = {.tp = 2, .sp = true};
    const char *one = LLAMA(8191, 12, 24, 1, 12, 12, 2, false), *two = LLAMA(8192, 12, 24, 1, 12, 12, 2, false);
    cr_expect_eq(head_bytes(one, tp), head + fold(t, h, 8191));
    cr_expect_eq(head_bytes(two, tp), head + fold(t, h, 8192));
    cr_expect_eq(fold(t, h, 8192) - fold(t, h, 8191), 8 * t * h);
    /* Its input gathered twice; the stack's loss, which moves 2*(1 + 16), is not there. */
    cr_expect_eq(head_bytes(two, sp) + 2 * (1 + 16), head + scatter(t, h, 8192) + 2 * 4 * t * h);
}

/* 8 ranks, 2 KV heads of d = 4 features: 4 ranks hold each. dK and dV: exponents of s rows a sample and of d columns,
 * sums of 6 query heads' queries in 8 bytes, rounded values in 4, times 3 in each of the 2 groups. */
static uint64_t stack_of_kv(const char *model, ar_numerics numerics, size_t batch, size_t seq)
{
    const ar_config c = config_of(model);
    ari_step_case t = exact_of(&c, (ar_parallel){.tp = 8}, batch, seq);
    t.run.numerics = numerics;
    return predicted(&t);
}

CLAIM(replicas_of_a_kv_head_fold_its_gradients)
{
    /* hidden 96, 24 heads of 4 features; as many terms in dX: K and V count once whoever holds copies. */
    const uint64_t b = 3, s = 6, d = 4;
    const char *few = STACK(30, 96, 24, 1, 24, 2), *enough = STACK(30, 96, 24, 1, 24, 8);
    cr_expect_eq(stack_of_kv(few, AR_NUMERICS_EXACT, b, s) - stack_of_kv(enough, AR_NUMERICS_EXACT, b, s),
                 2 * 3 * 2 * (8 * b * s + 8 * b * d + 8 * b * s * d + 4 * b * s * d));
    cr_expect_eq(stack_of_kv(few, AR_NUMERICS_NATIVE, b, s) - stack_of_kv(enough, AR_NUMERICS_NATIVE, b, s),
                 2 * 3 * 2 * (8 * b * s * d));
    /* 12 query heads a KV head times 683 queries: 8196 terms. */
    cr_expect_eq(stack_of_kv(few, AR_NUMERICS_EXACT, 1, 683) - stack_of_kv(enough, AR_NUMERICS_EXACT, 1, 683),
                 2 * 3 * 2 * (8 * 683 + 8 * d + 16 * 683 * d + 4 * 683 * d));
}

CLAIM(one_rank_moves_nothing_and_absurd_sizes_are_refused)
{
    uint64_t bytes = 0;
    const ar_config c = config_of(tiny_models[TINY_LLAMA]);
    const ari_step_case alone = exact_of(&c, (ar_parallel){.tp = 1, .sp = true}, 2, 5);
    cr_expect_eq(predicted(&alone), 0);
    const ari_step_case huge = exact_of(&c, (ar_parallel){.tp = 2}, (size_t)1 << 40, (size_t)1 << 40);
    cr_expect_eq(ari_bytes_predict(&bytes, &huge), AR_ERR_OVERFLOW);
    const ari_step_case wide = exact_of(&c, (ar_parallel){.tp = 2}, (size_t)1 << 30, (size_t)1 << 28);
    cr_expect_eq(ari_bytes_predict(&bytes, &wide), AR_ERR_OVERFLOW);
    ar_config many = c;
    many.vocab = (size_t)1 << 62;
    const ari_step_case parameters = exact_of(&many, (ar_parallel){.dp = 2}, 2, 5);
    cr_expect_eq(ari_bytes_predict(&bytes, &parameters), AR_ERR_OVERFLOW);
}

enum { BATCH = 5, SEQ = 12 };

static ari_cluster_result counted(const ari_step_case *t, const char *fault)
{
    int64_t ids[BATCH * SEQ];
    ari_cluster_result result;
    const ar_batch batch = {.batch = BATCH, .seq = SEQ, .input_ids = ids};
    for (size_t i = 0; i < BATCH * SEQ; i++)
        ids[i] = (int64_t)(i * 7 % t->config->vocab);
    ari_cluster_options o = {.config = t->config, .run = t->run, .batch = &batch, .forward_only = t->forward_only};
    o.run.fault = fault;
    o.run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    o.run.threads = 1;
    o.run.sim.timeout_ns = 60000000000u;
    cr_assert_ok(ari_cluster_run(&result, &o));
    free(result.loss);
    result.loss = NULL;
    return result;
}

/* Twelve bytes a token more for smoothed labels, which the whole group of tp moves twice over; none for a z-loss. */
CLAIM(smoothed_labels_count_what_is_predicted)
{
    const ar_config c = config_of(LLAMA(31, 24, 36, 1, 24, 12, 4, false));
    ari_step_case t = exact_of(&c, (ar_parallel){.tp = 4, .dp = 2, .sp = true}, BATCH, SEQ);
    const uint64_t plain = predicted(&t);
    t.run.loss.z_loss = 0.01;
    cr_expect_eq(predicted(&t), plain);
    cr_expect_eq(counted(&t, NULL).bytes, plain);
    t.run.loss.label_smoothing = 0.1;
    cr_expect_eq(predicted(&t), plain + (uint64_t)2 * 3 * 12 * BATCH * SEQ);
    cr_expect_eq(counted(&t, NULL).bytes, predicted(&t));
    t.forward_only = true;
    t.run.numerics = AR_NUMERICS_NATIVE;
    cr_expect_eq(counted(&t, NULL).bytes, predicted(&t));
}

/* A collective left out is bytes that are missing: the counts come from what is really copied. */
CLAIM(a_dropped_collective_shows)
{
    static const struct {
        const char *fault;
        ar_parallel parallel;
        uint64_t steps;
    } all[] = {{"column_dx_not_reduced", {.tp = 2}, 0},
               {"dp_group_missing", {.dp = 2}, 0},
               {"sp_norm_grad_local", {.tp = 2, .sp = true}, 0},
               {"zero_gather_missing", {.dp = 2, .zero = 1}, 1}};
    const ar_config c = config_of(LLAMA(31, 24, 36, 1, 24, 12, 4, false));
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        ari_step_case t = exact_of(&c, all[i].parallel, BATCH, SEQ);
        t.run.steps = all[i].steps;
        cr_expect_lt(counted(&t, all[i].fault).bytes, predicted(&t), "%s", all[i].fault);
        cr_expect_eq(counted(&t, NULL).bytes, predicted(&t), "without %s", all[i].fault);
    }
}

/* Of one layer: those of two less those of one, native. Two RMSNorms' gradients are all-reduced under sequence
 * parallelism, and gathered inputs come again unless they were kept. Row-column: an all-reduce in the middle, an
 * all-gather at the end. */
CLAIM(a_layer_makes_as_few_collectives_as_are_known)
{
    static const struct {
        const char *what;
        ar_mlp_order order;
        ar_parallel parallel;
        bool forward_only;
        uint64_t calls[3]; /* all-reduces, reduce-scatters, all-gathers */
    } all[] = {
        {"tp forward", AR_MLP_COLUMN_ROW, {.tp = 3}, true, {2, 0, 0}},
        {"tp both", AR_MLP_COLUMN_ROW, {.tp = 3}, false, {4, 0, 0}},
        {"sp forward", AR_MLP_COLUMN_ROW, {.tp = 3, .sp = true}, true, {0, 2, 2}},
        {"sp both, kept", AR_MLP_COLUMN_ROW, {.tp = 3, .sp = true, .keep_gathered = true}, false, {2, 4, 4}},
        {"sp both", AR_MLP_COLUMN_ROW, {.tp = 3, .sp = true}, false, {2, 4, 6}},
        {"row-column forward", AR_MLP_ROW_COLUMN, {.tp = 3}, true, {2, 0, 1}},
        {"row-column both", AR_MLP_ROW_COLUMN, {.tp = 3}, false, {4, 0, 2}},
        {"row-column sp forward", AR_MLP_ROW_COLUMN, {.tp = 3, .sp = true}, true, {1, 1, 3}},
    };
    const ar_config layers[] = {config_of(LLAMA(31, 12, 36, 1, 12, 12, 2, false)),
                                config_of(LLAMA(31, 12, 36, 2, 12, 12, 2, false))};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        ari_cluster_result r[2];
        for (int n = 0; n < 2; n++) {
            ari_step_case t = exact_of(&layers[n], all[i].parallel, BATCH, SEQ);
            t.run.numerics = AR_NUMERICS_NATIVE;
            t.run.plan = plan_of(layers[n].arch, all[i].order);
            t.forward_only = all[i].forward_only;
            r[n] = counted(&t, NULL);
        }
        for (int k = 0; k < 3; k++)
            cr_expect_eq(r[1].calls[k] - r[0].calls[k], all[i].calls[k], "%s: %zu of kind %d", all[i].what,
                         (size_t)(r[1].calls[k] - r[0].calls[k]), k);
    }
}

EVERY_CLAIM(traffic)

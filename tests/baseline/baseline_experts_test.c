/* SPDX-License-Identifier: Apache-2.0 */
/* Experts in the baseline, by what the definitions say of them: who is chosen, what a token's output and gradients are
 * made of, and that neither the order of the samples nor their number of tokens for an expert is seen. The golden models
 * (baseline_golden_test.c) compare the numbers with PyTorch's, the gradients with differences of the loss
 * (baseline_gradcheck_test.c). */
#include "tests/baseline/support.h"

#include "support/together.h"

enum { N = 4, TOKENS = 15 };

static ar_config expert_config(size_t per_token)
{
    ar_config c = tiny_config(AR_ARCH_LLAMA, 1);
    c.experts = (ar_experts){.n = N, .per_token = per_token, .ffn = 6, .normalised = true, .w123 = true};
    return c;
}

/* Fresh weights, but for the router's, which are the user's [N, hidden]. */
static const float *with_router(void *user, const char *name, size_t count)
{
    static float fresh[4096];
    cr_assert_leq(count, sizeof fresh / sizeof *fresh);
    if (strcmp(name, "model.layers.0.block_sparse_moe.gate.weight") == 0)
        return user;
    for (size_t i = 0; i < count; i++)
        fresh[i] = (float)((double)((i * 7 + count) % 13) - 6.0) / 16.0F;
    return fresh;
}

static void run_routed(tape *t, const ar_config *c, ar_number_mode mode, const float *router)
{
    const ar_batch batch = tiny_batch();
    const ar_baseline_options o = {.mode = mode,
                                   .weights = with_router,
                                   .weights_user = (void *)(uintptr_t)router,
                                   .emit = tape_emit,
                                   .emit_user = t};
    double loss = NAN;
    cr_assert_ok(ar_baseline_run(c, &o, &batch, &loss));
}

static const char gate[] = "model.layers.0.block_sparse_moe.gate",
                  weights[] = "model.layers.0.block_sparse_moe.weights";

/* Rows 0 and 2 of the router are one, 1 and 3 the same turned round: every token has two equal logits above two others,
 * or all four are 0. */
CLAIM(of_equal_logits_the_lower_number_is_chosen)
{
    float router[N * 64] = {0.0F};
    const ar_config c = expert_config(1);
    for (size_t i = 0; i < c.hidden; i++) {
        router[i] = router[2 * c.hidden + i] = (float)(i % 3) - 0.75F;
        router[c.hidden + i] = router[3 * c.hidden + i] = -router[i];
    }
    for (int mode = (int)AR_MODE_EXACT; mode <= (int)AR_MODE_F64; mode++) {
        SCOPED(tape_clear) tape t = {0};
        run_routed(&t, &c, (ar_number_mode)mode, router);
        const taped *z = tape_find(&t, gate, 'f'), *w = tape_find(&t, weights, 'f');
        for (size_t at = 0; at < TOKENS; at++) {
            const double *logit = z->values + at * N, *weight = w->values + at * N;
            cr_expect(logit[0] == logit[2] && logit[1] == logit[3]);
            const size_t chosen = logit[0] >= logit[1] ? 0U : 1U;
            for (size_t i = 0; i < N; i++)
                cr_expect_eq(weight[i], i == chosen ? 1.0 : 0.0, "mode %d, token %zu, expert %zu", mode, at, i);
        }
    }
}

/* All logits 0: experts 0 and 1, half each; the others' gradients are zeros. */
CLAIM(an_expert_without_tokens_has_a_gradient_of_zeros)
{
    static const char *const part[] = {"w1", "w2", "w3"};
    const float router[N * 64] = {0.0F};
    const ar_config c = expert_config(2);
    SCOPED(tape_clear) tape t = {0};
    run_routed(&t, &c, AR_MODE_EXACT, router);
    const taped *w = tape_find(&t, weights, 'f');
    for (size_t i = 0; i < w->count; i++)
        cr_expect_eq(w->values[i], i % N < 2 ? 0.5 : 0.0);
    for (size_t e = 0; e < N; e++)
        for (size_t p = 0; p < 3; p++) {
            char name[100];
            double largest = 0.0;
            snprintf(name, sizeof name, "model.layers.0.block_sparse_moe.experts.%zu.%s.weight", e, part[p]);
            const taped *g = tape_find(&t, name, 'g');
            for (size_t i = 0; i < g->count; i++)
                largest = fmax(largest, fabs(g->values[i]));
            cr_expect(e < 2 ? largest > 0.0 : largest == 0.0, "%s: %g", name, largest);
        }
}

/* Of weights that add up to 1, those of the gradients of their logits add up to 0, and experts not chosen have none. */
CLAIM(normalised_weights_leave_the_other_logits_alone)
{
    ar_config c = expert_config(2);
    for (int normalised = 0; normalised < 2; normalised++) {
        SCOPED(tape_clear) tape t = {0};
        float router[N * 64];
        size_t others = 0;
        c.experts.normalised = normalised == 1;
        for (size_t i = 0; i < N * c.hidden; i++)
            router[i] = (float)((i * 11) % 17) / 8.0F - 1.0F;
        run_routed(&t, &c, AR_MODE_F64, router);
        const taped *w = tape_find(&t, weights, 'f');
        const taped *dw = tape_find(&t, weights, 'b');
        const taped *dz = tape_find(&t, "model.layers.0.block_sparse_moe.logits", 'b');
        for (size_t at = 0; at < TOKENS; at++) {
            double sum = 0.0, weight = 0.0, largest = 0.0;
            for (size_t i = 0; i < N; i++) {
                const double d = dz->values[at * N + i];
                sum += d;
                weight += w->values[at * N + i];
                largest = fmax(largest, fabs(dw->values[at * N + i]));
                others += w->values[at * N + i] == 0.0 && d != 0.0;
            }
            cr_expect(fabs(sum) <= 1e-15 * largest, "token %zu: %g of %g", at, sum, largest);
            cr_expect(normalised ? fabs(weight - 1.0) < 1e-15 : weight < 1.0);
        }
        cr_expect(normalised ? others == 0 : others > TOKENS, "%zu", others);
    }
}

/* With one expert that takes every token, and whose weight is then 1, a model is the one with that MLP. */
CLAIM(one_expert_is_an_mlp)
{
    static const char *const names[][2] = {{"block_sparse_moe.experts.0.w1", "mlp.gate_proj"},
                                           {"block_sparse_moe.experts.0.w3", "mlp.up_proj"},
                                           {"block_sparse_moe.experts.0.w2", "mlp.down_proj"}};
    ar_config c = expert_config(1), dense = tiny_config(AR_ARCH_LLAMA, 1);
    c.experts.n = 1;
    dense.ffn = c.experts.ffn;
    for (int mode = (int)AR_MODE_EXACT; mode <= (int)AR_MODE_F64; mode++) {
        SCOPED(tape_clear) tape a = {0}, b = {0};
        const float router[64] = {1.0F};
        run_routed(&a, &c, (ar_number_mode)mode, router);
        run_routed(&b, &dense, (ar_number_mode)mode, router);
        cr_expect_eq(tape_find(&a, "loss", 'f')->values[0], tape_find(&b, "loss", 'f')->values[0]);
        for (size_t i = 0; i < 3; i++) {
            char of_a[100], of_b[100];
            snprintf(of_a, sizeof of_a, "model.layers.0.%s.weight", names[i][0]);
            snprintf(of_b, sizeof of_b, "model.layers.0.%s.weight", names[i][1]);
            const taped *x = tape_find(&a, of_a, 'g'), *y = tape_find(&b, of_b, 'g');
            cr_assert_eq(x->count, y->count);
            cr_expect_arr_eq(x->values, y->values, x->count * sizeof *x->values, "mode %d: %s", mode, of_a);
        }
    }
}

CLAIM(a_logit_that_is_no_number_is_named)
{
    const ar_config c = expert_config(2);
    const ar_batch batch = tiny_batch();
    float router[N * 64] = {0.0F};
    router[2 * c.hidden] = INFINITY; /* against 0 and values of both signs */
    router[2 * c.hidden + 1] = -INFINITY;
    const ar_baseline_options o = {.mode = AR_MODE_EXACT, .weights = with_router, .weights_user = router};
    double loss = 3.0;
    cr_expect_refused(ar_baseline_run(&c, &o, &batch, &loss), AR_ERR_DATA, "gate: expert 2's logit of token 0");
    cr_expect_eq(loss, 3.0);
}

CLAIM(experts_that_cannot_be_are_refused)
{
    static const struct {
        ar_experts experts;
        ar_arch arch;
        ar_status status;
        const char *says;
    } cases[] = {{{.n = 4, .per_token = 5, .ffn = 6}, AR_ARCH_LLAMA, AR_ERR_ARG, "expected 1 to 4 a token"},
                 {{.n = 4, .per_token = 0, .ffn = 6}, AR_ARCH_LLAMA, AR_ERR_ARG, "0 a token"},
                 {{.n = 4, .per_token = 2}, AR_ARCH_LLAMA, AR_ERR_ARG, "of width 0"},
                 {{.n = 4, .per_token = 2, .ffn = 6}, AR_ARCH_GPT2, AR_ERR_UNSUPPORTED, "expected Llama's form"}};
    const ar_batch batch = tiny_batch();
    const ar_baseline_options o = {.mode = AR_MODE_EXACT};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ar_config c = tiny_config(cases[i].arch, 1);
        double loss = NAN;
        c.experts = cases[i].experts;
        cr_expect_refused(ar_baseline_run(&c, &o, &batch, &loss), cases[i].status, cases[i].says);
    }
}

EVERY_CLAIM(baseline_experts)

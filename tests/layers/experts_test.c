/* SPDX-License-Identifier: Apache-2.0 */
/* Experts in an MLP's place: every tensor of a block and of a model has the bits of the independent baseline's, whoever is
 * chosen and however the ranks share the work; and what is refused. */
#include "anyrank/layers.h"
#include "gpu/device_private.h"
#include "support/bits.h"
#include "support/match.h"
#include "tests/support/test.h"

enum { B = 3, S = 6, H = 12, TOKENS = B * S };
static const int one_to_three[] = {1, 2, 3, 0};
static const char router[] = "model.layers.0.mlp.gate.weight";

static ar_config config_of(ar_experts e, size_t layers)
{
    ar_config c = match_config(e.shared > 0 ? AR_ARCH_QWEN2_MOE : AR_ARCH_QWEN3_MOE, layers);
    c.heads = c.kv_heads = 6;
    c.head_dim = 2;
    c.ffn = 6;
    c.experts = e;
    return c;
}

static match_case block_of(const ar_config *c)
{
    static float x[TOKENS * H], dy[TOKENS * H];
    fill_values(x, TOKENS * H, 3, 2.0);
    fill_values(dy, TOKENS * H, 4, 0.25);
    return (match_case){.config = *c, .batch = {.batch = B, .seq = S}, .x = x, .dy = dy, .seed = 5};
}

static match_case model_of(const ar_config *c)
{
    static int64_t ids[TOKENS];
    for (size_t i = 0; i < TOKENS; i++)
        ids[i] = (int64_t)(i * i * 7 + i) % 11;
    return (match_case){.config = *c, .batch = {.batch = B, .seq = S, .input_ids = ids}, .seed = 7};
}

static void expect_same_bits(const match_case *m, const int *tps)
{
    const ar_experts *e = &m->config.experts;
    cr_assert_eq(match(m, tps, NULL), AR_OK, "%zu of %zu experts of %zu, shared %zu: %s", e->per_token, e->n, e->ffn,
                 e->shared, ar_error_message());
}

/* --- how many, and how many of them ------------------------------------------------------------------------------- */

static const ar_experts forms[] = {
    {.n = 1, .per_token = 1, .ffn = 6},
    {.n = 5, .per_token = 1, .ffn = 6},
    {.n = 5, .per_token = 1, .ffn = 6, .normalised = true},
    {.n = 3, .per_token = 3, .ffn = 6},
    {.n = 7, .per_token = 2, .ffn = 6, .normalised = true},
    {.n = 4, .per_token = 3, .ffn = 12, .shared = 6},
    {.n = 2, .per_token = 1, .ffn = 6, .shared = 18, .normalised = true},
    {.n = 40, .per_token = 2, .ffn = 6}, /* more than tokens */
};
enum { FORMS = sizeof forms / sizeof *forms };

Test(experts, one_some_and_all_of_them_have_the_baselines_bits)
{
    for (size_t i = 0; i + 1 < FORMS; i++) {
        const ar_config c = config_of(forms[i], 1);
        const match_case m = block_of(&c);
        expect_same_bits(&m, one_to_three);
    }
}

Test(experts, models_have_the_baselines_bits_on_ranks_that_share_tokens_and_samples)
{
    static const int two[] = {2, 0}, one_two[] = {1, 2, 0};
    for (size_t i = 0; i < FORMS; i++) {
        ar_config c = config_of(forms[i], 2);
        c.dense[0] = i % 2; /* the first layer has an MLP */
        match_case m = model_of(&c);
        m.run.parallel.sp = i % 2 == 0;
        m.run.parallel.overlap = 1 + (int)i % 3;
        expect_same_bits(&m, two);
        m.run.parallel.sp = false;
        m.run.parallel.dp = 2;
        m.run.parallel.micro_batches = 2; /* of two samples, of which a rank has one, or none */
        m.run.parallel.forward_first = i % 2;
        expect_same_bits(&m, one_two);
        m.run.parallel.dp = 1;
        m.run.parallel.cp = 3;
        m.run.parallel.zigzag = i % 3 == 0;
        m.run.parallel.cp_inner = i % 3 == 1 ? 3 : 1;
        m.config.kv_heads = 6;
        expect_same_bits(&m, one_two);
    }
}

Test(experts, mixtrals_names_are_the_baselines)
{
    ar_config c = config_of(forms[4], 2);
    c.arch = AR_ARCH_MIXTRAL;
    c.experts.w123 = true;
    const match_case m = model_of(&c);
    expect_same_bits(&m, one_to_three);
}

Test(experts, every_schedule_of_the_ranks_has_the_baselines_bits)
{
    static const int two[] = {2, 0};
    const ar_config c = config_of(forms[5], 1);
    match_case m = model_of(&c);
    m.run.parallel.sp = true;
    m.run.sim.explore = true;
    for (m.run.sim.schedule_seed = 1; m.run.sim.schedule_seed <= 8; m.run.sim.schedule_seed++)
        expect_same_bits(&m, two);
}

Test(experts, a_device_without_the_hosts_memory_has_the_baselines_bits)
{
    ar_device *device = NULL;
    if (ari_device_emulated_create(&device) == AR_ERR_UNSUPPORTED)
        cr_skip_test("%s", ar_error_message());
    ar_device_destroy(device);
    for (size_t i = 4; i < 6; i++) {
        const ar_config c = config_of(forms[i], 1);
        match_case m = model_of(&c);
        m.run.device.kind = AR_DEVICE_EMULATED;
        expect_same_bits(&m, one_to_three);
    }
}

/* --- routes ------------------------------------------------------------------------------------------------------- */

/* Weights of which the router's [n, H] are these. */
static match_weights routed_by(const match_case *m, const float *values)
{
    match_weights w = {.seed = m->seed, .count = 1};
    const size_t n = m->config.experts.n * H;
    w.at[0].n = n;
    w.at[0].values = malloc(n * sizeof *values);
    cr_assert_not_null(w.at[0].values);
    memcpy(w.at[0].values, values, n * sizeof *values);
    snprintf(w.at[0].name, sizeof w.at[0].name, "%s", router);
    return w;
}

/* The tokens that go to each expert, by the baseline. */
static void count_tokens(const ari_reference *r, size_t n, size_t *tokens)
{
    const size_t at = ari_reference_find(r, "model.layers.0.mlp.weights", 'f');
    cr_assert_lt(at, r->count);
    cr_assert_eq(r->tensor[at].count, TOKENS * n);
    for (size_t i = 0; i < TOKENS * n; i++)
        tokens[i % n] += r->tensor[at].values[i] != 0.0f;
}

static void expect_routes(const ar_experts *e, const float *values, const size_t *tokens)
{
    const ar_config c = config_of(*e, 1);
    match_case m = block_of(&c);
    SCOPED(match_weights_fini) match_weights w = routed_by(&m, values);
    SCOPED(ari_reference_fini) ari_reference r = {0};
    size_t counted[8] = {0};
    cr_assert_ok(match_baseline(&m, &w, &r));
    count_tokens(&r, e->n, counted);
    for (size_t i = 0; i < e->n; i++)
        cr_expect_eq(counted[i], tokens[i], "expert %zu has %zu tokens", i, counted[i]);
    for (int tp = 1; tp <= 3; tp++)
        cr_expect_eq(match_ranks(&m, &w, &r, tp), AR_OK, "%s", ar_error_message());
    m.run.parallel.cp = 3;
    cr_expect_eq(match_ranks(&m, &w, &r, 2), AR_OK, "%s", ar_error_message());
}

/* All logits are 0; then those of experts 1 and 3, which are alike, and of the others, their opposite. */
Test(experts, of_equal_logits_the_lower_number_is_chosen)
{
    float values[5 * H] = {0.0f};
    const ar_experts two = {.n = 5, .per_token = 2, .ffn = 6}, one = {.n = 2, .per_token = 1, .ffn = 6, .shared = 6};
    expect_routes(&two, values, (const size_t[]){TOKENS, TOKENS, 0, 0, 0});
    expect_routes(&one, values, (const size_t[]){TOKENS, 0});
    for (size_t i = 0; i < H; i++)
        values[i] = values[H + i] = i % 2 ? -0.0f : 0.0f; /* -0 is no less than 0 */
    expect_routes(&one, values, (const size_t[]){TOKENS, 0});
}

/* Of experts x, -x and 0 one of the two largest is 0, which the first has; the last is below it for every token. */
Test(experts, one_may_have_all_tokens_and_another_none)
{
    float values[4 * H] = {0.0f};
    const ar_experts e = {.n = 4, .per_token = 2, .ffn = 6, .normalised = true};
    const ar_config c = config_of(e, 1);
    const match_case m = block_of(&c);
    size_t tokens[4] = {0};
    fill_values(values + H, H, 9, 1.0);
    for (size_t i = 0; i < H; i++)
        values[2 * H + i] = -values[H + i];
    {
        SCOPED(match_weights_fini) match_weights w = routed_by(&m, values);
        SCOPED(ari_reference_fini) ari_reference r = {0};
        cr_assert_ok(match_baseline(&m, &w, &r));
        count_tokens(&r, e.n, tokens);
    }
    cr_expect_eq(tokens[0], TOKENS);
    cr_expect_eq(tokens[3], 0, "row 3 is row 0: the lower number of the two");
    cr_expect(tokens[1] > 0 && tokens[2] > 0 && tokens[1] + tokens[2] == TOKENS);
    expect_routes(&e, values, tokens);
}

/* inf * positive + inf * negative. */
Test(experts, a_logit_that_is_not_a_number_is_named)
{
    float values[3 * H] = {0.0f};
    const ar_config c = config_of((ar_experts){.n = 3, .per_token = 2, .ffn = 6}, 1);
    const match_case m = block_of(&c);
    values[2 * H] = INFINITY;
    values[2 * H + 1] = -INFINITY;
    SCOPED(match_weights_fini) match_weights w = routed_by(&m, values);
    for (int native = 0; native < 2; native++) {
        ari_reference r = {0};
        cr_expect_eq(match_baseline(&m, &w, &r), AR_ERR_DATA); /* with the other weights made */
        ari_reference_fini(&r);
        const ar_run o = {.parallel.tp = 2, .numerics = native ? AR_NUMERICS_NATIVE : AR_NUMERICS_EXACT};
        cr_expect_refused(match_run(&m, &w, &o), AR_ERR_DATA, "model.layers.0.mlp.gate: expert 2's logit of token ");
    }
}

/* --- options ------------------------------------------------------------------------------------------------------ */

static ar_status create(ar_ctx *ctx, void *user)
{
    OWNED(ar_module_destroy) ar_module *m = NULL;
    return ar_experts_create(&m, ctx, "mlp", user);
}

Test(experts, what_cannot_be_is_refused)
{
    static const struct {
        ar_experts_options o;
        int ranks;
        ar_status status;
        const char *says;
    } cases[] = {
        {{.hidden = 8, .n = 3, .per_token = 4, .ffn = 6},
         1,
         AR_ERR_ARG,
         "mlp: 4 of 3 experts [6, 8], expected 1 to all"},
        {{.hidden = 8, .n = 3, .ffn = 6}, 1, AR_ERR_ARG, "mlp: 0 of 3 experts"},
        {{.hidden = 8, .per_token = 1, .ffn = 6}, 1, AR_ERR_ARG, "mlp: 1 of 0 experts"},
        {{.hidden = 8, .n = 3, .per_token = 1}, 1, AR_ERR_ARG, "experts [0, 8]"},
        {{.n = 3, .per_token = 1, .ffn = 6}, 1, AR_ERR_ARG, "experts [6, 0]"},
        {{.hidden = 8, .n = 3, .per_token = 1, .ffn = 6}, 4, AR_ERR_INDIVISIBLE, "mlp.experts.0.gate_proj.weight"},
        {{.hidden = 8, .n = 3, .per_token = 1, .ffn = 8, .shared = 6},
         4,
         AR_ERR_INDIVISIBLE,
         "mlp.shared_expert.gate_proj.weight"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ar_experts_options o = cases[i].o;
        cr_expect_refused(rank_run(&(ar_run){.parallel.tp = cases[i].ranks}, create, &o), cases[i].status,
                          cases[i].says);
    }
}

static ar_status pass_too_wide(ar_ctx *ctx, void *user)
{
    static const float zeros[2 * 9];
    const size_t shape[2] = {2, 9};
    OWNED(ar_module_destroy) ar_module *m = NULL;
    OWNED(ar_saved_destroy) ar_saved *saved = NULL;
    ar_tensor x, y;
    AR_TRY(ar_saved_create(&saved));
    AR_TRY(ar_experts_create(&m, ctx, "mlp", user));
    AR_TRY(rank_upload(ctx, &x, 2, shape, zeros));
    return ar_module_forward(m, ctx, saved, &y, &x, NULL);
}

Test(experts, an_input_of_another_width_is_refused)
{
    ar_experts_options o = {.hidden = 8, .n = 3, .per_token = 1, .ffn = 6};
    cr_expect_refused(rank_run(&(ar_run){.parallel.tp = 1}, pass_too_wide, &o), AR_ERR_SHAPE, "mlp");
}

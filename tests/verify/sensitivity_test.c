/* SPDX-License-Identifier: Apache-2.0 */
/* What rounding may change: PyTorch's fp32 results are within it, a gradient that is 1 % off is not; the formats follow
 * each other in size; every tensor of the files has its number. */
#include "tests/verify/support.h"

#include "anyrank/grads.h"
#include "ref/core/device_private.h"
#include "ref/core/sensitivity_private.h"
#include "ref/io/safetensors_private.h"
#include "verify/check/check_run.h"

#define GOLDEN TEST_GOLDEN_DIR "/llama-mqa-tied-tiny"

static void grads(ar_precision precision, const char *out, bool block, ar_sensitivity of)
{
    ar_grads_result r;
    const ar_grads_options o = {.run.model = block ? NULL : GOLDEN,
                                .input = block ? NULL : GOLDEN "/batch.safetensors",
                                .block = block ? TEST_GOLDEN_DIR "/block-mqa-bidirectional" : NULL,
                                .out = out,
                                .run.parallel = {.tp = precision == AR_PRECISION_F32 ? 1 : 2},
                                .run.numerics = precision == AR_PRECISION_F32 ? AR_NUMERICS_EXACT : AR_NUMERICS_NATIVE,
                                .run.precision = precision,
                                .sensitivity = true,
                                .sensitivity_of = of,
                                .run.threads = 2};
    cr_assert_ok(ar_grads(&r, &o));
}

static double allowed_of(const ar_st_file *f, const char *name)
{
    const ar_st_entry *e = ari_st_find(f, name);
    double value = NAN;
    cr_assert(e && e->dtype == AR_F64 && e->ndim == 0 && e->count == 1, "%s", name);
    memcpy(&value, e->data, sizeof value);
    return value;
}

static float *values_of(const ar_st_file *f, const char *name, size_t *count)
{
    const ar_st_entry *e = ari_st_find(f, name);
    cr_assert_not_null(e, "%s", name);
    float *values = calloc(e->count, sizeof *values);
    cr_assert(values && ari_st_to_f32(e, values) == AR_OK);
    *count = e->count;
    return values;
}

/* The worst difference of PyTorch's file, times `factor`, from ours, over what is allowed. */
static double worst_ratio(const char *out, const char *file, const ar_st_file *allowed, float factor)
{
    OWNED(ari_st_close) ar_st_file *ours = open_in(out, file), *theirs = open_in(GOLDEN, file);
    double worst = 0.0;
    for (size_t i = 0; i < ari_st_tensor_count(ours); i++) {
        const char *name = ari_st_at(ours, i)->name;
        const double limit = allowed_of(allowed, name);
        size_t n = 0, m = 0;
        OWNED(free) float *x = values_of(ours, name, &n), *y = values_of(theirs, name, &m);
        cr_assert(limit > 0.0 && n == m, "%s: %g", name, limit);
        for (size_t k = 0; k < n; k++)
            worst = fmax(worst, fabs((double)x[k] - (double)(factor * y[k])) / limit);
    }
    return worst;
}

/* Of one rank; and of two that store all of it in 16 bits, within pure bf16 of PyTorch's fp32 results. */
Test(sensitivity, pytorchs_results_are_within_and_a_percent_is_not)
{
    static const struct {
        ar_precision precision;
        ar_sensitivity of;
        float factor; /* of gradients that are outside, */
        double ratio; /* by this */
    } rows[] = {{AR_PRECISION_F32, AR_SENSITIVITY_F32, 1.01f, 30.0},
                {AR_PRECISION_BF16, AR_SENSITIVITY_BF16_PURE, 2.0f, 1.0}};
    for (size_t i = 0; i < 2; i++) {
        OWNED(end_folder) char *out = new_folder();
        grads(rows[i].precision, out, false, rows[i].of);
        OWNED(ari_st_close)
        ar_st_file *allowed = open_in(out, "allowed.safetensors"), *found = open_in(out, "outputs.safetensors");
        const double outputs = worst_ratio(out, "outputs.safetensors", allowed, 1.0f);
        const double gradients = worst_ratio(out, "grads.safetensors", allowed, 1.0f);
        cr_expect_not_null(ari_st_find(found, "loss"));
        cr_expect(outputs > 0.01 && outputs < 0.5, "row %zu: %g", i, outputs);
        cr_expect(gradients > 0.01 && gradients < 0.5, "row %zu: %g", i, gradients);
        cr_expect_gt(worst_ratio(out, "grads.safetensors", allowed, rows[i].factor), rows[i].ratio, "row %zu", i);
        cr_expect_str_eq(ari_st_metadata(allowed, "anyrank.allows"), ari_sensitivity_name(rows[i].of));
        cr_expect_str_eq(ari_st_metadata(allowed, "anyrank.seeds"), "3");
    }
}

/* Names of outputs, of gradients, and of models.md: the LM head's gradient on its way back is in no other file. */
static const char *const some[] = {"logits", "model.layers.0.mlp.down_proj.weight", "lm_head:bwd",
                                   "model.layers.1.self_attn.probs:fwd"};
enum { SOME = sizeof some / sizeof *some };

/* Unit round-offs of 2^-24, 2^-11 and 2^-8: TF32 rounds operands alone, bf16 all between them, pure bf16 everything. */
Test(sensitivity, formats_differ_by_their_unit_round_offs)
{
    static const ar_sensitivity formats[] = {AR_SENSITIVITY_F32, AR_SENSITIVITY_TF32, AR_SENSITIVITY_F16,
                                             AR_SENSITIVITY_BF16, AR_SENSITIVITY_BF16_PURE};
    static const double least[] = {0.0, 300.0, 1.0, 5.0, 1.0}, most[] = {0.0, 16000.0, HUGE_VAL, 12.0, 20.0};
    double before[SOME] = {0.0};
    for (size_t k = 0; k < sizeof formats / sizeof *formats; k++) {
        OWNED(end_folder) char *out = new_folder();
        grads(AR_PRECISION_F32, out, false, formats[k]);
        OWNED(ari_st_close) ar_st_file *f = open_in(out, "allowed.safetensors");
        for (size_t i = 0; i < SOME; i++) {
            const double value = allowed_of(f, some[i]);
            cr_expect(k == 0 || (value > least[k] * before[i] && value < most[k] * before[i]), "%s of %s: %g, %g",
                      some[i], ari_sensitivity_name(formats[k]), value, before[i]);
            before[i] = value;
        }
    }
}

Test(sensitivity, a_block_has_allowances_too)
{
    OWNED(end_folder) char *out = new_folder();
    grads(AR_PRECISION_F32, out, true, AR_SENSITIVITY_F32);
    OWNED(ari_st_close) ar_st_file *f = open_in(out, "allowed.safetensors"), *block = open_in(out, "block.safetensors");
    for (size_t i = 0; i < ari_st_tensor_count(block); i++)
        cr_expect_gt(allowed_of(f, ari_st_at(block, i)->name), 0.0);
}

/* --- native checks ------------------------------------------------------------------------------------------------ */

static ar_check_options native(const char *model, const ar_parallel *layouts, size_t n, size_t batch, size_t seq,
                               ar_precision precision)
{
    ar_check_options o = check_layouts(model, layouts, n, batch, seq);
    o.run.numerics = AR_NUMERICS_NATIVE;
    o.run.precision = precision;
    return o;
}

Test(sensitivity, native_products_stay_within_and_a_missing_reduction_does_not)
{
    static const ar_parallel layouts[] = {{.tp = 2, .sp = true}, {.dp = 2, .tp = 4}};
    OWNED(end_folder) char *folder = new_model(tiny_models[TINY_LLAMA]);
    for (int p = 0; p < AR_PRECISION_COUNT; p += small_only() ? 2 : 1) {
        ar_check_options o = native(folder, layouts, 2, 2, 8, (ar_precision)p);
        OWNED(ar_check_report_destroy) ar_check_report *r = check_or_fail(&o);
        o.run.fault = "column_dx_not_reduced";
        OWNED(ar_check_report_destroy) ar_check_report *faulty = check_or_fail(&o);
        cr_expect_eq(r->precision, (ar_precision)p);
        for (size_t i = 0; i < 2; i++) {
            const ar_check_run *run = &r->run[i], *other = &faulty->run[i];
            cr_expect(run->result == AR_CHECK_SAME && run->max_ratio > 0.02 && run->max_ratio < 0.5, "%s: %g of %s",
                      ari_precision_name((ar_precision)p), run->max_ratio, run->ratio_tensor);
            cr_expect(other->result == AR_CHECK_DIFFERENT && other->max_ratio > 2.0, "%s: %g",
                      ari_precision_name((ar_precision)p), other->max_ratio);
            cr_expect_str_eq(other->first.tensor, "lm_head:bwd");
        }
    }
}

/* Adam moves a weight by as much where its gradient is rounding: in these cases the second step's embeddings or
 * gradients differ by more than three draws of rounding show. */
Test(sensitivity, what_an_update_in_doubt_does_to_the_next_step_is_allowed)
{
    static const struct {
        const char *config;
        ar_precision precision;
        uint64_t seed;
        size_t batch, seq;
        double lr;
    } cases[] = {{"{\"model_type\": \"gpt2\", \"vocab_size\": 24, \"n_embd\": 12, \"n_layer\": 4, \"n_head\": 2, "
                  "\"n_positions\": 64}",
                  AR_PRECISION_TF32, 331, 8, 8, 0.001},
                 {"{\"model_type\": \"gpt2\", \"vocab_size\": 55, \"n_embd\": 28, \"n_layer\": 2, \"n_head\": 2, "
                  "\"n_positions\": 64, \"n_inner\": 24}",
                  AR_PRECISION_BF16, 949, 4, 24, 0.01}};
    static const ar_parallel layout = {.tp = 2};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i += small_only() ? 2 : 1) {
        OWNED(end_folder) char *folder = new_model(cases[i].config);
        ar_check_options o = native(folder, &layout, 1, cases[i].batch, cases[i].seq, cases[i].precision);
        o.run.seed = cases[i].seed;
        o.run.steps = 2;
        o.run.optimizer = ar_optimizer_defaults(i == 0 ? AR_OPTIMIZER_ADAM : AR_OPTIMIZER_ADAMW);
        o.run.optimizer.lr = cases[i].lr;
        o.run.clip = 1.0;
        OWNED(ar_check_report_destroy) ar_check_report *r = check_or_fail(&o);
        const ar_check_run *run = &r->run[0];
        cr_expect(run->result == AR_CHECK_SAME && run->max_ratio > 0.02 && run->max_ratio < 0.5,
                  "case %zu: %g of %s, %s", i, run->max_ratio, run->ratio_tensor, first_of(run));
    }
}

/* What is allowed element by element of a gradient is that of arguments within their allowance of 0. */
static void expect_doubt_near_0(const ar_check_options *o, const char *json, const char *folder)
{
    SCOPED(ari_check_base_fini) ari_check_base base = {.weights = NULL};
    const ar_config c = config_of(json);
    size_t doubted = 0, other = 0;
    cr_assert_ok(ari_check_base_init(&base, o, &c, folder));
    for (int layer = 0; layer < 2; layer++) {
        char name[64];
        snprintf(name, sizeof name, "model.layers.%d.mlp.gate_proj", layer);
        const ari_ref_tensor *x = &base.ref.tensor[ari_reference_find(&base.ref, name, 'f')];
        snprintf(name, sizeof name, "model.layers.%d.mlp.gate", layer);
        const ari_ref_tensor *dx = &base.ref.tensor[ari_reference_find(&base.ref, name, 'b')];
        cr_assert(dx->allowed_each && dx->count == x->count);
        for (size_t k = 0; k < x->count; k++) {
            const bool near = fabs((double)x->values[k]) <= x->allowed;
            cr_expect(near || dx->allowed_each[k] == 0.0f, "element %zu", k);
            doubted += near && dx->allowed_each[k] > 0.0f;
            other += !near;
        }
    }
    cr_expect(doubted > 0 && doubted <= base.ref.kinks && other > 0, "%zu of %zu", doubted, base.ref.kinks);
}

/* Slopes of relu that the run has on the other side of 0 than the reference: three draws of rounding show none. */
Test(sensitivity, a_slope_in_doubt_is_allowed_where_the_argument_is_near_0_and_nowhere_else)
{
    static const char relu[] = "{\"model_type\": \"llama\", \"vocab_size\": 64, \"hidden_size\": 16, "
                               "\"intermediate_size\": 24, \"num_hidden_layers\": 2, \"num_attention_heads\": 4, "
                               "\"hidden_act\": \"relu\", \"initializer_range\": 3}";
    static const uint64_t seeds[] = {20, 29};
    static const ar_parallel layout = {.tp = 2};
    OWNED(end_folder) char *folder = new_model(relu);
    ar_check_options o = native(folder, &layout, 1, 2, 8, AR_PRECISION_BF16);
    for (size_t i = 0; i < sizeof seeds / sizeof *seeds; i++) {
        o.run.seed = seeds[i];
        OWNED(ar_check_report_destroy) ar_check_report *r = check_or_fail(&o);
        cr_expect(r->run[0].result == AR_CHECK_SAME && r->kinks > 0, "seed %d: %g of %s", (int)seeds[i],
                  r->run[0].max_ratio, r->run[0].ratio_tensor);
    }
    o.run.fault = "norm_backward_missing";
    OWNED(ar_check_report_destroy) ar_check_report *faulty = check_or_fail(&o);
    cr_expect_eq(faulty->run[0].result, AR_CHECK_DIFFERENT);
    expect_doubt_near_0(&o, relu, folder);
}

/* Were all of them on one side at once, the norm of one rank's gradients alone would be allowed. */
Test(sensitivity, many_slopes_in_doubt_do_not_hide_a_fault)
{
    static const ar_parallel layout = {.dp = 2, .tp = 2};
    OWNED(end_folder)
    char *folder = new_model("{\"model_type\": \"llama\", \"vocab_size\": 64, \"hidden_size\": 32, "
                             "\"intermediate_size\": 64, \"num_hidden_layers\": 2, \"num_attention_heads\": 4, "
                             "\"num_key_value_heads\": 2, \"hidden_act\": \"relu\"}");
    ar_check_options o = native(folder, &layout, 1, 4, 8, AR_PRECISION_BF16);
    o.run.steps = 1;
    o.run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    o.run.clip = 1.0;
    for (int faulty = 0; faulty < 2; faulty++) {
        o.run.fault = faulty ? "gradnorm_first_rank_only" : NULL;
        OWNED(ar_check_report_destroy) ar_check_report *r = check_or_fail(&o);
        cr_expect_eq(r->run[0].result, faulty ? AR_CHECK_DIFFERENT : AR_CHECK_SAME, "%g of %s", r->run[0].max_ratio,
                     r->run[0].ratio_tensor);
        cr_expect_gt(r->kinks, 1000u);
    }
}

Test(sensitivity, exact_numerics_take_no_tf32)
{
    static const ar_parallel one = {.tp = 1};
    ar_check_report *r = NULL;
    ar_check_options o = check_layouts("llama-demo", &one, 1, 1, 8);
    o.run.precision = AR_PRECISION_TF32;
    cr_expect_refused(ar_check(&r, &o), AR_ERR_ARG, "tf32");
    ar_grads_result g;
    const ar_grads_options of_grads = {
        .run.model = GOLDEN, .input = GOLDEN "/batch.safetensors", .out = "/tmp", .run.precision = AR_PRECISION_TF32};
    cr_expect_eq(ar_grads(&g, &of_grads), AR_ERR_ARG);
}

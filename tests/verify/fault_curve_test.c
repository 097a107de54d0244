/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/faults/fault_case.h"

#include "ref/core/fault_private.h"
#include "ref/models/parallel_private.h"
#include "support/together.h"
#include "tests/verify/support.h"
#include "verify/check/check_run.h"
#include "verify/writer/dump_listener_private.h"

/* One gradient of four elements on each of two ranks; loss 4 at every step. */
static const float usual[2][4] = {{1.0f, -2.0f, 0.5f, 0.0f}, {4.0f, 1.0f, 0.0f, -1.0f}};

static void report(ari_fault_trace *t, int rank, const float *values, size_t count)
{
    float copy[4];
    ar_tensor local;
    const size_t first = (size_t)rank * 4;
    const ar_layout layout = {.ndim = 1,
                              .shape = {8},
                              .nbox = 1,
                              .box = {{.global = {first}, .local = {0}, .extent = {count}}},
                              .replicas = 1};
    memcpy(copy, values, count * sizeof *copy);
    cr_assert_ok(ar_tensor_view(&local, AR_F32, 1, &count, (ar_buf){copy}));
    const ar_tap_event e = {.name = "w", .pass = 'g', .step = 1, .local = &local, .layout = &layout};
    cr_assert_ok(ar_dump_listener_tap(t->gradients.rank[rank], &e));
}

static ari_fault_trace make_of(const float values[2][4])
{
    const ar_parallel two = {.dp = 2};
    ari_fault_trace t = {.ended = true};
    cr_assert_ok(ari_dump_ranks_create(&t.gradients, &two, NULL));
    for (int r = 0; r < 2; r++)
        report(&t, r, values[r], 4);
    for (int i = 0; i < ARI_CURVE_STEPS; i++)
        t.loss[i] = 4.0f;
    return t;
}

/* The worst step counts, relative to the clean loss; the first ten have a deviation of their own. */
CLAIM(losses_deviate_by_their_worst_step)
{
    static const struct {
        int step[2];
        float loss[2];
        double all, first;
    } rows[] = {
        {{0, 0}, {4.0f, 4.0f}, 0.0, 0.0}, {{3, 19}, {4.5f, 3.0f}, 0.25, 0.125}, {{9, 10}, {4.25f, 5.0f}, 0.25, 0.0625}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        SCOPED(ari_fault_trace_fini) ari_fault_trace clean = make_of(usual), faulty = make_of(usual);
        for (int k = 0; k < 2; k++)
            faulty.loss[rows[i].step[k]] = rows[i].loss[k];
        const ari_fault_curve c = ari_fault_curve_of(&clean, &faulty);
        cr_assert(c.loss == rows[i].all && c.first_losses == rows[i].first && c.gradient == 0.0, "row %zu", i);
        cr_assert_str_eq(c.gradient_tensor, "");
    }
}

/* Rank 1 holds the tensor's largest element, rank 0 the wrong one: 0.5 of 4. */
CLAIM(a_gradient_is_measured_by_its_largest_element_on_any_rank)
{
    float values[2][4];
    memcpy(values, usual, sizeof values);
    values[0][2] = 1.0f;
    SCOPED(ari_fault_trace_fini) ari_fault_trace clean = make_of(usual), faulty = make_of((const float(*)[4])values);
    const ari_fault_curve c = ari_fault_curve_of(&clean, &faulty);
    cr_assert_eq(c.gradient, 0.125);
    cr_assert_str_eq(c.gradient_tensor, "w");
    cr_assert_eq(c.loss, 0.0);
}

CLAIM(what_is_no_number_or_not_there_is_infinitely_far)
{
    float values[2][4];
    memcpy(values, usual, sizeof values);
    values[1][0] = NAN;
    SCOPED(ari_fault_trace_fini) ari_fault_trace clean = make_of(usual), faulty = make_of((const float(*)[4])values);
    faulty.loss[0] = NAN;
    ari_fault_curve c = ari_fault_curve_of(&clean, &faulty);
    cr_expect(isinf(c.gradient) && isinf(c.loss));
    ari_dump_listener_clear(faulty.gradients.rank[1]);
    report(&faulty, 1, usual[1], 3);
    cr_expect(isinf(ari_fault_curve_of(&clean, &faulty).gradient));
    ari_dump_listener_clear(faulty.gradients.rank[1]);
    report(&faulty, 1, usual[1], 4);
    cr_expect_eq(ari_fault_curve_of(&clean, &faulty).gradient, 0.0);
    ari_dump_listener_clear(faulty.gradients.rank[0]);
    cr_expect(isinf(ari_fault_curve_of(&clean, &faulty).gradient));
}

CLAIM(every_fault_has_a_legal_case_of_its_own)
{
    for (size_t f = 0; f < ari_fault_count; f++) {
        const char *name = ari_fault_names[f];
        const ari_fault_case c = ari_fault_case_of(name);
        ar_config config;
        ar_plan plan;
        cr_expect(ari_fault_is(c.fault, name), "%s has no case", name);
        cr_expect(c.run.batch > 0 && c.run.seq > 0 && c.run.steps >= 1 && c.run.clip >= 0.0 && c.run.dropout < 1.0);
        if (c.module)
            continue;
        cr_assert_eq(ari_fault_case_load(&config, &plan, &c), AR_OK, "%s: %s", name, ar_error_message());
        cr_expect_eq(ari_parallel_check(&c.run.parallel, &config, &plan, c.run.batch, c.run.seq), AR_OK, "%s: %s", name,
                     ar_error_message());
    }
}

CLAIM(cases_are_alike_up_to_the_fault)
{
    const ari_fault_case a = ari_fault_case_of("init_local_fan");
    ari_fault_case b = ari_fault_case_of("init_per_shard_seed");
    cr_expect(ari_fault_case_equal(&a, &b));
    b.run.dropout = 0.1;
    cr_expect_not(ari_fault_case_equal(&a, &b));
    b = ari_fault_case_of("sp_norm_grad_local");
    cr_expect_not(ari_fault_case_equal(&a, &b));
    b = ari_fault_case_of("row_bias_every_rank");
    cr_expect_not(ari_fault_case_equal(&a, &b));
}

/* Twenty steps of the smallest case: gradients of every rank, losses that fall, and a fault that shows in both. */
CLAIM(a_run_is_traced_on_every_rank)
{
    ari_fault_case c = ari_fault_case_of("dp_group_missing");
    OWNED(end_folder) char *folder = new_model(tiny_models[TINY_STACK]);
    c.run.model = folder;
    c.run.batch = 2;
    c.run.seq = 4;
    SCOPED(ari_fault_trace_fini) ari_fault_trace clean, again, faulty;
    cr_assert_ok(ari_fault_trace_run(&clean, &c, NULL, 1, 0));
    cr_assert_ok(ari_fault_trace_run(&again, &c, NULL, 2, 0));
    cr_assert_ok(ari_fault_trace_run(&faulty, &c, "dp_group_missing", 1, 0));
    cr_assert(clean.ended && again.ended && faulty.ended && clean.gradients.ranks == 2);
    const size_t count = ari_dump_listener_count(clean.gradients.rank[0]);
    cr_expect(count > 10 && ari_dump_listener_count(clean.gradients.rank[1]) == count);
    cr_expect_lt(clean.loss[ARI_CURVE_STEPS - 1], clean.loss[0]);
    const ari_fault_curve same = ari_fault_curve_of(&clean, &again), other = ari_fault_curve_of(&clean, &faulty);
    cr_expect(same.loss == 0.0 && same.gradient == 0.0);
    cr_expect(other.loss > 0.0 && other.gradient > 0.1);
}

/* On a curve of ten losses nobody sees them; a check stops at the first step. */
CLAIM(five_faults_hide_from_ten_losses_and_not_from_a_check)
{
    static const char *const hidden[] = {"bucket_reduced_twice", "unused_in_last_micro_batch",
                                         "gradnorm_first_rank_only", "weight_decay_on_shard_only", "norm_fp16_store"};
    static const char model[] = "{\"model_type\": \"llama\", \"vocab_size\": 256, \"hidden_size\": 64, "
                                "\"intermediate_size\": 96, \"num_hidden_layers\": 2, \"num_attention_heads\": 8, "
                                "\"num_key_value_heads\": 2, \"hidden_act\": \"silu\", "
                                "\"max_position_embeddings\": 128, \"rms_norm_eps\": 1e-5, "
                                "\"tie_word_embeddings\": false, \"initializer_range\": 0.02}";
    SCOPED(ari_fault_bases_fini) ari_fault_bases bases = {.threads = 1};
    OWNED(end_folder) char *folder = new_model(model);
    for (size_t i = 0; i < sizeof hidden / sizeof *hidden; i += small_only() ? 5 : 1) {
        ari_fault_case c = ari_fault_case_of(hidden[i]);
        const char *name = hidden[i];
        SCOPED(ari_fault_trace_fini) ari_fault_trace clean, faulty;
        SCOPED(ari_check_run_fini) ar_check_run run;
        c.run.model = folder;
        c.run.seq = 16;
        cr_assert_ok(ari_fault_trace_run(&clean, &c, NULL, 1, 0));
        cr_assert_ok(ari_fault_trace_run(&faulty, &c, hidden[i], 1, 0));
        cr_assert(clean.ended && faulty.ended);
        const ari_fault_curve curve = ari_fault_curve_of(&clean, &faulty);
        cr_expect_lt(curve.first_losses, ARI_CURVE_UNSEEN, "%s: the losses deviate by %g", name, curve.first_losses);
        cr_assert_ok(ari_fault_case_run(&run, &bases, &c, hidden[i]));
        cr_expect(run.result == AR_CHECK_DIFFERENT && run.first.step == 1, "%s is not caught", name);
    }
}

EVERY_CLAIM(fault_curve)

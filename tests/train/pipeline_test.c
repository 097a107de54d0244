/* SPDX-License-Identifier: Apache-2.0 */
/* Steps through a pipeline: one rank's bits under every schedule, and failures that name their stage. The memory that a
 * schedule promises is held by generated_test.c of tests/pipeline and memory_test.c of tests/planner. */
#include "tests/train/batches.h"
#include "tests/train/recorded.h"

#include "ref/context/context.h"
#include "ref/core/schedule_private.h"
#include "ref/layers/parts.h"
#include "ref/pipeline/schedule_private.h"
#include "ref/train/gradients_private.h"
#include "support/small.h"

enum { B = 5, S = 8, STEPS = 2, LAYERS = 4 };

/* --- bits --------------------------------------------------------------------------------------------------------- */

#define INTERLEAVED(ranks) .pp = (ranks), .schedule = AR_PP_INTERLEAVED, .virtual_stages = 2
#define ZERO_BUBBLE(ranks) .pp = (ranks), .schedule = AR_PP_ZERO_BUBBLE
static const ar_parallel layouts[] = {
    {.pp = 2, .micro_batches = 5},
    {.pp = 4, .micro_batches = 2}, /* fewer than stages */
    {.pp = 3, .micro_batches = 3, .stages = {3, {2, 1, 1}}},
    {.pp = 3, .schedule = AR_PP_GPIPE, .micro_batches = 3, .stages = {3, {0, 3, 1}}},
    {ZERO_BUBBLE(4), .micro_batches = 5},
    {ZERO_BUBBLE(2), .micro_batches = 1},
    {INTERLEAVED(2), .micro_batches = 3}, /* no multiple of the ranks */
    {.pp = 2, .dp = 2, .micro_batches = 2, .zero = 1},
    {.pp = 2, .dp = 3, .micro_batches = 2, .schedule = AR_PP_GPIPE}, /* a rank has one sample, others two */
    {ZERO_BUBBLE(2), .tp = 2, .sp = true, .overlap = 2, .micro_batches = 3},
    {ZERO_BUBBLE(2), .cp = 2, .zigzag = true, .micro_batches = 2, .recompute = {AR_RECOMPUTE_SELECTIVE}},
    {INTERLEAVED(2), .dp = 2, .tp = 2, .micro_batches = 2, .recompute = {AR_RECOMPUTE_FULL, 2}},
    {.pp = 3, .micro_batches = 3, .stages = {3, {2, 2}}}, /* the last has the head alone: not of a stack, without one */
};
enum { LAYOUTS = sizeof layouts / sizeof *layouts };

Test(pipeline, every_layout_of_every_architecture_has_one_ranks_bits)
{
    ar_batch *d = batches(B, S, true);
    for (int arch = AR_ARCH_LLAMA; arch <= AR_ARCH_STACK; arch++) {
        const ar_config c = config_of((ar_arch)arch, LAYERS, 4);
        ari_cluster_options o = adamw_job(&c, d, STEPS);
        o.run.dropout = 0.25;
        o.run.ddp.bucket_bytes = 1024;
        expect_layouts(&o, layouts, LAYOUTS - (arch == AR_ARCH_STACK));
    }
}

Test(pipeline, ranks_without_samples_only_sum)
{
    static const ar_parallel few[] = {
        {.pp = 2, .dp = 2, .micro_batches = 3}, {ZERO_BUBBLE(2), .dp = 3}, {INTERLEAVED(2), .dp = 2, .zero = 1}};
    const ar_config c = config_of(AR_ARCH_GPT2, LAYERS, 4);
    ar_batch *d = batches(B, S, true);
    for (size_t i = 0; i < STEPS; i++) { /* the last sample, which has most targets */
        d[i].batch = 1;
        d[i].input_ids += (B - 1) * S;
        d[i].labels += (B - 1) * S;
    }
    const ari_cluster_options o = adamw_job(&c, d, STEPS);
    expect_layouts(&o, few, sizeof few / sizeof *few);
}

Test(pipeline, buckets_of_every_kind_sum_a_tied_weight_over_both_ends)
{
    static const ar_parallel few[] = {{.pp = 3, .micro_batches = 2, .stages = {3, {1, 2, 1}}},
                                      {ZERO_BUBBLE(2), .dp = 2, .micro_batches = 2}};
    const ar_config c = config_of(AR_ARCH_GPT2, LAYERS, 4);
    ar_batch *d = batches(B, S, true);
    for (int i = 0; i < 6; i++) {
        ari_cluster_options o = adamw_job(&c, d, STEPS);
        o.run.ddp = (ar_ddp_options){.bucket_bytes = i % 3 == 0   ? 0
                                                     : i % 3 == 1 ? 900
                                                                  : AR_BUCKET_BYTES,
                                     .mode = i % 2 ? AR_BUCKETS_EAGER : AR_BUCKETS_OVERLAP,
                                     .order = i < 3 ? AR_BUCKETS_REVERSE : AR_BUCKETS_BY_SIZE,
                                     .find_unused = i % 2 == 0};
        expect_layouts(&o, few, sizeof few / sizeof *few);
    }
}

Test(pipeline, a_forward_pass_alone_goes_through_all_stages)
{
    const ar_config c = config_of(AR_ARCH_LLAMA, LAYERS, 4);
    ar_batch *d = batches(B, S, true);
    ari_cluster_options o = adamw_job(&c, d, STEPS);
    o.run.steps = 0;
    o.forward_only = true;
    for (int s = 0; s < AR_PP_SCHEDULES; s++) {
        const ar_parallel p = {.pp = 2,
                               .virtual_stages = s == AR_PP_INTERLEAVED ? 2 : 1,
                               .schedule = (ar_pp_schedule)s,
                               .micro_batches = 4};
        expect_layouts(&o, &p, 1);
    }
}

/* --- schedules of one's own --------------------------------------------------------------------------------------- */

/* A rank may send before the other receives what was sent before: nobody waits for his sends. */
Test(pipeline, a_schedule_of_ones_own_has_one_ranks_bits)
{
    static const struct {
        const char *lists;
        ar_parallel p;
    } own[] = {
        /* breadth first: all of a stage, then all of the next one of the rank */
        {"0F0,0F1,0F2,0F3,2F0,2F1,2F2,2F3,2B0,2B1,2B2,2B3,0B0,0B1,0B2,0B3\n"
         "1F0,1F1,1F2,1F3,3F0,3F1,3F2,3F3,3B0,3B1,3B2,3B3,1B0,1B1,1B2,1B3\n",
         {.pp = 2, .virtual_stages = 2, .micro_batches = 4}},
        /* micro-batches in another order there than back, whole passes and passes in parts */
        {"0F1,0F0,0F2,0I1,0B2,0B0,0W1\n"
         "1F1,1F0,1B1,1F2,1I2,1W2,1B0\n",
         {.pp = 2, .micro_batches = 3}},
        /* one rank is far ahead of the other */
        {"0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n"
         "1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n",
         {.pp = 2, .dp = 2, .micro_batches = 4}},
    };
    const ar_config c = config_of(AR_ARCH_GPT2, LAYERS, 4);
    ar_batch *d = batches(B, S, true);
    const ari_cluster_options o = adamw_job(&c, d, STEPS);
    OWNED(recorded_free) recorded *whole = record(&o);
    for (size_t i = 0; i < sizeof own / sizeof *own; i++) {
        OWNED(ari_pipeline_schedule_destroy) ar_pipeline_schedule *s = NULL;
        ar_parallel p = own[i].p;
        cr_assert_ok(ari_pipeline_schedule_parse(&s, own[i].lists, strlen(own[i].lists), "own"));
        p.own_schedule = s;
        expect_one_ranks_bits(whole, &o, &p);
    }
}

Test(pipeline, a_schedule_of_another_shape_is_refused)
{
    static const struct {
        ar_parallel p;
        const char *says;
    } wrong[] = {{{.pp = 2, .micro_batches = 3}, "micro-batches"},
                 {{.pp = 4, .micro_batches = 2}, "ranks"},
                 {{.pp = 2, .virtual_stages = 2, .micro_batches = 2}, "stages"}};
    const ar_config c = config_of(AR_ARCH_GPT2, LAYERS, 4);
    ar_batch *d = batches(B, S, true);
    const ari_cluster_options o = adamw_job(&c, d, STEPS);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        float loss[RECORDED_STEPS];
        OWNED(ari_pipeline_schedule_destroy) ar_pipeline_schedule *s = NULL;
        ar_parallel p = wrong[i].p;
        cr_assert_ok(ari_pipeline_schedule_create(&s, AR_PP_1F1B, 2, 1, 2));
        p.own_schedule = s;
        cr_expect_refused(tapped_run(&o, &p, NULL, NULL, loss), AR_ERR_ARG, wrong[i].says);
    }
}

typedef struct fails_at {
    const char *name;
    char pass;
    int left; /* reports until it fails */
} fails_at;

static ar_status fail_there(void *user, const ar_tap_event *e)
{
    fails_at *f = user;
    if (strcmp(e->name, f->name) != 0 || e->pass != f->pass || f->left-- > 0)
        return AR_OK;
    return ar_error_set(AR_ERR_DATA, "no more of %s", f->name);
}

Test(pipeline, a_rank_that_fails_in_a_pass_ends_all_with_the_stage_and_the_micro_batch)
{
    static const struct {
        fails_at at;
        const char *says;
    } cases[] = {{{"model.layers.0", 'f', 2}, "stage 0, micro-batch 2, F: no more of model.layers.0"},
                 {{"model.layers.2", 'f', 1}, "stage 2, micro-batch 1, F: no more of model.layers.2"},
                 {{"model.layers.3", 'b', 0}, "stage 3, micro-batch 0, "},
                 {{"model.layers.1", 'b', 4}, "stage 1, micro-batch 4, "}};
    const ar_config c = config_of(AR_ARCH_LLAMA, LAYERS, 4);
    ar_batch *d = batches(B, S, true);
    for (size_t i = 0; i < 4 * sizeof cases / sizeof *cases; i++) {
        const ar_pp_schedule schedule = (ar_pp_schedule)(i % 4);
        const bool turns = schedule == AR_PP_INTERLEAVED;
        fails_at at[4];
        void *users[4];
        ari_cluster_options o = adamw_job(&c, d, STEPS);
        ari_cluster_result result;
        for (int r = 0; r < 4; r++) {
            at[r] = cases[i / 4].at;
            users[r] = &at[r];
        }
        o.tap = fail_there;
        o.tap_user = users;
        o.run.threads = 1;
        o.run.parallel = (ar_parallel){
            .pp = turns ? 2 : 4, .virtual_stages = turns ? 2 : 1, .schedule = schedule, .micro_batches = B};
        cr_expect_eq(ari_cluster_run(&result, &o), AR_ERR_DATA, "%s", ar_error_message());
        cr_expect_not_null(strstr(ar_error_message(), cases[i / 4].says), "%s: %s", ari_pp_schedule_name(schedule),
                           ar_error_message());
        free(result.loss);
        free(result.reports);
    }
}

typedef struct verdicts {
    const ar_config *config;
    bool broken; /* the tied table of the last rank, which has another number in its first place, and the weight of a
                    norm of the second rank's */
    size_t findings[8];
    char text[8][2][200];
} verdicts;

static ar_status spoil(ar_param *p, ar_ctx *ctx)
{
    float values[256];
    AR_TRY(ar_ctx_download(ctx, values, &p->value));
    values[0] += 1.0f;
    return ar_ctx_upload(ctx, &p->value, values);
}

static ar_status spoil_some(ar_param *const *params, size_t n, ar_ctx *ctx, int rank)
{
    for (size_t i = 0; i < n; i++) {
        if ((rank == 5 && params[i]->ends) || (rank == 3 && strcmp(params[i]->name, "transformer.h.2.ln_1.bias") == 0))
            AR_TRY(spoil(params[i], ctx));
    }
    return AR_OK;
}

static ar_status verify_values(ar_ctx *ctx, void *user)
{
    verdicts *v = user;
    const int rank = ar_comm_rank(ctx->world);
    OWNED(ar_model_destroy) ar_model *m = NULL;
    OWNED(free) ar_param **params = NULL;
    OWNED(ar_gradients_destroy) ar_gradients *g = NULL;
    ar_verdict found;
    size_t n = 0;
    AR_TRY(ar_model_create(&m, ctx, v->config, NULL));
    AR_TRY(ar_model_fresh(m, ctx, 3));
    AR_TRY(ari_module_list(&params, &n, ar_model_module(m)));
    if (v->broken)
        AR_TRY(spoil_some(params, n, ctx, rank));
    AR_TRY(ar_gradients_create(&g, ctx, params, n));
    AR_TRY(ar_gradients_verify(g, &found, &(ar_gradients_verify_options){.values = true}));
    v->findings[rank] = found.findings;
    for (size_t i = 0; i < found.findings && i < 2; i++)
        ari_finding_text(v->text[rank][i], sizeof v->text[rank][i], &found.finding[i]);
    return AR_OK;
}

/* Three stages of two ranks each. Of the table there are four copies, so one that differs is outvoted. */
Test(pipeline, every_rank_hears_of_copies_that_differ_in_any_stage_or_between_the_ends)
{
    const ar_config c = config_of(AR_ARCH_GPT2, LAYERS, 4);
    for (int broken = 0; broken < 2; broken++) {
        verdicts v = {.config = &c, .broken = broken};
        cr_assert_ok(rank_run(&(ar_run){.parallel = {.pp = 3, .dp = 2}}, verify_values, &v));
        for (int r = 0; r < 6; r++) {
            cr_assert_eq(v.findings[r], broken ? 2 : 0, "rank %d: %zu, %s", r, v.findings[r], v.text[r][0]);
            if (!broken)
                continue;
            cr_expect_str_eq(v.text[r][0], "transformer.wte.weight: the copy of rank 5 differs from that of rank 0");
            cr_expect_str_eq(v.text[r][1], "transformer.h.2.ln_1.bias: the copy of rank 3 differs from that of rank 2");
        }
    }
}

Test(pipeline, no_order_of_threads_changes_a_bit_or_ends_in_a_deadlock)
{
    const ar_config c = config_of(AR_ARCH_GPT2, LAYERS, 4);
    ar_batch *d = batches(B, S, true);
    ari_cluster_options o = adamw_job(&c, d, STEPS);
    o.run.steps = 1;
    OWNED(recorded_free) recorded *whole = record(&o);
    o.run.sim.explore = true;
    for (int seed = 1; seed <= by_scale(1, 2, 250); seed++) {
        o.run.sim.schedule_seed = (uint64_t)seed;
        for (int s = 0; s < AR_PP_SCHEDULES; s++) {
            const bool turns = s == AR_PP_INTERLEAVED;
            expect_one_ranks_bits(whole, &o,
                                  &(ar_parallel){.pp = turns || seed % 2 ? 2 : 4,
                                                 .dp = seed % 3 == 0 ? 2 : 1,
                                                 .virtual_stages = turns ? 2 : 1,
                                                 .schedule = (ar_pp_schedule)s,
                                                 .micro_batches = 1 + seed % B});
        }
    }
}

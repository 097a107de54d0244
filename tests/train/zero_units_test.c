/* SPDX-License-Identifier: Apache-2.0 */
/* ZeRO of every stage and replicas of shares have one rank's bits in every tensor, and hold what their formulas say. */
#include "anyrank/context.h"
#include "anyrank/ddp.h"
#include "tests/train/batches.h"
#include "tests/train/recorded.h"

#include "anyrank/train.h"
#include "ref/models/model_private.h"
#include "ref/models/parallel_private.h"
#include "support/bits.h"
#include "support/own_module.h"
#include "support/small.h"

enum { B = 6, S = 8, STEPS = 2 };

static ari_cluster_options job_of(const ar_config *c, const ar_batch *d)
{
    ari_cluster_options o = adamw_job(c, d, STEPS);
    o.run.dropout = 0.1;
    o.run.ddp = ar_ddp_defaults();
    return o;
}

/* 4 ranks have 2 samples or 1, so that in two micro-batches two of them miss the last; 7 are more than there are. */
static const ar_parallel layouts[] = {
    {.dp = 2, .zero = 2, .micro_batches = 3},
    {.dp = 2, .zero = 3, .micro_batches = 2},
    {.dp = 4, .zero = 2, .micro_batches = 2},
    {.dp = 4, .zero = 3, .micro_batches = 2, .forward_first = true},
    {.dp = 7, .zero = 3},
    {.tp = 2, .dp = 2, .sp = true, .zero = 2, .micro_batches = 2},
    {.tp = 4, .dp = 2, .sp = true, .overlap = 2, .zero = 3, .recompute = {AR_RECOMPUTE_FULL, 2}},
    {.cp = 2, .dp = 2, .zigzag = true, .zero = 3, .recompute = {AR_RECOMPUTE_SELECTIVE, 1}},
    {.dp = 4, .dp_replicate = 2, .zero = 2, .micro_batches = 2},
    {.tp = 2, .dp = 4, .dp_replicate = 2, .sp = true, .zero = 3},
    {.cp = 2, .dp = 2, .dp_replicate = 2, .zero = 3},
    {.dp = 2, .dp_replicate = 2, .zero = 3, .micro_batches = 2},
    {.tp = 2, .zero = 3},
    {.pp = 2, .dp = 2, .zero = 2, .micro_batches = 3},
    {.pp = 2, .dp = 4, .zero = 3, .micro_batches = 2, .schedule = AR_PP_ZERO_BUBBLE},
    {.pp = 2, .dp = 2, .tp = 2, .sp = true, .zero = 3, .schedule = AR_PP_GPIPE, .micro_batches = 2},
    {.pp = 2, .dp = 4, .dp_replicate = 2, .zero = 2, .micro_batches = 2, .schedule = AR_PP_ZERO_BUBBLE},
    {.pp = 2, .dp = 2, .zero = 3, .micro_batches = 3, .schedule = AR_PP_INTERLEAVED, .virtual_stages = 2},
    {.dp = 2, .zero = 1},
    {.dp = 5, .zero = 1, .micro_batches = 2}, /* 5 and 7 cut most buckets unevenly */
    {.dp = 7, .zero = 1},
    {.tp = 2, .dp = 2, .zero = 1},
    {.tp = 4, .dp = 2, .sp = true, .zero = 1},
    {.tp = 2, .dp = 3, .sp = true, .micro_batches = 2, .zero = 1},
    {.dp = 6, .zero = 1, .dp_replicate = 2, .micro_batches = 2},
    {.tp = 2, .cp = 2, .dp = 2, .zero = 1, .dp_replicate = 2},
    {.zero = 1},
};
enum { LAYOUTS = sizeof layouts / sizeof *layouts };
/* One bucket a parameter, several of a unit in a bucket, a bucket for each unit. */
static const size_t bucket_bytes[] = {0, 600, AR_BUCKET_BYTES};

/* Every `step`-th layout, with one of the bucket sizes, in either mode and order. */
static void expect_every(ar_arch arch, bool tied, size_t first, size_t step)
{
    ar_config c = config_of(arch, 4, arch == AR_ARCH_LLAMA ? 2 : 4);
    c.tied = tied;
    ar_batch *d = batches(B, S, false);
    ari_cluster_options o = job_of(&c, d);
    OWNED(recorded_free) recorded *whole = record(&o);
    for (size_t i = first; i < LAYOUTS; i += step) {
        o.run.ddp.bucket_bytes = bucket_bytes[(first + i) % 3];
        o.run.ddp.mode = i % 3 == 1 ? AR_BUCKETS_EAGER : AR_BUCKETS_OVERLAP;
        o.run.ddp.order = i % 2 ? AR_BUCKETS_BY_SIZE : AR_BUCKETS_REVERSE;
        o.run.ddp.find_unused = i % 4 == 3;
        expect_one_ranks_bits(whole, &o, &layouts[i]);
    }
}

Test(zero_units, llama_has_one_ranks_bits)
{
    expect_every(AR_ARCH_LLAMA, false, 0, small_only() ? 4 : 1);
}

Test(zero_units, tied_llama_and_gpt2_have_one_ranks_bits)
{
    expect_every(AR_ARCH_LLAMA, true, 1, 4);
    expect_every(AR_ARCH_GPT2, true, 2, 4);
    expect_every(AR_ARCH_STACK, false, 3, 4);
}

/* Of the ranks that share, together: what one of them has below that stage. */
Test(zero_units, ranks_hold_shares_of_what_a_stage_shares_out)
{
    const ar_config c = config_of(AR_ARCH_LLAMA, 4, 2);
    ar_batch *d = batches(B, S, false);
    ari_cluster_options o = job_of(&c, d);
    size_t p = 0;
    cr_assert_ok(ari_config_parameters(&c, &p));
    const size_t block = (p - (2 * c.vocab + 1) * c.hidden) / c.layers;
    for (int zero = 0; zero <= 3; zero++) {
        for (int replicas = 1; replicas <= (zero > 0 ? 2 : 1); replicas++) {
            ar_rank_memory memory[6], sum = {0};
            ari_cluster_result result;
            const size_t n = 6 / (size_t)replicas, shared = n;
            const size_t bucket = zero < 2 ? p : block, exchanged = bucket + (n - 2) * (bucket / n);
            o.run.parallel = (ar_parallel){.dp = 6, .zero = zero, .dp_replicate = replicas};
            o.memory = memory;
            cr_assert_ok(ari_cluster_run(&result, &o));
            free(result.loss);
            for (size_t r = 0; r < n; r++) {
                sum.weights += memory[r].weights;
                sum.gradients += memory[r].gradients;
                sum.optimizer += memory[r].optimizer;
                sum.buckets += memory[r].buckets;
                cr_expect_eq(memory[r].operands, 0, "zero=%d: %zu bytes of operands", zero, memory[r].operands);
            }
            cr_expect_eq(sum.weights, 4 * p * (zero < 3 ? shared : 1), "zero=%d: %zu", zero, sum.weights);
            /* In one bucket, open or complete. */
            cr_expect_eq(sum.gradients, zero < 2 ? 17 * p * shared : 17 * p, "zero=%d: %zu", zero, sum.gradients);
            cr_expect_eq(sum.optimizer, 8 * p * (zero < 1 ? shared : 1), "zero=%d: %zu", zero, sum.optimizer);
            const size_t kept = zero >= 2 ? 0 : p * (shared + (replicas > 1));
            cr_expect_eq(sum.buckets, 17 * (kept + n * exchanged), "zero=%d: %zu", zero, sum.buckets);
        }
    }
}

/* --- modules of one's own ----------------------------------------------------------------------------------------- */

enum { LAYERS = 5, WIDTH = 7, ROWS = 4, MOST_RANKS = 4 };

typedef struct own_job {
    ar_ddp_options ddp;
    bool no_units; /* all is the root unit */
    int twice;     /* a unit that is given in place of the next one; LAYERS: NULL is; 0: none */
    bool shared;   /* layer 3 is layer 1 once more */
    float weight[MOST_RANKS][LAYERS][WIDTH * WIDTH];
    size_t values, gradients; /* the most layers that had some after a layer's backward pass; of rank 0 */
} own_job;

typedef struct own_rank {
    own_job *j;
    ar_param *p[2 * LAYERS];
    size_t n;
} own_rank;

/* After a layer's backward pass, before what follows it. */
static ar_status look(void *user, const ar_tap_event *e)
{
    own_rank *k = user;
    size_t values = 0, gradients = 0;
    for (size_t i = 0; i < k->n; i += 2) {
        values += k->p[i]->value.data.ptr != NULL;
        gradients += k->p[i]->grad != NULL;
    }
    if (e->pass == 'b' && k->n > 0) {
        k->j->values = values > k->j->values ? values : k->j->values;
        k->j->gradients = gradients > k->j->gradients ? gradients : k->j->gradients;
    }
    return AR_OK;
}

static ar_status own_passes(ar_ctx *ctx, ar_ddp *d, int micro)
{
    static const size_t shape[2] = {ROWS, WIDTH};
    float values[ROWS * WIDTH];
    OWNED(ar_saved_destroy) ar_saved *saved = NULL;
    ar_tensor x, y, dy;
    fill_values(values, ROWS * WIDTH, (unsigned)(3 * ar_comm_rank(ar_ctx_dp(ctx)) + micro), 1.0);
    AR_TRY(rank_upload(ctx, &x, 2, shape, values));
    AR_TRY(rank_upload(ctx, &dy, 2, shape, values));
    AR_TRY(ar_saved_create(&saved));
    AR_TRY(ar_module_forward(ar_ddp_as_module(d), ctx, saved, &y, &x, NULL));
    return ar_module_backward(ar_ddp_as_module(d), ctx, saved, NULL, &dy, NULL);
}

static ar_status own_train(ar_ctx *ctx, own_job *j, ar_module *all, ar_ddp *d, own_rank *k)
{
    ar_optimizer_options sgd = ar_optimizer_defaults(AR_OPTIMIZER_SGD);
    ar_optimizer *o = NULL;
    ar_status st = AR_OK;
    sgd.lr = 0.25;
    k->n = ar_module_params(all, k->p, 2 * LAYERS, false);
    AR_TRY(j->ddp.zero ? ar_optimizer_create_sharded(&o, ctx, d, &sgd)
                       : ar_optimizer_create(&o, ctx, k->p, k->n, &sgd));
    for (int step = 0; step < 2; step++) {
        AR_TRY_TO(done, st, ar_ddp_start(d));
        for (int micro = 0; micro < 2; micro++) {
            ar_ddp_set_sync(d, micro == 1);
            AR_TRY_TO(done, st, own_passes(ctx, d, micro + 2 * step));
            ar_ctx_end_step(ctx);
        }
        AR_TRY_TO(done, st, ar_ddp_wait(d));
        AR_TRY_TO(done, st, ar_optimizer_step(o, ctx, 1.0f));
    }
    AR_TRY_TO(done, st, ar_ddp_gather_parameters(d));
    for (size_t i = 0; 2 * i < k->n; i++)
        AR_TRY_TO(done, st,
                  ar_ctx_download_floats(ctx, j->weight[ar_comm_rank(ar_ctx_dp(ctx))][i],
                                         ar_tensor_count(&k->p[2 * i]->value), &k->p[2 * i]->value));
done:
    k->n = 0;
    ar_optimizer_destroy(o);
    return st;
}

static own_rank own_ranks[MOST_RANKS]; /* a process of its own for each test */

static ar_status own_main(ar_ctx *ctx, void *user)
{
    own_job *j = user;
    ar_ddp_options options = j->ddp;
    ar_module *layer[LAYERS] = {NULL}, *all = NULL;
    ar_unit unit[LAYERS];
    ar_ddp *d = NULL;
    ar_status st = AR_OK;
    for (int i = 0; i < LAYERS; i++) {
        char name[16];
        snprintf(name, sizeof name, "layer.%d", i);
        AR_TRY_TO(done, st,
                  j->shared && i == 3 ? ar_sequential_create(&layer[i], name, &layer[1], 1, false)
                                      : own_layer_create(&layer[i], ctx, name, WIDTH, OWN_RIGHT));
        unit[i] = (ar_unit){.module = layer[i]};
    }
    AR_TRY_TO(done, st, ar_sequential_create(&all, "all", layer, LAYERS, false));
    AR_TRY_TO(done, st, ar_module_fresh(all, ctx, 1));
    if (j->twice)
        unit[j->twice % (LAYERS - 1) + 1].module = j->twice < LAYERS ? layer[j->twice] : NULL;
    options.unit = j->no_units ? NULL : unit;
    options.units = j->no_units ? 0 : LAYERS;
    AR_TRY_TO(done, st, ar_ddp_create(&d, ctx, all, &options));
    AR_TRY_TO(done, st, own_train(ctx, j, all, d, &own_ranks[ar_comm_rank(ar_ctx_dp(ctx))]));
done:
    ar_ddp_destroy(d);
    ar_module_destroy(all);
    for (int i = 0; i < LAYERS; i++)
        ar_module_destroy(layer[i]);
    return st;
}

static void own_run(own_job *j, int replicas)
{
    void *users[MOST_RANKS];
    const ar_run o = {.parallel = {.dp = MOST_RANKS, .dp_replicate = replicas}};
    for (int r = 0; r < MOST_RANKS; r++) {
        own_ranks[r] = (own_rank){.j = r == 0 ? j : calloc(1, sizeof *j)};
        users[r] = &own_ranks[r];
    }
    cr_assert_ok(rank_run_heard(&o, look, users, own_main, j));
    for (int r = 1; r < MOST_RANKS; r++)
        free(own_ranks[r].j);
}

Test(zero_units, a_layers_weights_live_for_its_pass_and_gradients_until_the_next_ones_are_sent)
{
    OWNED(free) own_job *whole = calloc(1, sizeof *whole);
    whole->ddp = ar_ddp_defaults();
    own_run(whole, 1);
    cr_expect_eq(whole->values, LAYERS);
    for (int i = 0; i < 12; i++) {
        OWNED(free) own_job *j = calloc(1, sizeof *j);
        const int zero = 2 + i % 2, replicas = 1 + i / 2 % 2;
        const bool eager = i / 4 == 1, no_units = i / 4 == 2;
        j->ddp = ar_ddp_defaults();
        j->ddp.zero = zero;
        j->ddp.mode = eager ? AR_BUCKETS_EAGER : AR_BUCKETS_OVERLAP;
        j->no_units = no_units;
        own_run(j, replicas);
        cr_expect_eq(memcmp(j->weight, whole->weight, sizeof j->weight), 0, "case %d", i);
        cr_expect_eq(j->values, zero == 2 || no_units ? LAYERS : 1, "case %d: values of %zu layers", i, j->values);
        cr_expect_leq(j->gradients, eager || no_units ? LAYERS : 2, "case %d: gradients of %zu layers", i,
                      j->gradients);
        cr_expect_gt(j->gradients, 0);
    }
}

/* What two units use stays as long as the root unit's. */
Test(zero_units, a_parameter_of_two_units_is_the_root_units)
{
    own_job whole = {.ddp = ar_ddp_defaults(), .shared = true};
    own_run(&whole, 1);
    for (int zero = 2; zero <= 3; zero++) {
        own_job j = {.ddp = ar_ddp_defaults(), .shared = true};
        j.ddp.zero = zero;
        own_run(&j, 1);
        cr_expect_eq(memcmp(j.weight, whole.weight, sizeof j.weight), 0, "zero=%d", zero);
        cr_expect_eq(j.values, zero == 2 ? LAYERS - 1 : 2, "zero=%d: values of %zu layers", zero, j.values);
    }
}

/* --- refusals, failures ------------------------------------------------------------------------------------------- */

Test(zero_units, groups_that_do_not_divide_the_ranks_are_refused)
{
    const ar_config c = config_of(AR_ARCH_LLAMA, 4, 2);
    const ar_parallel wrong[] = {{.dp = 4, .zero = 4},
                                 {.dp = 4, .zero = 2, .dp_replicate = 3},
                                 {.dp = 4, .dp_replicate = 2},
                                 {.dp = 4, .zero = 1, .dp_replicate = -1}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        cr_expect_eq(ari_parallel_check(&wrong[i], &c, NULL, B, S), AR_ERR_ARG, "case %zu", i);
}

Test(zero_units, a_module_is_one_unit)
{
    const int wrong[] = {1, LAYERS - 2, LAYERS};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        OWNED(free) own_job *j = calloc(1, sizeof *j);
        const ar_run o = {.parallel.dp = 2};
        j->ddp = ar_ddp_defaults();
        j->ddp.zero = 3;
        j->twice = wrong[i];
        cr_expect_refused(rank_run(&o, own_main, j), AR_ERR_ARG, wrong[i] < LAYERS ? "given twice" : "NULL");
    }
}

/* One that fails in the middle of a pass, while others gather and reduce. */
typedef struct failing {
    int *left; /* events until the failure; NULL: of another rank */
} failing;

static ar_status fail_once(void *user, const ar_tap_event *e)
{
    failing *f = user;
    (void)e;
    return f->left && (*f->left)-- == 0 ? ar_error_set(AR_ERR_IO, "no room for a tensor") : AR_OK;
}

Test(zero_units, a_rank_that_fails_ends_all)
{
    const ar_config c = config_of(AR_ARCH_LLAMA, 4, 2);
    ar_batch *d = batches(B, S, false);
    ari_cluster_options o = job_of(&c, d);
    o.tap = fail_once;
    for (int i = 0; i < 12; i++) {
        int left = 40 + 23 * i;
        failing f[4] = {[1] = {&left}};
        void *users[4] = {&f[0], &f[1], &f[2], &f[3]};
        ari_cluster_result result;
        o.tap_user = users;
        o.run.parallel = (ar_parallel){.dp = 4, .zero = 2 + i % 2, .dp_replicate = 1 + i / 2 % 2};
        o.run.ddp.mode = i / 4 == 1 ? AR_BUCKETS_EAGER : AR_BUCKETS_OVERLAP;
        cr_expect_eq(ari_cluster_run(&result, &o), AR_ERR_IO, "case %d: %s", i, ar_error_message());
        cr_expect_not_null(strstr(ar_error_message(), "no room for a tensor"), "%s", ar_error_message());
        free(result.loss);
        free(result.reports);
    }
}

/* --- beside computation ------------------------------------------------------------------------------------------- */

/* Two queues and the main thread of each rank, in whatever order they go on. */
Test(zero_units, every_schedule_of_the_queues_gives_the_same_weights)
{
    ar_config c = config_of(AR_ARCH_LLAMA, 4, 2);
    c.tied = true;
    const ar_parallel p[] = {{.dp = 2, .zero = 2, .micro_batches = 2},
                             {.dp = 4, .dp_replicate = 2, .zero = 3},
                             {.pp = 2, .dp = 2, .zero = 3, .micro_batches = 2}};
    ar_batch *d = batches(B, S, false);
    ari_cluster_options o = job_of(&c, d);
    OWNED(recorded_free) recorded *whole = record(&o);
    for (uint64_t seed = 1; seed <= (small_only() ? 3 : 24); seed++) {
        o.run.sim = (ar_sim_options){.explore = true, .schedule_seed = seed};
        expect_one_ranks_bits(whole, &o, &p[seed % 3]);
    }
}

static double predicted_seconds(ari_cluster_options o, const ar_sim_cluster *cluster, ar_bucket_mode mode)
{
    ari_cluster_result result;
    o.run.sim.cluster = cluster;
    o.run.ddp.mode = mode;
    cr_assert_ok(ari_cluster_run(&result, &o));
    cr_assert(result.has_predicted);
    free(result.loss);
    return result.predicted.seconds;
}

/* By the virtual clock: links as slow as the ranks compute, so that much of the one can lie beside the other. */
Test(zero_units, gathers_and_reductions_lie_beside_computation)
{
    const ar_config c = config_of(AR_ARCH_LLAMA, 4, 2);
    ar_sim_cluster cluster;
    ar_batch *d = batches(B, S, false);
    ari_cluster_options o = job_of(&c, d);
    cr_assert_ok(ar_sim_cluster_parse(&cluster, "inside=1us:1GB/s flops=1G"));
    for (int zero = 2; zero <= 3; zero++) {
        o.run.parallel = (ar_parallel){.dp = 2, .zero = zero, .micro_batches = 2};
        const double overlap = predicted_seconds(o, &cluster, AR_BUCKETS_OVERLAP);
        const double eager = predicted_seconds(o, &cluster, AR_BUCKETS_EAGER);
        cr_expect_lt(overlap, 0.95 * eager, "zero=%d: %g s beside computation, %g s after it", zero, overlap, eager);
    }
}

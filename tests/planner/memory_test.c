/* SPDX-License-Identifier: Apache-2.0 */
/* A rank's memory by a dry run of it beside what the ranks of a run count, and beside what it was. */
#include "gpu/device_private.h"
#include "ref/core/context_private.h"
#include "ref/core/device_private.h"
#include "ref/core/schedule_private.h"
#include "ref/core/size.h"
#include "ref/models/parallel_private.h"
#include "ref/models/plan_private.h"
#include "support/layout_draw.h"
#include "support/plan_draw.h"
#include "support/row.h"
#include "support/small.h"
#include "support/together.h"
#include "verify/check/check_run.h"
#include "verify/plan/planner.h"

TestSuite(memory, .timeout = 300);

enum { MOST_RANKS = LAYOUT_DRAW_RANKS, TEXT = LAYOUT_DRAW_TEXT + 160 };

/* ANYRANK_TEST_DRAWS says how many of each kind. */
static int draws_of(int sanitized, int usual)
{
    const char *asked = getenv("ANYRANK_TEST_DRAWS");
    return asked ? atoi(asked) : by_scale(sanitized, usual, 100);
}

typedef struct drawn {
    layout_draw d;
    int64_t ids[LAYOUT_DRAW_TOKENS];
    ar_batch batch[LAYOUT_DRAW_STEPS];
    ari_cluster_options o;
    char text[TEXT];
} drawn;

static ar_status ignore(void *user, const ar_tap_event *event)
{
    (void)user, (void)event;
    return AR_OK;
}

static void draw(drawn *x, uint64_t first, layout_draw_kind kind)
{
    uint64_t seed = first;
    layout_draw *d = &x->d;
    layout_draw_make(d, kind, first);
    if (kind < DRAW_STAGES && d->run.parallel.zero > 0) {
        d->run.parallel.zero = 1 + (int)plan_draw_below(&seed, 3);
        d->run.parallel.dp_replicate = d->run.parallel.dp % 2 == 0 ? 1 + (int)plan_draw_below(&seed, 2) : 1;
    }
    cr_assert_ok(layout_draw_add_plan(d, &seed));
    d->run.parallel.overlap = d->run.parallel.sp && d->run.parallel.tp > 1 ? 1 + (int)plan_draw_below(&seed, 9) : 1;
    const bool native = plan_draw_below(&seed, 2);
    for (size_t i = 0; i < LAYOUT_DRAW_TOKENS; i++)
        x->ids[i] = (int64_t)(i * 7 % d->config.vocab);
    for (int i = 0; i < LAYOUT_DRAW_STEPS; i++)
        x->batch[i] = (ar_batch){.batch = d->run.batch, .seq = d->run.seq, .input_ids = x->ids};
    x->o = (ari_cluster_options){.config = &d->config, .batch = x->batch, .run = d->run};
    ar_run *r = &x->o.run;
    r->clip = native ? 0.0 : d->run.clip; /* fresh weights of a wild draw may overflow there */
    r->numerics = native ? AR_NUMERICS_NATIVE : AR_NUMERICS_EXACT;
    r->precision = native ? (ar_precision)plan_draw_below(&seed, AR_PRECISION_COUNT) : AR_PRECISION_F32;
    r->storage = native && plan_draw_below(&seed, 2) ? AR_BF16 : 0;
    r->threads = 2;
    r->sim.algorithm = AR_SIM_DIRECT;
    x->o.forward_only = d->run.steps == 0 && plan_draw_below(&seed, 4) == 0;
    x->o.tap = plan_draw_below(&seed, 2) ? ignore : NULL;
    char layout[LAYOUT_DRAW_TEXT];
    layout_draw_text(layout, sizeof layout, d);
    snprintf(x->text, sizeof x->text, "seed %llu: %s, %s %s, storage %s%s%s, %zu rules", (unsigned long long)first,
             layout, native ? "native" : "exact", ari_precision_name(x->o.run.precision),
             ar_dtype_name(ari_matrix_dtype(x->o.run.precision, x->o.run.storage)),
             x->o.forward_only ? ", forward only" : "", x->o.tap ? ", tapped" : "", d->run.plan.rules);
}

static void run(ar_rank_memory *counted, const drawn *x)
{
    void *nobody[MOST_RANKS] = {NULL};
    ari_cluster_result result = {0};
    ari_cluster_options o = x->o;
    o.memory = counted;
    o.tap_user = nobody;
    cr_assert_eq(ari_cluster_run(&result, &o), AR_OK, "%s: %s", x->text, ar_error_message());
    free(result.loss);
}

static ari_planned planned_by(const drawn *x)
{
    ari_planned p = {.step = {.run = x->o.run, .config = x->o.config, .forward_only = x->o.forward_only}};
    p.step.tapped = x->o.tap != NULL;
    p.step.run.batch = x->o.batch->batch;
    p.step.run.seq = x->o.batch->seq;
    return p;
}

/* Of fewer micro-batches, and by kinds, what the planner says is the same. */
static void expect_account(const drawn *x, const ari_dry_memory *dry, int rank)
{
    const ari_planned p = planned_by(x);
    const ar_rank_memory *m = &dry->rank;
    ari_memory own;
    cr_assert_eq(ari_memory_own(&own, &p, rank), AR_OK, "%s: %s", x->text, ar_error_message());
    const double all = (double)(m->weights + m->operands + m->gradients + m->optimizer + m->buckets + m->peak);
    cr_expect_eq(ari_memory_sum(&own), all, "rank %d: %g, dry %g; %s", rank, ari_memory_sum(&own), all, x->text);
    cr_expect_eq((double)(m->peak - m->stored), own.bytes[ARI_MEMORY_WORKSPACE], "rank %d: %s", rank, x->text);
    for (int k = 0; k < ARI_MEMORY_KINDS; k++)
        cr_expect(own.bytes[k] >= 0.0, "rank %d: %s %g; %s", rank, ari_memory_name((ari_memory_kind)k), own.bytes[k],
                  x->text);
}

/* like: a device of the kind that ran, for who counts; NULL: the CPU's. */
static void expect_step(const drawn *x, const ar_device *like)
{
    ar_rank_memory counted[MOST_RANKS] = {{0}};
    run(counted, x);
    for (int r = 0; r < ar_parallel_world(&x->o.run.parallel); r++) {
        ari_dry_memory dry;
        cr_assert_eq(ari_cluster_dry(&dry, &x->o, r, like), AR_OK, "%s: %s", x->text, ar_error_message());
#define EXPECT(field, json, title)                                                                              \
    cr_expect_eq(dry.rank.field, counted[r].field, "rank %d: %s %zu, counted %zu; %s", r, json, dry.rank.field, \
                 counted[r].field, x->text);
        AR_RANK_MEMORY_TABLE(EXPECT)
#undef EXPECT
        if (!like)
            expect_account(x, &dry, r);
    }
}

/* What decides memory, of which a tenth of the draws have to have each. */
enum { COVERED = 9 };
static void cover(int n[COVERED], const drawn *x)
{
    const ar_run *r = &x->o.run;
    const ar_parallel *p = &r->parallel;
    const bool has[COVERED] = {p->sp && p->tp > 1,
                               p->overlap > 1,
                               p->zero > 0 && p->dp > 1 && r->steps > 0,
                               p->zero > 1 && p->dp > ari_at_least_one(p->dp_replicate),
                               r->numerics == AR_NUMERICS_NATIVE,
                               r->storage == AR_BF16,
                               r->plan.rules > 0,
                               p->forward_first && p->micro_batches > 1,
                               x->o.tap != NULL};
    for (int i = 0; i < COVERED; i++)
        n[i] += has[i];
}

/* A device of the kind that ran, for who counts; NULL: the CPU's. */
static void expect_counted(int n[COVERED], int draws, uint64_t first, layout_draw_kind kind, const ar_device *like)
{
    for (int i = 0; i < draws; i++) {
        static drawn x;
        draw(&x, first + (uint64_t)i, kind);
        cover(n, &x);
        x.o.run.device.kind = like ? AR_DEVICE_EMULATED : AR_DEVICE_CPU;
        expect_step(&x, like);
        ar_plan_fini(&x.d.run.plan);
    }
}

/* Of stages every schedule: receives, micro-batches under way, and what zero bubble puts off. Of every family, where
 * ranks divide little. */
CLAIM(of_random_layouts_is_what_each_rank_counts)
{
    const int draws = draws_of(20, 24);
    int n[COVERED] = {0}, other[COVERED] = {0};
    expect_counted(n, draws, 7000, DRAW_TENSORS, NULL);
    for (int i = 0; i < COVERED; i++)
        cr_expect_geq(n[i], draws / 10, "%d: %d of %d draws", i, n[i], draws);
    expect_counted(n, draws_of(8, 10), 7600, DRAW_CONTEXTS, NULL);
    expect_counted(other, draws_of(10, 10), 7900, DRAW_STAGES, NULL);
    cr_expect_gt(other[3], 0, "no unit is shared out");
    expect_counted(n, draws_of(6, 10), 8200, DRAW_FAMILIES, NULL);
}

/* On a GPU operands have another form, their parts may be copies, and what is tapped is packed first. */
CLAIM(of_another_device_is_what_each_rank_counts)
{
    OWNED(ar_device_destroy) ar_device *like = NULL;
    if (ari_device_emulated_create(&like) == AR_ERR_UNSUPPORTED)
        return;
    int n[COVERED] = {0};
    expect_counted(n, draws_of(1, 1), 7500, DRAW_TENSORS, like);
    expect_counted(n, draws_of(0, 0), 7501, DRAW_CONTEXTS, like);
}

/* A block of width 8, 2 query heads of 4 on 1 KV head, a middle of 6; 2 sequences of 3 tokens: T = 6. */
static const char small[] =
    "{\"model_type\": \"anyrank-stack\", \"vocab_size\": 16, \"hidden_size\": 8, \"intermediate_size\": 6, "
    "\"num_hidden_layers\": 1, \"num_attention_heads\": 2, \"num_key_value_heads\": 1, \"hidden_act\": "
    "\"gelu_tanh\", \"layer_norm_eps\": 1e-5, \"max_position_embeddings\": 128, \"causal\": true, "
    "\"initializer_range\": 0.02}";

static ari_planned planned_of(ar_config *c, ar_parallel parallel)
{
    cr_assert_ok(ar_config_parse(c, small, sizeof small - 1, "small"));
    return (ari_planned){.step = {.run = {.parallel = parallel, .batch = 2, .seq = 3}, .config = c}};
}

/* Each schedule comes to the same states with fewer micro-batches. */
static void expect_few_as_many(ar_parallel p)
{
    static drawn x;
    ar_config c;
    int64_t ids[2 * 32] = {0};
    const ar_batch batch = {.batch = (size_t)(p.micro_batches + p.pp % 2), .seq = 2, .input_ids = ids};
    (void)planned_of(&c, p);
    c.layers = (size_t)ari_parallel_stages(&p);
    x.o = (ari_cluster_options){.config = &c, .batch = &batch, .run = {.parallel = p}};
    snprintf(x.text, sizeof x.text, "%s pp=%d x %d, %d micro-batches", ari_pp_schedule_name(p.schedule), p.pp,
             p.virtual_stages, p.micro_batches);
    for (int r = 0; r < p.pp; r++) {
        ari_dry_memory dry;
        cr_assert_eq(ari_cluster_dry(&dry, &x.o, r, NULL), AR_OK, "%s: %s", x.text, ar_error_message());
        expect_account(&x, &dry, r);
    }
}

CLAIM(of_few_micro_batches_is_that_of_many)
{
    ar_parallel p = {.tp = 1};
    for (p.pp = 2; p.pp <= 4; p.pp++) {
        for (p.micro_batches = 1; p.micro_batches <= 4 * p.pp + 3; p.micro_batches += 1 + p.micro_batches / 6) {
            for (int kind = 0; kind < AR_PP_SCHEDULES; kind++) {
                p.schedule = (ar_pp_schedule)kind;
                p.virtual_stages = kind == AR_PP_INTERLEAVED ? 2 + p.micro_batches % 2 : 1;
                expect_few_as_many(p);
            }
        }
    }
}

/* What the rank that keeps most holds of draws that nobody runs, and the highest peak, on the day when an account of its
 * own, operation by operation, had the same. Where a layer takes another amount of memory on purpose a failure prints
 * the new row. */
static const struct {
    layout_draw_kind kind;
    uint64_t seed;
    size_t peak, stored[ARI_USES];
} before[] = {
    {DRAW_TENSORS, 7000, 44300, {3000, 14400, 2160, 11040, 3750}},
    {DRAW_TENSORS, 7001, 24048, {1584, 0, 0, 1344, 1020}},
    {DRAW_TENSORS, 7002, 16600, {2684, 572, 528, 5192, 407}},
    {DRAW_TENSORS, 7003, 22800, {1500, 0, 0, 1100, 0}},
    {DRAW_TENSORS, 7004, 1872, {228, 384, 72, 360, 255}},
    {DRAW_TENSORS, 7005, 23460, {660, 0, 1440, 840, 1110}},
    {DRAW_TENSORS, 7006, 25820, {440, 4720, 480, 3380, 0}},
    {DRAW_TENSORS, 7007, 42080, {3776, 3648, 1984, 3584, 2720}},
    {DRAW_CONTEXTS, 7600, 6128, {104, 528, 48, 408, 0}},
    {DRAW_CONTEXTS, 7601, 331020, {1260, 77040, 6480, 6480, 0}},
    {DRAW_CONTEXTS, 7602, 9252, {168, 2544, 624, 384, 4782}},
    {DRAW_CONTEXTS, 7603, 13080, {1608, 1200, 48, 3024, 366}},
    {DRAW_CONTEXTS, 7604, 2288, {120, 248, 96, 176, 82}},
    {DRAW_CONTEXTS, 7605, 7920, {72, 0, 0, 48, 0}},
    {DRAW_STAGES, 7900, 32832, {0, 2304, 672, 7488, 0}},
    {DRAW_STAGES, 7901, 3880, {144, 1152, 480, 1024, 0}},
    {DRAW_STAGES, 7902, 3594, {108, 1008, 864, 1416, 0}},
    {DRAW_STAGES, 7903, 18984, {1056, 5664, 1152, 7776, 0}},
    {DRAW_STAGES, 7904, 71589, {792, 0, 72, 3096, 0}},
    {DRAW_STAGES, 7905, 16544, {576, 5400, 1512, 6240, 0}},
    {DRAW_STAGES, 7906, 16516, {288, 0, 0, 384, 0}},
    {DRAW_STAGES, 7907, 9600, {0, 1312, 216, 912, 0}},
    {DRAW_STAGES, 7908, 26016, {0, 3024, 1440, 18264, 0}},
    {DRAW_STAGES, 7909, 9380, {360, 360, 320, 1440, 5290}},
    {DRAW_STAGES, 7910, 11232, {336, 0, 0, 384, 6348}},
    {DRAW_STAGES, 7911, 28176, {960, 10560, 2160, 4520, 0}},
    {DRAW_FAMILIES, 8200, 65904, {4960, 11776, 7424, 6336, 1696}},
    {DRAW_FAMILIES, 8201, 22272, {2640, 0, 0, 2400, 300}},
    {DRAW_FAMILIES, 8202, 7632, {432, 576, 368, 896, 140}},
    {DRAW_FAMILIES, 8203, 18676, {1440, 3264, 864, 6768, 492}},
    {DRAW_FAMILIES, 8204, 24388, {464, 1920, 1728, 1472, 300}},
    {DRAW_FAMILIES, 8205, 7864, {624, 2496, 288, 1440, 732}},
};

CLAIM(is_what_it_was)
{
    for (size_t i = 0; i < sizeof before / sizeof *before; i++) {
        static drawn x;
        ari_dry_memory most = {.rank = {0}};
        size_t peak = 0;
        draw(&x, before[i].seed, before[i].kind);
        for (int r = 0; r < ar_parallel_world(&x.d.run.parallel); r++) {
            ari_dry_memory m;
            cr_assert_eq(ari_cluster_dry(&m, &x.o, r, NULL), AR_OK, "%s: %s", x.text, ar_error_message());
            peak = m.rank.peak > peak ? m.rank.peak : peak;
            most = m.rank.stored > most.rank.stored ? m : most;
        }
        const size_t *now = most.stored;
        cr_expect(peak == before[i].peak && memcmp(now, before[i].stored, sizeof most.stored) == 0,
                  "{%d, %d, %zu, {%zu, %zu, %zu, %zu, %zu}}, %s", (int)before[i].kind, (int)before[i].seed, peak,
                  now[0], now[1], now[2], now[3], now[4], x.text);
        ar_plan_fini(&x.d.run.plan);
    }
}

/* A step of a config on tokens of id 0, its plan freed. */
static void expect_made(const char *what, size_t number, const ar_config *c, size_t batch, size_t seq, ar_run run,
                        ar_tap_fn tap, bool forward_only)
{
    static drawn x;
    static const int64_t ids[2048];
    const ar_batch one = {.batch = batch, .seq = seq, .input_ids = ids};
    cr_assert_leq(batch * seq, sizeof ids / sizeof *ids);
    run.threads = 2;
    run.sim.timeout_ns = 120000000000u;
    x.o = (ari_cluster_options){.config = c, .batch = &one, .run = run, .tap = tap, .forward_only = forward_only};
    snprintf(x.text, sizeof x.text, "%s, case %zu", what, number);
    expect_step(&x, NULL);
    ar_plan_fini(&x.o.run.plan);
}

/* Sequences whose scores take several blocks, of unlike heights under a window, on one rank and in a zig-zag ring. */
CLAIM(of_blocks_of_scores_is_what_each_rank_counts)
{
    enum { SEQ = 1056 };
    static const struct {
        ar_parallel parallel;
        size_t window;
        ar_numerics numerics;
        double dropout;
        bool tapped;
    } cases[] = {{{.tp = 1}, 0, AR_NUMERICS_EXACT, 0.0, false},
                 {{.tp = 2}, 500, AR_NUMERICS_EXACT, 0.1, true},
                 {{.cp = 2, .zigzag = true}, 0, AR_NUMERICS_EXACT, 0.0, false},
                 {{.cp = 3}, 700, AR_NUMERICS_NATIVE, 0.1, false},
                 {{.cp = 2, .cp_inner = 2}, 0, AR_NUMERICS_NATIVE, 0.0, true}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const ar_run r = {.parallel = cases[i].parallel, .numerics = cases[i].numerics, .dropout = cases[i].dropout};
        ar_config c;
        (void)planned_of(&c, r.parallel);
        c.window = cases[i].window;
        c.max_positions = SEQ;
        expect_made("scores", i, &c, 1, SEQ, r, cases[i].tapped ? ignore : NULL, false);
    }
}

/* A wide middle of the MLP, or wide tokens, so that what linear layers scatter or gather in chunks makes the peak:
 * forward alone, then both passes, of one sample and of several, with a shorter last chunk and without. */
CLAIM(of_chunks_beside_products_is_what_each_rank_counts)
{
    enum { SEQ = 28, WIDE = 96, NARROW = 4 };
    for (size_t i = 0; i < 48; i++) {
        const bool native = i / 6 % 2, other_order = i / 12 % 2; /* which scatters the middle's width */
        ar_run r = {.parallel = {.tp = 2,
                                 .sp = true,
                                 .overlap = 1 + (int)i % 6,
                                 .keep_gathered = i % 5 == 3,
                                 .recompute = {.part = (ar_recompute)(i % 7 % AR_RECOMPUTES)}},
                    .numerics = native ? AR_NUMERICS_NATIVE : AR_NUMERICS_EXACT,
                    .precision = native && i % 4 < 2 ? AR_PRECISION_BF16 : AR_PRECISION_F32};
        ar_config c;
        (void)planned_of(&c, r.parallel);
        c.ffn = i / 3 % 2 ? WIDE : NARROW;
        c.hidden = i / 3 % 2 ? c.hidden : WIDE;
        c.kv_heads = 2;
        if (other_order)
            cr_assert_ok(ari_plan_add_mlp_order(&r.plan, c.arch, AR_MLP_ROW_COLUMN));
        expect_made("chunks", i, &c, i % 2 ? 3 : 1, SEQ, r, NULL, i < 24);
    }
}

/* A table so wide that adding up its rows makes the peak: in place, or of 16 bits in fp32 beside the rows' gradients,
 * which are gathered or moved first, or copied. */
CLAIM(of_a_wide_table_is_what_each_rank_counts)
{
    enum { STYLES = 3 };
    static const ar_style styles[STYLES] = {AR_STYLE_VOCAB, AR_STYLE_HIDDEN, AR_STYLE_REPLICATE};
    static const ar_parallel parallel[] = {{.tp = 1}, {.tp = 2}, {.tp = 2, .sp = true}, {.tp = 1, .cp = 2}};
    for (size_t i = 0; i < 3 * STYLES * (sizeof parallel / sizeof *parallel); i++) {
        ar_run r = {.parallel = parallel[i / 3 / STYLES],
                    .numerics = AR_NUMERICS_NATIVE,
                    .precision = i % 3 == 2 ? AR_PRECISION_BF16 : AR_PRECISION_F32,
                    .storage = i % 3 ? AR_BF16 : AR_F32};
        ar_config c;
        (void)planned_of(&c, r.parallel);
        c.vocab = 1024;
        c.kv_heads = 2;
        cr_assert_ok(ar_plan_add(&r.plan, c.arch, "embed", styles[i / 3 % STYLES]));
        expect_made("table", i, &c, 2, 4, r, NULL, false);
    }
}

/* Where the peak is what other models hide: heads of all ranks for their norms, the loss beside the last reduction, the
 * input of a block that is computed again, which its weights' gradients wait for, and the only block of capped scores. */
CLAIM(of_small_blocks_of_many_heads_is_what_each_rank_counts)
{
#define FORM(type, vocab, heads, d)                                                                            \
    "{\"model_type\": \"" type "\", \"vocab_size\": " vocab ", \"hidden_size\": 4, \"intermediate_size\": 4, " \
    "\"num_hidden_layers\": 3, \"num_attention_heads\": " heads ", \"num_key_value_heads\": " heads            \
    ", \"head_dim\": " d "}"
#define OLMO2 FORM("olmo2", "16", "4", "8")
    static const struct {
        const char *config;
        ar_parallel parallel;
        ar_numerics numerics;
        size_t batch, seq;
    } cases[] = {{OLMO2, {.tp = 2}, AR_NUMERICS_NATIVE, 2, 12},
                 {OLMO2, {.tp = 4, .sp = true}, AR_NUMERICS_NATIVE, 2, 12},
                 ROW(FORM("llama", "64", "1", "2"), {.dp = 2, .pp = 2, .schedule = AR_PP_ZERO_BUBBLE, .zero = 2},
                     AR_NUMERICS_EXACT, 2, 2),
                 ROW(OLMO2, {.pp = 2, .schedule = AR_PP_ZERO_BUBBLE, .recompute = {AR_RECOMPUTE_FULL}},
                     AR_NUMERICS_NATIVE, 2, 12),
                 {FORM("gemma2", "7", "1", "2"), {.cp = 3}, AR_NUMERICS_EXACT, 1, 12}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const ar_run r = {.parallel = cases[i].parallel, .ddp = ar_ddp_defaults(), .numerics = cases[i].numerics};
        ar_config c;
        cr_assert_ok(ar_config_parse(&c, cases[i].config, strlen(cases[i].config), "small"));
        expect_made("small", i, &c, cases[i].batch, cases[i].seq, r, NULL, false);
    }
}

CLAIM(refuses_what_no_run_of_this_version_does)
{
    ar_config c;
    ari_memory m;
    double all;
    ari_planned p = planned_of(&c, (ar_parallel){.tp = 1, .dp = 2});
    cr_assert_eq(ari_memory_own(&m, &p, 1), AR_OK);
    const double one = ari_memory_sum(&m);
    cr_assert_eq(ari_memory_own_all(&all, &p), AR_OK);
    cr_expect_eq(all, 2 * one);
    const ari_planned flash = {.step = p.step, .flash = true};
    cr_expect_eq(ari_memory_own(&m, &flash, 0), AR_ERR_UNSUPPORTED);
}

EVERY_CLAIM(memory)

/* SPDX-License-Identifier: Apache-2.0 */
/* The planner's own account of memory, rank by rank beside what the ranks of a run count. */
#include <criterion/criterion.h>

#include "planner/planner.h"
#include "ref/core/size.h"
#include "support/layout_draw.h"
#include "support/plan_draw.h"
#include "support/small.h"
#include "verify/check/check_run.h"

TestSuite(own_memory, .timeout = 300);

enum { MOST_RANKS = 32, TEXT = LAYOUT_DRAW_TEXT + 160 };

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

/* Half of the layouts take a plan with parts split in any way, where it is legal. */
static void draw_plan(layout_draw *d, uint64_t *seed)
{
    char text[PLAN_DRAW_TEXT];
    ar_plan plan, unused = d->plan;
    plan_draw(text, seed, &d->config, (plan_draw_options){.sp = d->parallel.sp && d->parallel.tp > 1});
    cr_assert_eq(ar_plan_parse(&plan, text, strlen(text), "drawn"), AR_OK, "%s: %s", ar_error_message(), text);
    if (plan_draw_below(seed, 2) && ar_parallel_check(&d->parallel, &d->config, &plan, d->batch, d->seq) == AR_OK)
        d->plan = plan;
    else
        unused = plan;
    ar_plan_fini(&unused);
}

static void draw(drawn *x, uint64_t first)
{
    uint64_t seed = first;
    layout_draw *d = &x->d;
    layout_draw_make(d, first);
    draw_plan(d, &seed);
    const bool native = plan_draw_below(&seed, 2);
    for (size_t i = 0; i < LAYOUT_DRAW_TOKENS; i++)
        x->ids[i] = (int64_t)(i * 7 % d->config.vocab);
    for (int i = 0; i < LAYOUT_DRAW_STEPS; i++)
        x->batch[i] = (ar_batch){.batch = d->batch, .seq = d->seq, .input_ids = x->ids};
    x->o = (ari_cluster_options){
        .config = &d->config,
        .batch = x->batch,
        .forward_only = d->steps == 0 && plan_draw_below(&seed, 4) == 0,
        .tap = plan_draw_below(&seed, 2) ? ignore : NULL,
        .run = {.plan = d->plan,
                .parallel = d->parallel,
                .steps = (uint64_t)d->steps,
                .optimizer = d->optimizer,
                .clip = native ? 0.0 : d->clip, /* fresh weights of a wild draw may overflow there */
                .dropout = d->dropout,
                .loss = d->loss,
                .ddp = d->ddp,
                .numerics = native ? AR_NUMERICS_NATIVE : AR_NUMERICS_EXACT,
                .precision = native ? (ar_precision)plan_draw_below(&seed, AR_PRECISION_COUNT) : AR_PRECISION_F32,
                .storage = native && plan_draw_below(&seed, 2) ? AR_BF16 : AR_F32,
                .threads = 2,
                .sim = {.algorithm = AR_SIM_DIRECT, .timeout_ns = 120000000000u}}};
    char layout[LAYOUT_DRAW_TEXT];
    layout_draw_text(layout, sizeof layout, d);
    snprintf(x->text, sizeof x->text, "seed %llu: %s, %s %s, storage %s%s%s, %zu rules", (unsigned long long)first,
             layout, native ? "native" : "exact", ar_precision_name(x->o.run.precision),
             ar_dtype_name(x->o.run.storage), x->o.forward_only ? ", forward only" : "", x->o.tap ? ", tapped" : "",
             d->plan.rules);
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

Test(own_memory, of_random_layouts_is_what_each_rank_counts)
{
    const int draws = by_scale(20, 60, 200);
    for (int i = 0; i < draws; i++) {
        static drawn x;
        ar_rank_memory counted[MOST_RANKS] = {{0}}, own;
        draw(&x, 7000 + (uint64_t)i);
        run(counted, &x);
        for (int r = 0; r < ar_parallel_world(&x.d.parallel); r++) {
            cr_assert_eq(ari_memory_of_rank(&own, &x.o, r), AR_OK, "%s: %s", x.text, ar_error_message());
#define EXPECT(field, json, title)                                                                    \
    cr_expect_eq(own.field, counted[r].field, "rank %d: %s %zu, counted %zu; %s", r, json, own.field, \
                 counted[r].field, x.text);
            AR_RANK_MEMORY_TABLE(EXPECT)
#undef EXPECT
        }
        ar_plan_fini(&x.d.plan);
    }
}

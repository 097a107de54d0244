/* SPDX-License-Identifier: Apache-2.0 */
/* The planner's seconds against the simulator's virtual time, and against closed forms by hand. */

#include "ref/core/axis.h"
#include "ref/core/size.h"
#include "support/layout_draw.h"
#include "support/small.h"
#include "tests/support/test.h"
#include "verify/plan/time_impl.h"
#include "verify/run/cluster_run.h"

/* --- against runs ------------------------------------------------------------------------------------------------- */

/* Rates at which products, collectives over either link and latencies all matter to models of a few thousand
 * parameters. */
static const ar_sim_cluster clusters[] = {
    {.inside = {2e-6, 1e9}, .flops = 1e10},
    {.inside = {1e-6, 1e9}, .between = {4e-6, 2e8}, .flops = 1e10},
    {.inside = {2e-7, 1e10}, .between = {1e-6, 5e9}, .flops = 1e9},
    {.inside = {1e-6, 1e9}, .between = {2e-6, 1e9}, .flops = 1e11},
};
enum { CLUSTERS = sizeof clusters / sizeof *clusters };

static int largest_divisor(int n)
{
    int d = n > 1 ? n / 2 : 1;
    while (n % d != 0)
        d--;
    return d;
}

/* One node; a node for each group of tp ranks, or for two of them; groups that span nodes. */
static ar_sim_cluster cluster_for(int i, int tp)
{
    const int nodes[CLUSTERS] = {0, tp, 2 * tp, largest_divisor(tp)};
    ar_sim_cluster c = clusters[i % CLUSTERS];
    c.ranks_per_node = nodes[i % CLUSTERS];
    return c;
}

static double simulated(const layout_draw *d, const ar_run *run)
{
    int64_t ids[LAYOUT_DRAW_TOKENS];
    ar_batch batch[LAYOUT_DRAW_STEPS + 1];
    ari_cluster_result result;
    for (size_t i = 0; i < LAYOUT_DRAW_TOKENS; i++)
        ids[i] = (int64_t)(i * 7 % d->config.vocab);
    for (int i = 0; i <= LAYOUT_DRAW_STEPS; i++)
        batch[i] = (ar_batch){.batch = d->run.batch, .seq = d->run.seq, .input_ids = ids};
    const ari_cluster_options o = {.run = *run, .config = &d->config, .batch = batch};
    cr_assert_ok(ari_cluster_run(&result, &o));
    free(result.loss);
    return result.predicted.seconds;
}

typedef struct starting {
    ari_links links;
    double seconds;
} starting;

/* Broadcasts follow each other along the chain of ranks: after the first one each takes as long as between two
 * neighbours. */
static ar_status add_start(void *user, const ari_operation *op)
{
    starting *s = user;
    for (int i = 0; i < op->calls; i++) {
        const ari_op_call *call = &op->call[i];
        const double n = (double)call->elements, width = (double)ar_dtype_bytes(call->dtype);
        if (call->kind == ARI_CALL_BROADCAST && s->seconds > 0.0)
            s->seconds += ari_links_send(&s->links, n * width);
        else
            s->seconds += ari_links_call(&s->links, call->kind, n, width);
    }
    return AR_OK;
}

/* The seconds before the first step: parameters made equal over dp. */
static ar_status time_start(double *seconds, const ari_planned *p, const ari_time_options *o)
{
    const ari_step_case c = ari_time_rank_case(p, o);
    const int pp = ari_at_least_one(c.run.parallel.pp), each = ar_parallel_world(&c.run.parallel) / pp;
    *seconds = 0.0;
    for (int r = 0; r < pp; r++) {
        starting s = {.links = ari_links_of(p, o, ARI_OVER_DP)};
        AR_TRY(ari_operations(&c, ARI_OPS_START, r * each, add_start, &s));
        *seconds = fmax(*seconds, s.seconds);
    }
    return AR_OK;
}

static double planned(const layout_draw *d, const ar_run *run)
{
    const ari_planned p = {.step = {.run = *run, .config = &d->config}};
    const ari_time_options o = {.cluster = *run->sim.cluster, .cost_model = ARI_COST_OWN};
    ari_time t;
    double start = 0.0;
    cr_assert(ari_planned_counted(&p));
    cr_assert_ok(ari_time_of(&t, &p, &o));
    cr_assert_ok(time_start(&start, &p, &o));
    return start + (double)(run->steps > 0 ? run->steps : 1) * ari_time_step(&t);
}

static ar_run run_on(const layout_draw *d, int i, const ar_sim_cluster *cluster, char text[LAYOUT_DRAW_TEXT])
{
    const ar_numerics numerics = i % 3 == 0 ? AR_NUMERICS_EXACT : AR_NUMERICS_NATIVE;
    ar_run run = d->run;
    run.numerics = numerics;
    run.threads = 1;
    run.sim = (ar_sim_options){.cluster = cluster, .timeout_ns = UINT64_C(60000000000)};
    char layout[LAYOUT_DRAW_TEXT];
    layout_draw_text(layout, sizeof layout, d);
    snprintf(text, LAYOUT_DRAW_TEXT, "draw %d, %s, %d ranks a node: %.700s", i,
             numerics == AR_NUMERICS_EXACT ? "exact" : "native", cluster->ranks_per_node, layout);
    return run;
}

/* The time that a draw takes on a cluster by the planner, as a share of the simulator's. Its clock counts whole
 * nanoseconds. */
static double share_of(const layout_draw *d, int i, const ar_sim_cluster *cluster, char text[LAYOUT_DRAW_TEXT])
{
    const ar_run run = run_on(d, i, cluster, text);
    const double want = simulated(d, &run), got = planned(d, &run);
    return fabs(got - want) <= 1e-9 ? 1.0 : got / want;
}

/* The same of a step alone: what the second one adds. */
static double step_share_of(const layout_draw *d, int i, const ar_sim_cluster *cluster, char text[LAYOUT_DRAW_TEXT])
{
    ar_run run = run_on(d, i, cluster, text);
    run.steps = 1;
    const double first = simulated(d, &run);
    run.steps = 2;
    const double want = simulated(d, &run) - first;
    const ari_planned p = {.step = {.run = run, .config = &d->config}};
    const ari_time_options o = {.cluster = *cluster, .cost_model = ARI_COST_OWN};
    ari_time t;
    cr_assert_ok(ari_time_of(&t, &p, &o));
    return fabs(ari_time_step(&t) - want) <= 1e-9 ? 1.0 : ari_time_step(&t) / want;
}

/* A node for each group of tp ranks and the like; for each sequence's ranks, or one for all; of any number of ranks. */
static ar_sim_cluster by_tp(int i, const ar_parallel *p)
{
    return cluster_for(i, p->tp);
}

static ar_sim_cluster by_tp_or_one(int i, const ar_parallel *p)
{
    return cluster_for(i % 2, p->tp);
}

static ar_sim_cluster by_sequence(int i, const ar_parallel *p)
{
    ar_sim_cluster c = clusters[i % CLUSTERS];
    c.ranks_per_node = i % 2 ? p->tp * p->cp : 0;
    return c;
}

static ar_sim_cluster by_any(int i, const ar_parallel *p)
{
    (void)p;
    ar_sim_cluster c = clusters[1 + i % (CLUSTERS - 1)];
    c.ranks_per_node = 2 + i % 5;
    return c;
}

/* The same of a GPU whose operations are timed by their shapes. */
static ar_sim_cluster by_shape(int i, const ar_parallel *p)
{
    const int per_node = cluster_for(i, p->tp).ranks_per_node;
    ar_sim_cluster c;
    cr_assert_ok(ar_sim_cluster_parse(&c, ar_sim_cluster_names[i % 5]));
    c.ranks_per_node = per_node;
    return c;
}

static ar_sim_cluster by_shape_and_sequence(int i, const ar_parallel *p)
{
    const int per_node = by_sequence(i, p).ranks_per_node;
    ar_sim_cluster c = by_shape(i, p);
    c.ranks_per_node = per_node;
    return c;
}

static const struct {
    layout_draw_kind kind;
    uint64_t first;
    int sanitized, usual, extended;
    ar_sim_cluster (*cluster)(int i, const ar_parallel *p);
    double least, most; /* of the share */
    size_t wider;       /* so many times the features of MLPs, so that products take longer than to begin them */
} against[] = {
    {DRAW_TENSORS, 1000, 24, 24, 400, by_tp, 0.99, 1.01, 1},
    /* Rings, neighbours that exchange heads, and both. */
    {DRAW_CONTEXTS, 9000, 8, 10, 200, by_sequence, 0.99, 1.01, 1},
    /* Pipelines of every schedule beside all else, for a step: of several a rank begins the next one before others end
     * theirs. */
    {DRAW_STAGES, 70000, 10, 24, 230, by_tp_or_one, 0.99, 1.01, 1},
    /* Some groups of a kind span nodes and others do not; the planner takes the slower ones for all. */
    {DRAW_TENSORS, 300014, 4, 8, 200, by_shape, 0.99, 1.01, 1024},
    {DRAW_CONTEXTS, 400000, 4, 8, 100, by_shape_and_sequence, 0.99, 1.01, 1024},
    {DRAW_TENSORS, 5000, 10, 10, 200, by_any, 0.99, HUGE_VAL, 1},
};

/* One node; those that share out experts on as few nodes as divide them, or each of these ranks on another. A sequence's
 * ranks fill nodes: else some come later, and messages wait for them. */
static ar_sim_cluster by_experts(int i, const ar_parallel *p)
{
    const int stride = ari_experts_whole(p) ? 1 : p->tp, sequence = p->tp * p->cp;
    const int nodes[] = {0, stride * largest_divisor(p->ep), stride}, n = p->ep > 1 ? nodes[i / 3 % 3] : 0;
    ar_sim_cluster c = clusters[1 + i % (CLUSTERS - 1)];
    c.ranks_per_node = n > 0 && (n % sequence == 0 || sequence % n == 0) ? n : 0;
    return c;
}

/* The planner takes every expert to have as many tokens: here it has all of them. */
Test(planner_time, is_virtual_time_of_experts_that_every_token_meets)
{
    int sent = 0, far = 0, whole = 0, close = 0;
    const int draws = by_scale(12, 24, 200);
    for (int i = 0; i < draws; i++) {
        layout_draw d;
        char text[LAYOUT_DRAW_TEXT];
        layout_draw_make(&d, DRAW_EXPERTS, 682 + (uint64_t)i);
        ar_parallel *p = &d.run.parallel;
        d.config.experts.per_token = d.config.experts.n;
        d.config.experts.scores.kept = d.config.experts.scores.groups;
        p->pp = p->virtual_stages = 1;
        p->schedule = AR_PP_1F1B;
        p->zero = p->zero > 0;
        p->dp_replicate = 0;
        const bool counts =
            d.config.experts.scores.groups == 0 && i % 2 == 0; /* the routes, in a pass that comes first */
        if (counts) {
            d.run.loss.router.balance = AR_BALANCE_BATCH;
            d.run.loss.router.balance_weight = 0.01;
        }
        d.run.ddp = (ar_ddp_options){.bucket_bytes = AR_BUCKET_BYTES, .zero = p->zero};
        ar_sim_cluster cluster = by_experts(i, p);
        const bool shaped = i % 2 == 1;
        if (shaped) {
            const int per_node = cluster.ranks_per_node;
            cluster = by_shape(i, p);
            cluster.ranks_per_node = per_node;
        }
        const double share = step_share_of(&d, i, &cluster, text);
        cr_expect(fabs(share - 1.0) <= 0.01, "%+.2f %%: %s", 100.0 * (share - 1.0), text);
        close += fabs(share - 1.0) <= (shaped ? 0.003 : 0.001);
        sent += p->ep > 1;
        far += cluster.ranks_per_node > 0;
        whole += ari_experts_whole(p);
        ar_plan_fini(&d.run.plan);
    }
    cr_expect(sent >= draws / 4 && far > 0 && whole >= draws / 10 && close >= draws * 8 / 10,
              "%d sent, %d far, %d whole, %d close", sent, far, whole, close);
}

Test(planner_time, is_virtual_time_within_one_percent)
{
    for (size_t k = 0; k < sizeof against / sizeof *against; k++) {
        const int draws = by_scale(against[k].sanitized, against[k].usual, against[k].extended);
        int moved = 0, close = 0;
        for (int i = 0; i < draws; i++) {
            layout_draw d;
            char text[LAYOUT_DRAW_TEXT];
            layout_draw_make(&d, against[k].kind, against[k].first + (uint64_t)i);
            d.config.ffn *= against[k].wider;
            if (against[k].kind == DRAW_STAGES) {
                d.run.parallel.zero = d.run.ddp.zero = d.run.parallel.zero > 0;
                d.run.parallel.dp_replicate = 0;
                d.run.parallel.recompute.every = 1;
                d.run.steps = d.run.steps > 0;
            }
            const ar_sim_cluster cluster = against[k].cluster(i, &d.run.parallel);
            const double share = share_of(&d, i, &cluster, text);
            cr_expect(share >= against[k].least && share <= against[k].most, "row %zu, %+.2f %%: %s", k,
                      100.0 * (share - 1.0), text);
            moved += ar_parallel_world(&d.run.parallel) > 1;
            close += fabs(share - 1.0) <= 0.01;
            ar_plan_fini(&d.run.plan);
        }
        cr_expect_gt(moved, draws / 2, "row %zu", k);
        cr_expect(against[k].most > 2.0 || 2 * close > draws, "row %zu", k);
    }
}

/* SPDX-License-Identifier: Apache-2.0 */
/* A step's time out of its parts: the pipeline, recomputation, and the sums of gradients that the last backward pass
 * hides. */
#include "verify/plan/time.h"

#include <math.h>
#include <string.h>

#include "ref/core/context_private.h"
#include "ref/core/size.h"
#include "ref/models/parallel_private.h"
#include "ref/pipeline/schedule.h"
#include "ref/pipeline/schedule_private.h"
#include "verify/plan/time_impl.h"

const char *const ari_cost_model_names[] = {
    [ARI_COST_PRODUCTION] = "production", [ARI_COST_OWN] = "own", [ARI_COST_MODELS] = NULL};

const char *ari_time_name(ari_time_kind k)
{
    static const char *const names[] = {
#define ARI_TIME_NAME(name, text, axes) [ARI_TIME_##name] = text,
        ARI_TIME_TABLE(ARI_TIME_NAME)
#undef ARI_TIME_NAME
    };
    return names[k];
}

double ari_time_step(const ari_time *t)
{
    double sum = 0.0;
    for (int k = 0; k < ARI_TIME_KINDS; k++)
        sum += t->of[k];
    return sum;
}

/* --- stages ------------------------------------------------------------------------------------------------------- */

ari_cost ari_composed_again(const ari_composed *c, int micro, size_t section)
{
    const size_t before = c->passes->blocks.n;
    const ari_cost *f = &c->passes->of[micro][ARI_GOES_FORWARD][section + (section > before)];
    ari_cost a = {.products = 0.0};
    if (section != before && c->recomputes_blocks)
        ari_cost_add(&a, f, c->recomputed_share);
    else if (section != before && c->recomputes_scores)
        a.attention = c->recomputed_share * f->attention;
    return a;
}

/* A layer's last pass, by the mean of all; ARI_RECOMPUTED: what it computes again. */
static double layer_seconds(const ari_composed *c, int direction)
{
    const ari_walked *b = &c->passes->blocks;
    const ari_stage all = ari_stage_of_layers(b, c->passes->model, 0, c->passes->layers);
    double sum = 0.0;
    for (size_t i = 0; i < b->n; i++) {
        const ari_cost a = direction == ARI_RECOMPUTED ? ari_composed_again(c, ARI_OF_LAST, i)
                                                       : c->passes->of[ARI_OF_LAST][direction][i];
        sum += ari_stage_times(b, &all, i) * ari_cost_sum(&a);
    }
    return sum / (double)c->passes->layers;
}

/* Seconds of a micro-batch in which a stage has nothing to do but wait for its weights, or for gradients on their
 * way. */
typedef struct exposed {
    double forward, backward;
} exposed;

/* ZeRO-3: each block's weights are gathered before its forward pass and again before its backward pass, while the block
 * before is computed, and its gradients scattered while the next is. The first gather and the last scatter have nothing
 * to hide them. */
static exposed gathers_of(const ari_composed *c, const ari_stage *s)
{
    exposed e = {.forward = 0.0};
    for (int part = 0; part < ARI_MODEL_PARTS && c->p->step.run.parallel.zero >= 3; part++) {
        const bool blocks = part == ARI_PART_BLOCKS;
        const double units = blocks ? s->layers : s->share[part], gather = c->gather[part], scatter = c->scatter[part];
        if (units == 0.0)
            continue;
        const double late = c->o->late_gathers ? gather : 0.0;
        const double forward = blocks ? c->layer[ARI_GOES_FORWARD] : 0.0,
                     backward = blocks ? c->layer[ARI_GOES_BACKWARD] + c->layer[ARI_RECOMPUTED] : 0.0;
        e.forward += gather + (units - 1.0) * fmax(0.0, gather - forward);
        e.backward += gather + scatter + (units - 1.0) * (late + fmax(0.0, gather - late + scatter - backward));
    }
    return e;
}

/* Seconds of a collective of a unit's weights, or of their gradients, among the ranks that share them out: of a block, or of
 * a part outside; of experts among those with the same ones. An all-reduce is that of their shares over the ranks that have
 * the same ones. Counts so many of it, unless moved is NULL. */
static double unit_call(const ari_composed *c, int part, ari_call_kind kind, ari_traffic *moved, double times)
{
    static const ari_over over[2][2] = {{ARI_OVER_SHARD, ARI_OVER_EXPERT_SHARD},
                                        {ARI_OVER_REPLICATE, ARI_OVER_EXPERT_REPLICATE}};
    const bool sums = kind == ARI_CALL_ALL_REDUCE;
    const double units = part == ARI_PART_BLOCKS ? (double)c->passes->layers : 1.0;
    const double all = c->passes->parameters[part], experts = c->passes->experts[part];
    const double width = kind == ARI_CALL_ALL_GATHER || !c->o->fp32_sums ? 2.0 : 4.0;
    double seconds = 0.0;
    for (int i = 0; i < 2; i++) {
        const ari_links shards = ari_links_of(c->p, c->o, over[0][i]), l = ari_links_of(c->p, c->o, over[sums][i]);
        const double n = (i == 0 ? all - experts : experts) / units / (sums ? shards.n : 1.0);
        const double each = n > 0.0 ? ari_links_call(&l, kind, n, width) : 0.0;
        seconds += each;
        if (moved && n > 0.0)
            ari_traffic_count(moved, ARI_TIME_DP, ari_call_name(kind), &l, times,
                              times * ari_links_sent(&l, kind, n, width), times * each);
    }
    return seconds;
}

/* What moves for that, and how much of it is hidden. */
static void add_gathers(ari_composed *c, const ari_stage *s)
{
    const exposed e = gathers_of(c, s);
    for (int part = 0; part < ARI_MODEL_PARTS && c->p->step.run.parallel.zero >= 3; part++) {
        const double times = c->micro * (part == ARI_PART_BLOCKS ? s->layers : s->share[part]);
        (void)unit_call(c, part, ARI_CALL_ALL_GATHER, &c->t->moved, 2.0 * times);
        (void)unit_call(c, part, ARI_CALL_REDUCE_SCATTER, &c->t->moved, times);
        (void)unit_call(c, part, ARI_CALL_ALL_REDUCE, &c->t->moved, times);
        c->beside += times * (2.0 * c->gather[part] + c->scatter[part]);
    }
    c->beside -= c->micro * (e.forward + e.backward);
}

/* The micro-batches through one of a rank's stages. */
static void add_stage(const ari_composed *c, const ari_stage *s, double of[ARI_TIME_KINDS])
{
    const ari_walked *b = &c->passes->blocks;
    for (size_t section = 0; section < b->n + 2; section++) {
        const double times = c->micro * ari_stage_times(b, s, section);
        if (times == 0.0)
            continue;
        const ari_cost a = ari_composed_again(c, ARI_OF_MEAN, section);
        of[ARI_TIME_RECOMPUTE] += times * (a.products + a.attention);
        for (int k = 0; k < ARI_TIME_KINDS; k++)
            of[k] += times * a.over[k];
        for (int d = 0; d < ARI_DIRECTIONS; d++) {
            const ari_cost *one = &c->passes->of[ARI_OF_MEAN][d][section];
            of[ARI_TIME_PRODUCTS] += times * (one->products + one->attention);
            of[ARI_TIME_RECOMPUTE] += times * one->recompute;
            for (int k = 0; k < ARI_TIME_KINDS; k++)
                of[k] += times * one->over[k];
        }
    }
}

/* All micro-batches through a rank's stages, without waiting for other stages. all: of all these. */
static double rank_seconds(const ari_composed *c, size_t rank, const ari_stage *all, double of[ARI_TIME_KINDS])
{
    const ar_parallel *layout = &c->p->step.run.parallel;
    const exposed e = gathers_of(c, all);
    const bool alike = c->passes->blocks.n == 1 || c->passes->blocks.by_experts; /* sections of all stages */
    double sum = 0.0;
    of[ARI_TIME_DP] += c->micro * (e.forward + e.backward);
    if (alike)
        add_stage(c, all, of);
    for (size_t i = rank; i < (size_t)ari_parallel_stages(layout) && !alike;
         i += (size_t)ari_at_least_one(layout->pp)) {
        const ari_stage s = ari_stage_of(&c->passes->blocks, c->p, i);
        add_stage(c, &s, of);
    }
    for (int k = 0; k < ARI_TIME_KINDS; k++)
        sum += of[k];
    return sum;
}

/* A micro-batch of a kind through a stage. */
static ar_pp_times times_of(const ari_composed *c, const ari_stage *s, int kind)
{
    const exposed e = gathers_of(c, s);
    const ari_walked *b = &c->passes->blocks;
    ar_pp_times t = {.forward = e.forward, .backward_input = e.backward};
    for (size_t section = 0; section < b->n + 2; section++) {
        const ari_cost *forward = &c->passes->of[ARI_OF_EACH + kind][ARI_GOES_FORWARD][section],
                       *backward = &c->passes->of[ARI_OF_EACH + kind][ARI_GOES_BACKWARD][section];
        const double times = ari_stage_times(b, s, section);
        if (times == 0.0)
            continue;
        const ari_cost again = ari_composed_again(c, ARI_OF_EACH + kind, section);
        t.forward += times * ari_cost_sum(forward);
        t.backward_input += times * (ari_cost_sum(backward) - backward->weights + ari_cost_sum(&again));
        t.backward_weight += times * backward->weights;
    }
    t.backward_input = fmax(0.0, t.backward_input);
    return t;
}

/* Bytes that a stage sends to the next one for a micro-batch of a kind; backward its gradient. */
static double between_bytes(const ari_composed *c, int kind)
{
    const ar_run *run = &c->p->step.run;
    const double shared = ari_extent(&run->parallel, ARI_CUTS_POSITIONS);
    const double tp = run->parallel.sp ? ari_at_least_one(run->parallel.tp) : 1.0;
    size_t start = 0, samples = 0;
    ari_parallel_rows(&run->parallel, run->batch, 0, c->passes->first[kind], &start, &samples);
    const double tokens = (double)samples * (double)run->seq / shared / tp;
    const ar_dtype dtype = c->o->cost_model == ARI_COST_PRODUCTION ? AR_BF16 : ari_activations_of(run->precision);
    return (double)ar_dtype_bytes(dtype) * tokens * (double)c->p->step.config->hidden;
}

/* Times of all stages, of each kind of micro-batch; those without samples take none. */
typedef struct timed {
    ar_pp_times at[(ARI_MICRO_KINDS + 1) * AR_MAX_STAGES];
    int first[ARI_MICRO_KINDS + 1], kinds;
} timed;

static void all_times(timed *t, const ari_composed *c, const ari_links *l)
{
    const ar_run *run = &c->p->step.run;
    const size_t stages = (size_t)ari_parallel_stages(&run->parallel);
    size_t start = 0, samples = 0;
    *t = (timed){.kinds = c->passes->kinds};
    ari_parallel_rows(&(ar_parallel){.dp = run->parallel.dp}, run->batch, 0, 0, &start, &samples);
    for (int k = 0; k < t->kinds; k++) {
        ar_pp_times *at = &t->at[(size_t)k * stages];
        const double transfer = l ? ari_links_send(l, between_bytes(c, k)) : 0.0;
        t->first[k] = c->passes->first[k];
        for (size_t i = 0, unlike; i < stages; i = unlike) {
            const ari_stage s = ari_stage_of(&c->passes->blocks, c->p, i);
            ar_pp_times one = times_of(c, &s, k);
            one.transfer = transfer;
            for (unlike = ari_stage_unlike(&c->passes->blocks, c->p, i); i < unlike; i++)
                at[i] = one;
        }
    }
    if (samples < (size_t)ari_at_least_one(run->parallel.micro_batches))
        t->first[t->kinds++] = (int)samples;
}

/* A rank ends when what it has sent has come, too. */
static void note_last(void *user, int rank, const ar_pp_operation *o, double begin, double end)
{
    ari_composed *c = user;
    const int pp = c->p->step.run.parallel.pp;
    const int from = o->kind == AR_PP_RECV_ACTIVATION ? o->stage - 1 : o->stage + 1;
    if (o->kind == AR_PP_BACKWARD || o->kind == AR_PP_BACKWARD_WEIGHT)
        c->last[o->stage] = (ari_span){begin, end};
    rank = o->kind == AR_PP_RECV_ACTIVATION || o->kind == AR_PP_RECV_GRADIENT ? from % pp : rank;
    c->ends[rank] = fmax(c->ends[rank], end);
}

/* A pipeline's ranks follow the same lists as in a run (anyrank/schedule.h). l: NULL without transfers. */
static ar_status run_stages(ari_composed *c, const ari_links *l, double *seconds)
{
    timed t;
    ar_pp_run run;
    all_times(&t, c, l);
    memset(c->ends, 0, sizeof c->ends);
    AR_TRY(ari_schedule_walk(&run, c->schedule, &(ari_pp_timed){t.at, t.first, t.kinds, !l}, l ? note_last : NULL, c));
    *seconds = run.makespan;
    return AR_OK;
}

/* The ranks of a pipeline wait for each other: the bubble is what is left without transfers, and transfers are exposed
 * as far as they make it longer. busy: of the rank that has most to do. */
static ar_status add_waits(ari_composed *c, double busy)
{
    const ar_parallel *layout = &c->p->step.run.parallel;
    const ari_links l = ari_links_of(c->p, c->o, ARI_OVER_PP);
    const double bytes = between_bytes(c, 0), seconds = ari_links_send(&l, bytes);
    const double sends = 2.0 * ari_at_least_one(layout->virtual_stages) * c->micro;
    double alone = c->alone;
    if (alone == 0.0)
        AR_TRY(run_stages(c, NULL, &alone));
    AR_TRY(run_stages(c, &l, &c->end));
    const double waits = fmax(0.0, c->end - alone);
    c->t->of[ARI_TIME_BUBBLE] = fmax(0.0, alone - busy);
    c->t->of[ARI_TIME_PP] += waits;
    c->t->hidden += fmax(0.0, sends * seconds - waits);
    ari_traffic_count(&c->t->moved, ARI_TIME_PP, "send", &l, sends, sends * bytes, sends * seconds);
    return AR_OK;
}

/* The rank that has most to do, and what waiting adds. */
static ar_status add_ranks(ari_composed *c, double *busy)
{
    const size_t pp = (size_t)ari_at_least_one(c->p->step.run.parallel.pp);
    ari_stage slowest = {.layers = 0.0};
    *busy = -1.0;
    for (size_t i = 0; i < pp; i = ari_stage_unlike(&c->passes->blocks, c->p, i)) {
        const ari_stage s = ari_stage_of_rank(&c->passes->blocks, c->p, i);
        double of[ARI_TIME_KINDS] = {0.0};
        const double seconds = rank_seconds(c, i, &s, of);
        if (seconds <= *busy)
            continue;
        *busy = seconds;
        slowest = s;
        memcpy(c->t->of, of, sizeof of);
    }
    for (int part = 0; part < ARI_MODEL_PARTS; part++) {
        ari_traffic_add(&c->t->moved, &c->passes->moved[part], c->micro * slowest.share[part]);
        c->t->hidden += c->micro * slowest.share[part] * c->passes->hidden[part];
    }
    add_gathers(c, &slowest);
    return pp > 1 ? add_waits(c, *busy) : AR_OK;
}

/* --- together ----------------------------------------------------------------------------------------------------- */

static ari_composed composed_of(ari_time *t, const ari_planned *p, const ari_time_options *o, const ari_passes *passes,
                                const ari_outside *outside)
{
    const double micro = ari_at_least_one(p->step.run.parallel.micro_batches);
    const bool formula = o->cost_model == ARI_COST_PRODUCTION && !p->step.forward_only; /* else the list has it */
    const ar_recompute what = p->step.run.parallel.recompute.what;
    ari_composed c = {.p = p,
                      .o = o,
                      .passes = passes,
                      .outside = outside,
                      .t = t,
                      .micro = micro,
                      .recomputed_share = formula ? ari_recomputed_share(&p->step) : 0.0,
                      .recomputes_blocks = what == AR_RECOMPUTE_FULL,
                      .recomputes_scores = what == AR_RECOMPUTE_SELECTIVE && !p->flash};
    for (int d = 0; d <= ARI_RECOMPUTED; d++)
        c.layer[d] = layer_seconds(&c, d);
    for (int part = 0; part < ARI_MODEL_PARTS && p->step.run.parallel.zero >= 3; part++) {
        c.gather[part] = unit_call(&c, part, ARI_CALL_ALL_GATHER, NULL, 0.0);
        c.scatter[part] = unit_call(&c, part, ARI_CALL_REDUCE_SCATTER, NULL, 0.0) +
                          unit_call(&c, part, ARI_CALL_ALL_REDUCE, NULL, 0.0);
    }
    return c;
}

/* Weights and gradients on their way take processors from the products beside them, and a rank updates its share of the weights: reads and writes
 * master weight and both moments, reads the sum of gradients twice, clears it and writes the weight. */
static void add_rest(ari_composed *c)
{
    static const double UPDATE = 30.0, GRADIENT = 8.0; /* bytes of a parameter: that it updates, that it has */
    const ari_rates rates = ari_time_rates(c->o);
    const ari_planned *p = c->p;
    double most = 0.0;
    c->t->hidden += c->beside;
    if (!rates.gpu || c->o->cost_model == ARI_COST_OWN || p->step.forward_only)
        return;
    const size_t pp = (size_t)ari_at_least_one(p->step.run.parallel.pp);
    for (size_t r = 0; r < pp; r = ari_stage_unlike(&c->passes->blocks, p, r)) {
        const ari_stage s = ari_stage_of_rank(&c->passes->blocks, p, r);
        double all = 0.0, experts = 0.0;
        for (int part = 0; part < ARI_MODEL_PARTS; part++) {
            all += s.share[part] * c->passes->parameters[part];
            experts += s.share[part] * c->passes->experts[part];
        }
        const bool shares = p->step.run.parallel.zero > 0;
        const double own =
            shares ? (all - experts) / ari_planned_shares(p) + experts / ari_planned_expert_shares(p) : all;
        most = fmax(most, UPDATE * own + GRADIENT * (p->step.run.parallel.zero > 1 ? own : all));
    }
    c->t->of[ARI_TIME_MEMORY] += ari_rates_moves(&rates, most);
    c->t->of[ARI_TIME_DP] += rates.gpu->taken * c->beside;
}

ar_status ari_time_compose(ari_time *t, const ari_planned *p, const ari_time_options *o, const ari_passes *passes,
                           const ari_outside *outside, const ar_pipeline_schedule *schedule, double alone)
{
    ari_composed c = composed_of(t, p, o, passes, outside);
    c.schedule = schedule;
    c.alone = alone;
    *t = (ari_time){.hidden = 0.0};
    double busy = 0.0;
    AR_TRY(add_ranks(&c, &busy));
    if (p->step.run.parallel.zero < 3)
        AR_TRY(ari_composed_sums(&c, busy));
    add_rest(&c);
    return AR_OK;
}

ar_status ari_time_alone(double *seconds, const ari_planned *p, const ari_time_options *o, const ari_passes *passes,
                         const ar_pipeline_schedule *schedule)
{
    ari_composed c = composed_of(NULL, p, o, passes, NULL);
    c.schedule = schedule;
    return run_stages(&c, NULL, seconds);
}

double ari_time_least(const ari_planned *p, const ari_time_options *o, const ari_passes *passes)
{
    ari_composed c = composed_of(NULL, p, o, passes, NULL);
    const ar_parallel *layout = &p->step.run.parallel;
    const ari_walked *b = &passes->blocks;
    const bool waits = layout->schedule != AR_PP_ZERO_BUBBLE;
    const size_t pp = (size_t)ari_at_least_one(layout->pp), stages = (size_t)ari_parallel_stages(layout);
    double most = 0.0, before = 0.0, through = 0.0;
    for (size_t i = 0, unlike; i < stages; i = unlike) {
        unlike = ari_stage_unlike(b, p, i);
        const ari_stage s = ari_stage_of(b, p, i);
        const ar_pp_times t = times_of(&c, &s, passes->kinds - 1);
        const double like = (double)(unlike - i),
                     each = t.forward + (waits ? t.backward_input + t.backward_weight : 0.0);
        through += like * (t.forward + t.backward_input);
        if (i >= pp)
            continue;
        const ari_stage rank = ari_stage_of_rank(b, p, i);
        double of[ARI_TIME_KINDS] = {0.0};
        most = fmax(most, before + (like - 1) * each + rank_seconds(&c, i, &rank, of));
        before += like * each;
    }
    const ari_links l = ari_links_of(p, o, ARI_OVER_PP);
    if (pp > 1)
        through += 2.0 * (double)(stages - 1) * ari_links_send(&l, between_bytes(&c, passes->kinds - 1));
    return fmax(most, through);
}

/* The time of one layout, of whose parts nothing is kept. */
ar_status ari_time_of(ari_time *t, const ari_planned *p, const ari_time_options *o)
{
    ARI_ENDED(ari_passes_fini) ari_passes passes = {0};
    ARI_ENDED(ari_outside_fini) ari_outside outside = {0};
    ARI_OWNED_BY(ari_pipeline_schedule_destroy) ar_pipeline_schedule *schedule = NULL;
    AR_TRY(ari_passes_init(&passes, p, o));
    AR_TRY(ari_outside_init(&outside, p, o, NULL));
    if (ari_extent(&p->step.run.parallel, ARI_CUTS_LAYERS) > 1)
        AR_TRY(ari_parallel_schedule(&schedule, &p->step.run.parallel));
    return ari_time_compose(t, p, o, &passes, &outside, schedule, 0.0);
}

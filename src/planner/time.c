/* SPDX-License-Identifier: Apache-2.0 */
/* A step's time out of its parts: the pipeline, recomputation, and the sums of gradients that the last backward pass
 * hides. */
#include "planner/time.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "planner/time_impl.h"
#include "ref/core/size.h"
#include "ref/pipeline/schedule.h"

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

ari_stage ari_stage_of(const ari_composed *c, size_t i)
{
    const ar_parallel *layout = &c->p->step.run.parallel;
    const ari_walked *b = &c->passes->blocks;
    const ar_config *model = c->p->step.config;
    const size_t n = (size_t)ar_parallel_stages(layout);
    size_t first = 0, count = 0;
    ar_stage_layers(&first, &count, &layout->stages, model->layers, n, i);
    ari_stage s = {.share = {[ARI_PART_BEFORE] = i == 0,
                             [ARI_PART_BLOCKS] = (double)count / (double)model->layers,
                             [ARI_PART_AFTER] = i == n - 1},
                   .layers = (double)count,
                   .first = b->n > 1 && !b->by_experts ? first : 0};
    for (size_t l = first; l < first + count && b->by_experts; l++)
        s.experts += ar_config_has_experts(model, l);
    return s;
}

double ari_stage_times(const ari_composed *c, const ari_stage *s, size_t section)
{
    const ari_walked *b = &c->passes->blocks;
    if (section >= b->n)
        return s->share[section == b->n ? ARI_PART_BEFORE : ARI_PART_AFTER];
    if (b->by_experts)
        return section == 1 ? s->experts : s->layers - s->experts;
    return b->n == 1 ? s->layers : section >= s->first && section < s->first + (size_t)s->layers;
}

static ari_stage rank_of(const ari_composed *c, size_t rank)
{
    const ar_parallel *layout = &c->p->step.run.parallel;
    ari_stage all = {.layers = 0.0};
    for (size_t i = rank; i < (size_t)ar_parallel_stages(layout); i += (size_t)ari_at_least_one(layout->pp)) {
        const ari_stage s = ari_stage_of(c, i);
        all.first = i == rank ? s.first : all.first;
        all.layers += s.layers;
        all.experts += s.experts;
        for (int part = 0; part < ARI_MODEL_PARTS; part++)
            all.share[part] += s.share[part];
    }
    return all;
}

static bool same_stage(const ari_stage *a, const ari_stage *b)
{
    bool same = a->layers == b->layers && a->experts == b->experts && a->first == b->first;
    for (int part = 0; part < ARI_MODEL_PARTS; part++)
        same = same && a->share[part] == b->share[part];
    return same;
}

size_t ari_composed_sections(const ari_composed *c)
{
    return c->passes->blocks.n + 2;
}

ari_cost ari_composed_again(const ari_composed *c, const ari_cost *forward, size_t section)
{
    const ari_cost *f = &forward[section];
    ari_cost a = {.products = 0.0};
    if (section < c->passes->blocks.n && c->recomputes_blocks)
        ari_cost_add(&a, f, c->recomputed_share);
    else if (section < c->passes->blocks.n && c->recomputes_scores)
        a.attention = c->recomputed_share * f->attention;
    return a;
}

double ari_composed_layer(const ari_composed *c, int direction)
{
    const ari_passes *of = c->passes;
    const ari_cost *last = of->last[direction == ARI_RECOMPUTED ? ARI_GOES_FORWARD : direction];
    double sum = 0.0;
    for (size_t i = 0; i < of->blocks.n; i++) {
        const ari_cost a = direction == ARI_RECOMPUTED ? ari_composed_again(c, last, i) : last[i];
        sum += ari_walked_layers(&of->blocks, of->model, i) * ari_cost_sum(&a);
    }
    return sum / (double)of->layers;
}

/* Seconds of a micro-batch in which a stage has nothing to do but wait for its weights, or for gradients on their
 * way. */
typedef struct exposed {
    double forward, backward;
} exposed;

/* ZeRO-3: each block's weights are gathered before its forward pass and again before its backward pass, while the block
 * before is computed, and its gradients scattered while the next is. The first gather and the last scatter have nothing
 * to hide them. moved NULL: only the time. */
static exposed gathers_of(const ari_composed *c, const ari_stage *s, ari_traffic *moved, double *hidden)
{
    exposed e = {.forward = 0.0};
    if (c->p->step.run.parallel.zero < 3)
        return e;
    const double pass[ARI_DIRECTIONS] = {ari_composed_layer(c, ARI_GOES_FORWARD),
                                         ari_composed_layer(c, ARI_GOES_BACKWARD) +
                                             ari_composed_layer(c, ARI_RECOMPUTED)};
    for (int part = 0; part < ARI_MODEL_PARTS; part++) {
        const bool blocks = part == ARI_PART_BLOCKS;
        const ari_shared_unit u = ari_shared_unit_of(c->p, c->o, c->passes, part);
        const double units = blocks ? s->layers : s->share[part], times = units * c->micro;
        const double gather = ari_shared_unit_call(NULL, &u, ARI_CALL_ALL_GATHER, 1.0);
        const double scatter = ari_shared_unit_call(NULL, &u, ARI_CALL_REDUCE_SCATTER, 1.0) +
                               ari_shared_unit_call(NULL, &u, ARI_CALL_ALL_REDUCE, 1.0);
        if (units == 0.0 || c->passes->parameters[part] == 0.0)
            continue;
        const double late = c->o->late_gathers ? gather : 0.0;
        const double forward = gather + (units - 1.0) * fmax(0.0, gather - (blocks ? pass[ARI_GOES_FORWARD] : 0.0));
        const double backward =
            gather + scatter +
            (units - 1.0) * (late + fmax(0.0, gather - late + scatter - (blocks ? pass[ARI_GOES_BACKWARD] : 0.0)));
        e.forward += forward;
        e.backward += backward;
        if (!moved)
            continue;
        (void)ari_shared_unit_call(moved, &u, ARI_CALL_ALL_GATHER, 2.0 * times);
        (void)ari_shared_unit_call(moved, &u, ARI_CALL_REDUCE_SCATTER, times);
        (void)ari_shared_unit_call(moved, &u, ARI_CALL_ALL_REDUCE, times);
        *hidden += times * (2.0 * gather + scatter) - c->micro * (forward + backward);
    }
    return e;
}

/* The micro-batches through one of a rank's stages. */
static void add_stage(const ari_composed *c, const ari_stage *s, double of[ARI_TIME_KINDS])
{
    for (size_t section = 0; section < ari_composed_sections(c); section++) {
        const double times = c->walked * ari_stage_times(c, s, section);
        if (times == 0.0)
            continue;
        const ari_cost a = ari_composed_again(c, c->passes->mean[ARI_GOES_FORWARD], section);
        of[ARI_TIME_RECOMPUTE] += times * (a.products + a.attention);
        for (int k = 0; k < ARI_TIME_KINDS; k++)
            of[k] += times * a.over[k];
        for (int d = 0; d < ARI_DIRECTIONS; d++) {
            const ari_cost *one = &c->passes->mean[d][section];
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
    const exposed e = gathers_of(c, all, NULL, NULL);
    double sum = 0.0;
    of[ARI_TIME_DP] += c->micro * (e.forward + e.backward);
    for (size_t i = rank; i < (size_t)ar_parallel_stages(layout); i += (size_t)ari_at_least_one(layout->pp)) {
        const ari_stage s = ari_stage_of(c, i);
        add_stage(c, &s, of);
    }
    for (int k = 0; k < ARI_TIME_KINDS; k++)
        sum += of[k];
    return sum;
}

/* A micro-batch of a kind through a stage. */
static ar_pp_times times_of(const ari_composed *c, const ari_stage *s, int kind)
{
    const exposed e = gathers_of(c, s, NULL, NULL);
    ar_pp_times t = {.forward = e.forward, .backward_input = e.backward};
    for (size_t section = 0; section < ari_composed_sections(c); section++) {
        const ari_section_times *of = &c->passes->each[kind][section];
        const double times = c->walked / c->micro * ari_stage_times(c, s, section);
        const double again = section >= c->passes->blocks.n ? 0.0
                             : c->recomputes_blocks         ? c->recomputed_share * of->forward
                             : c->recomputes_scores         ? c->recomputed_share * of->attention
                                                            : 0.0;
        t.forward += times * of->forward;
        t.backward_input += times * (of->backward - of->weights + again);
        t.backward_weight += times * of->weights;
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
    ar_parallel_rows(&run->parallel, run->batch, 0, c->passes->first[kind], &start, &samples);
    const double tokens = (double)samples * (double)run->seq / shared / tp;
    const ar_dtype dtype = c->o->cost_model == ARI_COST_PRODUCTION ? AR_BF16 : ar_activations_of(run->precision);
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
    const int stages = ar_parallel_stages(&run->parallel);
    size_t start = 0, samples = 0;
    *t = (timed){.kinds = c->passes->kinds};
    ar_parallel_rows(&(ar_parallel){.dp = run->parallel.dp}, run->batch, 0, 0, &start, &samples);
    for (int k = 0; k < t->kinds; k++) {
        ar_pp_times *at = &t->at[k * stages];
        const double transfer = l ? ari_links_send(l, between_bytes(c, k)) : 0.0;
        ari_stage last = {.layers = -1.0};
        t->first[k] = c->passes->first[k];
        for (int i = 0; i < stages; i++) {
            const ari_stage s = ari_stage_of(c, (size_t)i);
            at[i] = same_stage(&s, &last) ? at[i - 1] : times_of(c, &s, k);
            at[i].transfer = transfer;
            last = s;
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
    AR_TRY(ari_schedule_walk(&run, c->schedule, &(ari_pp_timed){t.at, t.first, t.kinds}, note_last, c));
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
    for (size_t i = 0; i < pp; i++) {
        const ari_stage s = rank_of(c, i);
        double of[ARI_TIME_KINDS] = {0.0};
        const double seconds = same_stage(&s, &slowest) ? *busy : rank_seconds(c, i, &s, of);
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
    gathers_of(c, &slowest, &c->t->moved, &c->beside);
    return pp > 1 ? add_waits(c, *busy) : AR_OK;
}

/* --- together ----------------------------------------------------------------------------------------------------- */

static ari_composed composed_of(ari_time *t, const ari_planned *p, const ari_time_options *o, const ari_passes *passes,
                                const ari_outside *outside)
{
    const double micro = ari_at_least_one(p->step.run.parallel.micro_batches);
    const bool formula = o->cost_model == ARI_COST_PRODUCTION && !p->step.forward_only; /* else the list has it */
    const ar_recompute what = p->step.run.parallel.recompute.what;
    return (ari_composed){.p = p,
                          .o = o,
                          .passes = passes,
                          .outside = outside,
                          .t = t,
                          .micro = micro,
                          .walked = micro,
                          .recomputed_share = formula ? ari_recomputed_share(&p->step) : 0.0,
                          .recomputes_blocks = what == AR_RECOMPUTE_FULL,
                          .recomputes_scores = what == AR_RECOMPUTE_SELECTIVE && !p->flash};
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
    for (size_t r = 0; r < (size_t)ari_at_least_one(p->step.run.parallel.pp); r++) {
        const ari_stage s = rank_of(c, r);
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

/* A call over all parameters of a rank at once. Those of experts are summed by those with the same ones. */
static double sum_seconds(const ari_composed *c, ari_call_kind kind, double others, double experts)
{
    const double width = (double)ar_dtype_bytes(AR_BF16);
    const bool shares = c->p->step.run.parallel.zero > 0;
    const ari_links all = shares ? ari_links_of_shares(c->p, c->o) : ari_links_of(c->p, c->o, ARI_OVER_DP);
    const ari_links same = ari_links_of(c->p, c->o, ARI_OVER_EDP);
    return ari_links_call(&all, kind, floor(others), width) +
           (experts > 0.0 ? ari_links_call(&same, kind, floor(experts), width) : 0.0);
}

/* Adds the sums of the first rank in one bucket, which a micro-batch's backward pass hides; its last one ends the step,
 * but in interleaved begins we do not know when. busy: of the rank that has most to do, and of the first. */
static double add_sums_least(const ari_composed *c, double least, double busy, double first_busy)
{
    const ar_run *run = &c->p->step.run;
    const int zero = run->parallel.zero;
    const ari_stage all = rank_of(c, 0), first = ari_stage_of(c, 0);
    const double blocks = all.share[ARI_PART_BLOCKS], experts = blocks * c->passes->experts[ARI_PART_BLOCKS];
    const double others =
        blocks * c->passes->parameters[ARI_PART_BLOCKS] - experts + c->passes->parameters[ARI_PART_BEFORE];
    if (zero >= 3 || c->p->step.forward_only)
        return least;
    const double sum = sum_seconds(c, zero > 0 ? ARI_CALL_REDUCE_SCATTER : ARI_CALL_ALL_REDUCE, others, experts);
    const double gather = zero > 0 && run->steps > 0 ? sum_seconds(c, ARI_CALL_ALL_GATHER, others, experts) : 0.0;
    const double sums = sum + (zero == 2 ? (c->micro - 1.0) * fmax(0.0, sum - busy / c->micro) : 0.0);
    const ar_pp_times t = times_of(c, &first, c->passes->kinds - 1);
    const double beyond = fmax(0.0, sums - t.backward_input - t.backward_weight);
    if (ari_at_least_one(run->parallel.virtual_stages) > 1)
        return fmax(least, sums) + gather;
    const bool ends = !run->parallel.own_schedule && run->parallel.schedule != AR_PP_ZERO_BUBBLE;
    return (ends ? least + beyond : fmax(least, first_busy + beyond)) + gather;
}

ar_status ari_time_alone(double *seconds, const ari_planned *p, const ari_time_options *o, const ari_passes *passes,
                         const ar_pipeline_schedule *schedule)
{
    ari_composed c = composed_of(NULL, p, o, passes, NULL);
    c.schedule = schedule;
    return run_stages(&c, NULL, seconds);
}

ari_time_bounds ari_time_least(const ari_planned *p, const ari_time_options *o, const ari_passes *passes, int micros,
                               bool with_sums, double alone)
{
    ari_composed c = composed_of(NULL, p, o, passes, NULL);
    c.walked = micros;
    const ar_parallel *layout = &p->step.run.parallel;
    const bool waits = layout->schedule != AR_PP_ZERO_BUBBLE;
    const int pp = ari_at_least_one(layout->pp), stages = ar_parallel_stages(layout);
    double most = 0.0, before = 0.0, busy = 0.0, busiest = 0.0, first_busy = 0.0, through = 0.0;
    ar_pp_times t = {.forward = 0.0};
    ari_stage all = {.layers = -1.0}, last = all;
    const bool even = layout->stages.n == 0 && p->step.config->layers % (size_t)stages == 0;
    for (int i = 0, like; i < stages; i += like) { /* so many stages between the first and the last are alike */
        like = !even || i == 0 ? 1 : i < pp ? (i < pp - 1 ? pp - 1 - i : 1) : i < stages - 1 ? stages - 1 - i : 1;
        const ari_stage s = ari_stage_of(&c, (size_t)i);
        if (!same_stage(&s, &last))
            t = times_of(&c, &s, passes->kinds - 1);
        last = s;
        through += like * (t.forward + t.backward_input);
        if (i >= pp)
            continue;
        const ari_stage rank = rank_of(&c, (size_t)i);
        double of[ARI_TIME_KINDS] = {0.0};
        if (!same_stage(&rank, &all))
            busy = rank_seconds(&c, (size_t)i, &rank, of);
        all = rank;
        first_busy = i == 0 ? busy : first_busy;
        busiest = fmax(busiest, busy);
        const double each = t.forward + (waits ? t.backward_input + t.backward_weight : 0.0);
        most = fmax(most, before + (like - 1) * each + busy);
        before += like * each;
    }
    const ari_links l = ari_links_of(p, o, ARI_OVER_PP);
    if (pp > 1)
        through += 2.0 * (stages - 1) * ari_links_send(&l, between_bytes(&c, passes->kinds - 1));
    const double step = fmax(fmax(most, through), alone);
    return (ari_time_bounds){most, with_sums ? add_sums_least(&c, step, busiest, first_busy) : step};
}

double ari_passes_seconds(const ari_passes *passes)
{
    const size_t n = passes->blocks.n;
    double sum = 0.0;
    for (int d = 0; d < ARI_DIRECTIONS; d++)
        sum += ari_passes_layers(passes, passes->mean[d], 0, passes->layers) + ari_cost_sum(&passes->mean[d][n]) +
               ari_cost_sum(&passes->mean[d][n + 1]);
    return sum;
}

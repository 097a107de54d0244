/* SPDX-License-Identifier: Apache-2.0 */
/* A step's time out of its parts: the pipeline, recomputation, and the sums of gradients that the last backward pass
 * hides. */
#include "planner/time.h"

#include <math.h>
#include <string.h>

#include "planner/time_impl.h"
#include "ref/core/size.h"

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

/* A stage's share of each part of the model, or that of all stages of a rank. */
typedef struct stage {
    double share[ARI_MODEL_PARTS];
    double layers;
} stage;

static stage stage_of(const ari_planned *p, size_t i)
{
    const ar_parallel *layout = &p->step.run.parallel;
    const size_t n = (size_t)ar_parallel_stages(layout);
    size_t first = 0, count = 0;
    ar_stage_layers(&first, &count, &layout->stages, p->step.config->layers, n, i);
    return (stage){.share = {[ARI_PART_BEFORE] = i == 0,
                             [ARI_PART_BLOCKS] = (double)count / (double)p->step.config->layers,
                             [ARI_PART_AFTER] = i == n - 1},
                   .layers = (double)count};
}

static stage rank_of(const ari_planned *p, size_t rank)
{
    const ar_parallel *layout = &p->step.run.parallel;
    stage all = {.layers = 0.0};
    for (size_t i = rank; i < (size_t)ar_parallel_stages(layout); i += (size_t)ari_at_least_one(layout->pp)) {
        const stage s = stage_of(p, i);
        all.layers += s.layers;
        for (int part = 0; part < ARI_MODEL_PARTS; part++)
            all.share[part] += s.share[part];
    }
    return all;
}

static bool same_stage(const stage *a, const stage *b)
{
    bool same = a->layers == b->layers;
    for (int part = 0; part < ARI_MODEL_PARTS; part++)
        same = same && a->share[part] == b->share[part];
    return same;
}

/* The last backward pass of a stage. */
typedef struct last_pass {
    size_t first, layers;
    double begin, length; /* seconds since the step began, or without a pipeline since this pass did */
    double scale;         /* seconds there for one of this pass alone: of the weights' gradients they may be fewer */
    double absent;        /* seconds before the last block that only the last stage has: head and final norm */
} last_pass;

typedef struct composed {
    const ari_planned *p;
    const ari_time_options *o;
    const ari_passes *passes;
    const ari_outside *outside;
    const ar_pipeline_schedule *schedule;
    double alone; /* seconds of the schedule without transfers; 0: not known */
    ari_time *t;
    double beside;                             /* seconds of weights and gradients on their way that products hide */
    double micro;                              /* micro-batches */
    double walked;                             /* those that the passes are of */
    double recomputed_share;                   /* of the layers, by formula; 0: nothing */
    bool recomputes_blocks, recomputes_scores; /* of what is computed again: blocks, or only scores */
    ari_stages_run run;                        /* of a pipeline */
    const last_pass *pass;                     /* [stages] */
    bool idle; /* some rank has no samples: its gradients are complete when it has heard the loss */
} composed;

/* Time that recomputation adds to a part's pass of a micro-batch: forward once more, communication included. */
static ari_cost recompute_cost(const composed *c, const ari_cost forward[ARI_MODEL_PARTS], ari_model_part part)
{
    const ari_cost *f = &forward[part];
    ari_cost a = {.products = 0.0};
    if (part == ARI_PART_BLOCKS && c->recomputes_blocks)
        ari_cost_add(&a, f, c->recomputed_share);
    else if (part == ARI_PART_BLOCKS && c->recomputes_scores)
        a.attention = c->recomputed_share * f->attention;
    return a;
}

/* Seconds of a micro-batch in which a stage has nothing to do but wait for its weights, or for gradients on their
 * way. */
typedef struct exposed {
    double forward, backward;
} exposed;

/* ZeRO-3: each block's weights are gathered before its forward pass and again before its backward pass, while the block
 * before is computed, and its gradients scattered while the next is. The first gather and the last scatter have nothing
 * to hide them. moved NULL: only the time. */
static exposed gathers_of(const composed *c, const stage *s, ari_traffic *moved, double *hidden)
{
    const double layers = (double)c->passes->layers;
    const ari_cost a = recompute_cost(c, c->passes->last[ARI_GOES_FORWARD], ARI_PART_BLOCKS);
    const double pass[ARI_DIRECTIONS] = {
        ari_cost_sum(&c->passes->last[ARI_GOES_FORWARD][ARI_PART_BLOCKS]) / layers,
        (ari_cost_sum(&c->passes->last[ARI_GOES_BACKWARD][ARI_PART_BLOCKS]) + ari_cost_sum(&a)) / layers};
    exposed e = {.forward = 0.0};
    for (int part = 0; part < ARI_MODEL_PARTS && c->p->step.run.parallel.zero >= 3; part++) {
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

/* All micro-batches through a rank's stages, without waiting for other stages. */
static double rank_seconds(const composed *c, const stage *s, double of[ARI_TIME_KINDS])
{
    const exposed e = gathers_of(c, s, NULL, NULL);
    double sum = 0.0;
    of[ARI_TIME_DP] += c->micro * (e.forward + e.backward);
    for (int part = 0; part < ARI_MODEL_PARTS; part++) {
        const ari_cost a = recompute_cost(c, c->passes->mean[ARI_GOES_FORWARD], (ari_model_part)part);
        const double times = c->walked * s->share[part];
        of[ARI_TIME_RECOMPUTE] += times * (a.products + a.attention);
        for (int k = 0; k < ARI_TIME_KINDS; k++)
            of[k] += times * a.over[k];
        for (int d = 0; d < ARI_DIRECTIONS; d++) {
            const ari_cost *one = &c->passes->mean[d][part];
            of[ARI_TIME_PRODUCTS] += times * (one->products + one->attention);
            of[ARI_TIME_RECOMPUTE] += times * one->recompute;
            for (int k = 0; k < ARI_TIME_KINDS; k++)
                of[k] += times * one->over[k];
        }
    }
    for (int k = 0; k < ARI_TIME_KINDS; k++)
        sum += of[k];
    return sum;
}

/* A micro-batch through a stage. */
static ar_pp_times times_of(const composed *c, const stage *s)
{
    const exposed e = gathers_of(c, s, NULL, NULL);
    ar_pp_times t = {.forward = e.forward, .backward_input = e.backward};
    const double walked = c->walked / c->micro;
    for (int part = 0; part < ARI_MODEL_PARTS; part++) {
        const ari_cost a = recompute_cost(c, c->passes->mean[ARI_GOES_FORWARD], (ari_model_part)part);
        const ari_cost *backward = &c->passes->mean[ARI_GOES_BACKWARD][part];
        const double times = walked * s->share[part];
        t.forward += times * ari_cost_sum(&c->passes->mean[ARI_GOES_FORWARD][part]);
        t.backward_input += times * (ari_cost_sum(backward) - backward->weights + ari_cost_sum(&a));
        t.backward_weight += times * backward->weights;
    }
    t.backward_input = fmax(0.0, t.backward_input);
    return t;
}

/* Bytes that a stage sends to the next one for a micro-batch; backward its gradient. */
static double between_bytes(const composed *c)
{
    const ar_run *run = &c->p->step.run;
    const double dp = ari_extent(&run->parallel, ARI_CUTS_SAMPLES);
    const double shared = ari_extent(&run->parallel, ARI_CUTS_POSITIONS);
    const double tp = run->parallel.sp ? ari_at_least_one(run->parallel.tp) : 1.0;
    const double tokens = ceil((double)run->batch / dp) * (double)run->seq / shared / c->micro / tp;
    const ar_dtype dtype = c->o->cost_model == ARI_COST_PRODUCTION ? AR_BF16 : ar_activations_of(run->precision);
    return (double)ar_dtype_bytes(dtype) * tokens * (double)c->p->step.config->hidden;
}

static void all_times(const composed *c, ar_pp_times times[AR_MAX_STAGES])
{
    stage last = {.layers = -1.0};
    for (int i = 0; i < ar_parallel_stages(&c->p->step.run.parallel); i++) {
        const stage s = stage_of(c->p, (size_t)i);
        times[i] = same_stage(&s, &last) ? times[i - 1] : times_of(c, &s);
        last = s;
    }
}

/* Without transfers, unless that is known, and with them. */
static ar_status run_stages(composed *c, double *alone, ar_pp_times *times, double transfer)
{
    if (*alone == 0.0) {
        AR_TRY(ari_stages_run_of(&c->run, c->schedule, times));
        *alone = c->run.end;
    }
    for (int i = 0; i < ar_parallel_stages(&c->p->step.run.parallel); i++)
        times[i].transfer = transfer;
    return ari_stages_run_of(&c->run, c->schedule, times);
}

/* The ranks of a pipeline wait for each other: the bubble is what is left without transfers, and transfers are exposed
 * as far as they make it longer. busy: of the rank that has most to do. */
static ar_status add_waits(composed *c, double busy)
{
    const ar_parallel *layout = &c->p->step.run.parallel;
    const ari_links l = ari_links_of(c->p, c->o, ARI_OVER_PP);
    const double bytes = between_bytes(c), seconds = ari_links_send(&l, bytes);
    const double sends = 2.0 * ari_at_least_one(layout->virtual_stages) * c->micro;
    ar_pp_times times[AR_MAX_STAGES];
    double alone = c->alone;
    all_times(c, times);
    AR_TRY(run_stages(c, &alone, times, seconds));
    const double waits = fmax(0.0, c->run.end - alone);
    c->t->of[ARI_TIME_BUBBLE] = fmax(0.0, alone - busy);
    c->t->of[ARI_TIME_PP] += waits;
    c->t->hidden += fmax(0.0, sends * seconds - waits);
    ari_traffic_count(&c->t->moved, ARI_TIME_PP, "send", &l, sends, sends * bytes, sends * seconds);
    return AR_OK;
}

/* The rank that has most to do, and what waiting adds. */
static ar_status add_ranks(composed *c, double *busy)
{
    const size_t pp = (size_t)ari_at_least_one(c->p->step.run.parallel.pp);
    stage slowest = {.layers = 0.0};
    *busy = -1.0;
    for (size_t i = 0; i < pp; i++) {
        const stage s = rank_of(c->p, i);
        double of[ARI_TIME_KINDS] = {0.0};
        const double seconds = same_stage(&s, &slowest) ? *busy : rank_seconds(c, &s, of);
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

/* --- sums of gradients -------------------------------------------------------------------------------------------- */

/* The last backward passes of a rank. */
typedef struct drain {
    const ari_outside_rank *outside;
    int rank;
    double begin, end; /* of the first of these passes, and of all */
    double shared;     /* share of them in which collectives of tp and ep are on the same kind of link */
    double recompute;  /* seconds before each layer in which its forward pass is computed again */
} drain;

/* Seconds of collectives in it, by kind. */
static void add_called(const composed *c, size_t i, double called[ARI_TIME_KINDS])
{
    const stage s = stage_of(c->p, i);
    const ari_cost a = recompute_cost(c, c->passes->last[ARI_GOES_FORWARD], ARI_PART_BLOCKS);
    for (int k = 0; k < ARI_TIME_KINDS; k++) {
        called[k] += s.share[ARI_PART_BLOCKS] * a.over[k];
        for (int part = 0; part < ARI_MODEL_PARTS; part++)
            called[k] += s.share[part] * c->passes->last[ARI_GOES_BACKWARD][part].over[k];
    }
}

static last_pass pass_of(const composed *c, size_t i)
{
    const ar_parallel *layout = &c->p->step.run.parallel;
    const bool pipeline = ari_at_least_one(layout->pp) > 1;
    const stage s = stage_of(c->p, i);
    const ari_cost a = recompute_cost(c, c->passes->last[ARI_GOES_FORWARD], ARI_PART_BLOCKS);
    last_pass p = {.absent = (1.0 - s.share[ARI_PART_AFTER]) *
                             ari_cost_sum(&c->passes->last[ARI_GOES_BACKWARD][ARI_PART_AFTER])};
    ar_stage_layers(&p.first, &p.layers, &layout->stages, c->p->step.config->layers, (size_t)ar_parallel_stages(layout),
                    i);
    p.length = s.share[ARI_PART_BLOCKS] * ari_cost_sum(&a);
    for (int part = 0; part < ARI_MODEL_PARTS; part++)
        p.length += s.share[part] * ari_cost_sum(&c->passes->last[ARI_GOES_BACKWARD][part]);
    const ari_span *at = &c->run.last[i];
    p.begin = pipeline ? at->begin : 0.0;
    p.scale = pipeline && p.length > 0.0 ? (at->end - at->begin) / p.length : 1.0;
    return p;
}

static drain drain_of(const composed *c, int rank)
{
    const ar_parallel *layout = &c->p->step.run.parallel;
    const ari_cost a = recompute_cost(c, c->passes->last[ARI_GOES_FORWARD], ARI_PART_BLOCKS);
    const ari_links tp = ari_links_of(c->p, c->o, ARI_OVER_TP), dp = ari_links_of(c->p, c->o, ARI_OVER_DP),
                    ep = ari_links_of(c->p, c->o, ARI_OVER_EP);
    drain d = {.outside = &c->outside->rank[rank],
               .rank = rank,
               .recompute = ari_cost_sum(&a) / (double)c->passes->layers,
               .begin = INFINITY,
               .end = c->run.end};
    double seconds = 0.0, called[ARI_TIME_KINDS] = {0.0};
    for (int i = rank; i < ar_parallel_stages(layout); i += ari_at_least_one(layout->pp)) {
        const last_pass p = c->pass[i];
        seconds += p.length;
        if (c->o->shared_links)
            add_called(c, (size_t)i, called);
        d.begin = fmin(d.begin, p.begin);
        d.end = fmax(d.end, p.begin + p.length * p.scale);
    }
    if (c->o->shared_links && seconds > 0.0)
        d.shared = ((tp.between == dp.between ? called[ARI_TIME_TP] : 0.0) +
                    (ep.between == dp.between ? called[ARI_TIME_EP] : 0.0)) /
                   seconds;
    return d;
}

/* When the bucket whose last gradient is this one is complete. */
static double ready_at(const composed *c, const drain *d, const ari_op_param *param)
{
    const ar_parallel *layout = &c->p->step.run.parallel;
    const bool outside = ari_outside_layers(c->p->step.config, param->layer),
               before = ari_section_of(param->role) == ARI_BEFORE_BLOCKS;
    const int pp = ari_at_least_one(layout->pp), stages = ar_parallel_stages(layout);
    int i = outside && !before ? stages - pp + d->rank : d->rank;
    last_pass p = c->pass[i];
    for (i += pp; !outside && i < stages && param->layer >= p.first + p.layers; i += pp)
        p = c->pass[i];
    const double layers = (double)p.layers;
    const double done = outside ? (before ? layers : 0.0) : layers - (double)(param->layer - p.first);
    return p.begin + p.scale * (ari_passes_ready(c->passes, param, p.first, p.layers) - p.absent + done * d->recompute);
}

/* When the buckets' queue has done them all. Each waits for the gradient that completes it, and for those before it;
 * `backlog`: when it has done what earlier micro-batches left. */
static double drained(const composed *c, const drain *d, double backlog)
{
    const ari_outside_rank *s = d->outside;
    double at = backlog;
    for (size_t i = 0; i < s->n; i++) {
        const ari_bucket_cost *b = &s->bucket[i];
        at = fmax(at, b->overlapped && !c->idle ? ready_at(c, d, &b->last) : d->end + s->loss);
        const double slowed = fmax(0.0, fmin(b->seconds, (d->end - at) * (1.0 - d->shared)));
        at += slowed / (1.0 - fmin(d->shared, 0.99)) + (b->seconds - slowed);
    }
    return at;
}

static double sums_of(const ari_outside_rank *s)
{
    double sum = 0.0;
    for (size_t i = 0; i < s->n; i++)
        sum += s->bucket[i].seconds;
    return sum;
}

/* ZeRO-2 keeps shares of gradients, so that each micro-batch sums its own, beside the passes that follow. */
static void add_sums(composed *c, double pass_seconds)
{
    last_pass pass[AR_MAX_STAGES];
    for (int i = 0; i < ar_parallel_stages(&c->p->step.run.parallel); i++)
        pass[i] = pass_of(c, (size_t)i);
    c->pass = pass;
    const double before = c->p->step.run.parallel.zero == 2 ? c->micro - 1.0 : 0.0;
    const ari_outside_rank *longest = &c->outside->rank[0];
    double most = -1.0, exposed_sums = 0.0;
    for (int r = 0; r < (int)c->outside->n; r++) {
        const drain d = drain_of(c, r);
        const double backlog = before * fmax(0.0, sums_of(d.outside) - pass_seconds / c->micro);
        const double waits = fmax(0.0, drained(c, &d, d.begin + backlog) - d.end - d.outside->loss);
        const double all = waits + d.outside->before + d.outside->loss + d.outside->after;
        if (all <= most)
            continue;
        most = all;
        longest = d.outside;
        exposed_sums = waits;
    }
    const bool dp = ari_links_of(c->p, c->o, ARI_OVER_DP).n > 1.0,
               pp = ari_extent(&c->p->step.run.parallel, ARI_CUTS_LAYERS) > 1;
    c->t->of[dp ? ARI_TIME_DP : pp ? ARI_TIME_PP : ARI_TIME_TP] += most - longest->stages;
    c->t->of[ARI_TIME_PP] += longest->stages;
    c->beside += (before + 1.0) * sums_of(longest) - exposed_sums;
    ari_traffic_add(&c->t->moved, &longest->moved, 1.0);
    for (int i = 0; i < c->t->moved.n && before > 0.0; i++) {
        ari_traffic_row *row = &c->t->moved.row[i];
        if (row->over == ARI_TIME_DP && strcmp(row->call, ari_call_name(ARI_CALL_REDUCE_SCATTER)) == 0) {
            row->calls *= c->micro;
            row->bytes *= c->micro;
            row->seconds *= c->micro;
        }
    }
}

/* --- together ----------------------------------------------------------------------------------------------------- */

static composed composed_of(ari_time *t, const ari_planned *p, const ari_time_options *o, const ari_passes *passes,
                            const ari_outside *outside)
{
    const double micro = ari_at_least_one(p->step.run.parallel.micro_batches);
    const bool formula = o->cost_model == ARI_COST_PRODUCTION && !p->step.forward_only; /* else the list has it */
    const ar_recompute what = p->step.run.parallel.recompute.what;
    return (composed){.p = p,
                      .o = o,
                      .passes = passes,
                      .outside = outside,
                      .t = t,
                      .idle = p->step.run.batch < (size_t)ari_at_least_one(p->step.run.parallel.dp),
                      .micro = micro,
                      .walked = micro,
                      .recomputed_share = formula ? ari_recomputed_share(&p->step) : 0.0,
                      .recomputes_blocks = what == AR_RECOMPUTE_FULL,
                      .recomputes_scores = what == AR_RECOMPUTE_SELECTIVE && !p->flash};
}

/* Weights and gradients on their way take processors from the products beside them, and a rank updates its share of the weights: reads and writes
 * master weight and both moments, reads the sum of gradients twice, clears it and writes the weight. */
static void add_rest(composed *c)
{
    static const double UPDATE = 30.0, GRADIENT = 8.0; /* bytes of a parameter: that it updates, that it has */
    const ari_rates rates = ari_time_rates(c->o);
    const ari_planned *p = c->p;
    double most = 0.0;
    c->t->hidden += c->beside;
    if (!rates.gpu || c->o->cost_model == ARI_COST_OWN || p->step.forward_only)
        return;
    for (size_t r = 0; r < (size_t)ari_at_least_one(p->step.run.parallel.pp); r++) {
        const stage s = rank_of(p, r);
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
    composed c = composed_of(t, p, o, passes, outside);
    c.schedule = schedule;
    c.alone = alone;
    *t = (ari_time){.hidden = 0.0};
    double busy = 0.0;
    AR_TRY(add_ranks(&c, &busy));
    if (p->step.run.parallel.zero < 3)
        add_sums(&c, busy);
    add_rest(&c);
    return AR_OK;
}

/* A call over all parameters of a rank at once. Those of experts are summed by those with the same ones. */
static double sum_seconds(const composed *c, ari_call_kind kind, double others, double experts)
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
static double add_sums_least(const composed *c, double least, double busy, double first_busy)
{
    const ar_run *run = &c->p->step.run;
    const int zero = run->parallel.zero;
    const stage all = rank_of(c->p, 0), first = stage_of(c->p, 0);
    const double blocks = all.share[ARI_PART_BLOCKS], experts = blocks * c->passes->experts[ARI_PART_BLOCKS];
    const double others =
        blocks * c->passes->parameters[ARI_PART_BLOCKS] - experts + c->passes->parameters[ARI_PART_BEFORE];
    if (zero >= 3 || c->p->step.forward_only)
        return least;
    const double sum = sum_seconds(c, zero > 0 ? ARI_CALL_REDUCE_SCATTER : ARI_CALL_ALL_REDUCE, others, experts);
    const double gather = zero > 0 && run->steps > 0 ? sum_seconds(c, ARI_CALL_ALL_GATHER, others, experts) : 0.0;
    const double sums = sum + (zero == 2 ? (c->micro - 1.0) * fmax(0.0, sum - busy / c->micro) : 0.0);
    const ar_pp_times t = times_of(c, &first);
    const double beyond = fmax(0.0, sums - t.backward_input - t.backward_weight);
    if (ari_at_least_one(run->parallel.virtual_stages) > 1)
        return fmax(least, sums) + gather;
    const bool ends = !run->parallel.own_schedule && run->parallel.schedule != AR_PP_ZERO_BUBBLE;
    return (ends ? least + beyond : fmax(least, first_busy + beyond)) + gather;
}

ar_status ari_time_alone(double *seconds, const ari_planned *p, const ari_time_options *o, const ari_passes *passes,
                         const ar_pipeline_schedule *schedule)
{
    const composed c = composed_of(NULL, p, o, passes, NULL);
    ar_pp_times times[AR_MAX_STAGES];
    ari_stages_run run;
    all_times(&c, times);
    AR_TRY(ari_stages_run_of(&run, schedule, times));
    *seconds = run.end;
    return AR_OK;
}

ari_time_bounds ari_time_least(const ari_planned *p, const ari_time_options *o, const ari_passes *passes, int micros,
                               bool with_sums, double alone)
{
    composed c = composed_of(NULL, p, o, passes, NULL);
    c.walked = micros;
    const ar_parallel *layout = &p->step.run.parallel;
    const bool waits = layout->schedule != AR_PP_ZERO_BUBBLE;
    const int pp = ari_at_least_one(layout->pp), stages = ar_parallel_stages(layout);
    double most = 0.0, before = 0.0, busy = 0.0, busiest = 0.0, first_busy = 0.0, through = 0.0;
    ar_pp_times t = {.forward = 0.0};
    stage all = {.layers = -1.0}, last = all;
    const bool even = layout->stages.n == 0 && p->step.config->layers % (size_t)stages == 0;
    for (int i = 0, like; i < stages; i += like) { /* so many stages between the first and the last are alike */
        like = !even || i == 0 ? 1 : i < pp ? (i < pp - 1 ? pp - 1 - i : 1) : i < stages - 1 ? stages - 1 - i : 1;
        const stage s = stage_of(p, (size_t)i);
        if (!same_stage(&s, &last))
            t = times_of(&c, &s);
        last = s;
        through += like * (t.forward + t.backward_input);
        if (i >= pp)
            continue;
        const stage rank = rank_of(p, (size_t)i);
        double of[ARI_TIME_KINDS] = {0.0};
        if (!same_stage(&rank, &all))
            busy = rank_seconds(&c, &rank, of);
        all = rank;
        first_busy = i == 0 ? busy : first_busy;
        busiest = fmax(busiest, busy);
        const double each = t.forward + (waits ? t.backward_input + t.backward_weight : 0.0);
        most = fmax(most, before + (like - 1) * each + busy);
        before += like * each;
    }
    const ari_links l = ari_links_of(p, o, ARI_OVER_PP);
    if (pp > 1)
        through += 2.0 * (stages - 1) * ari_links_send(&l, between_bytes(&c));
    const double step = fmax(fmax(most, through), alone);
    return (ari_time_bounds){most, with_sums ? add_sums_least(&c, step, busiest, first_busy) : step};
}

double ari_passes_seconds(const ari_passes *passes)
{
    double sum = 0.0;
    for (int i = 0; i < ARI_DIRECTIONS * ARI_MODEL_PARTS; i++)
        sum += ari_cost_sum(&passes->mean[i / ARI_MODEL_PARTS][i % ARI_MODEL_PARTS]);
    return sum;
}

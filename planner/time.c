/* SPDX-License-Identifier: Apache-2.0 */
/* A step's time out of its parts: the pipeline, recomputation, and the sums of gradients that the last backward pass
 * hides. */
#include "planner/time.h"

#include <math.h>
#include <string.h>

#include "planner/time_impl.h"
#include "ref/core/size.h"

const char *const ari_account_names[] = {
    [ARI_ACCOUNT_PRODUCTION] = "production", [ARI_ACCOUNT_OWN] = "own", [ARI_ACCOUNTS] = NULL};

const char *ari_time_name(ari_time_kind k)
{
    static const char *const names[] = {
#define ARI_TIME_NAME(name, text) [ARI_TIME_##name] = text,
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

/* --- what moves --------------------------------------------------------------------------------------------------- */

static void add_row(ari_moves *to, const ari_moved *from, double times)
{
    int i = 0;
    while (i < to->n && (to->row[i].over != from->over || strcmp(to->row[i].call, from->call) != 0 ||
                         to->row[i].between != from->between))
        i++;
    if (i == ARI_MOVED_ROWS || from->calls == 0.0 || from->ranks <= 1.0)
        return;
    ari_moved *row = &to->row[i];
    if (i == to->n) {
        to->n++;
        *row = (ari_moved){.over = from->over, .call = from->call, .between = from->between};
    }
    row->ranks = fmax(row->ranks, from->ranks);
    row->calls += times * from->calls;
    row->bytes += times * from->bytes;
    row->seconds += times * from->seconds;
}

void ari_moves_row(ari_moves *m, ari_time_kind over, const char *call, const ari_links *l, double calls, double bytes,
                   double seconds)
{
    const ari_moved row = {over, call, l->n, l->between, calls, bytes, seconds};
    add_row(m, &row, 1.0);
}

void ari_moves_add(ari_moves *to, const ari_moves *from, double times)
{
    for (int i = 0; i < from->n; i++)
        add_row(to, &from->row[i], times);
}

/* A production system moves what anyrank moves in fp32 and, as bits, in the embedding's 32-bit integers, as 16 bits; the
 * loss's three numbers a token stay what they are. */
double ari_time_element(const ari_time_options *o, const ari_operation *op, const ari_op_call *call)
{
    const bool values = call->dtype == AR_F32 || call->dtype == AR_I32;
    if (o->account == ARI_ACCOUNT_PRODUCTION && values && op->kind != ARI_OPERATION_LOSS)
        return (double)ar_dtype_bytes(AR_BF16);
    return (double)ar_dtype_bytes(call->dtype);
}

/* Megatron-LM's, 40 million parameters or a million for each rank of the sum, so that a long ring's latency is paid seldom. */
static size_t usual_bucket(int ranks)
{
    const size_t million = 1000000;
    return (size_t)(ranks > 40 ? ranks : 40) * million * sizeof(float);
}

ari_step_case ari_time_case(const ari_planned *p, const ari_time_options *o, const ar_config *config)
{
    ari_step_case c = p->step;
    ar_run *run = &c.run;
    const int summing = ari_at_least_one(run->parallel.dp) * ari_at_least_one(run->parallel.cp);
    c.config = config;
    run->parallel.zero = run->parallel.zero > 0;
    if (o->account == ARI_ACCOUNT_PRODUCTION) {
        run->numerics = AR_NUMERICS_NATIVE;
        run->parallel.recompute.what = AR_RECOMPUTE_NONE; /* ari_time_compose adds it */
    }
    if (run->ddp.bucket_bytes == ARI_BUCKETS_USUAL)
        run->ddp.bucket_bytes = o->account == ARI_ACCOUNT_OWN ? AR_BUCKET_BYTES : usual_bucket(summing);
    return c;
}

/* --- stages ------------------------------------------------------------------------------------------------------- */

/* What a stage of the pipeline has of each part of the model. */
typedef struct stage {
    double share[ARI_MODEL_PARTS];
    double layers;
} stage;

static stage stage_of(const ari_planned *p, size_t i)
{
    const size_t last = (size_t)ari_at_least_one(p->pp) - 1;
    stage s = {.share = {[ARI_PART_BEFORE] = i == 0, [ARI_PART_AFTER] = i == last}};
    s.layers = (double)ari_stage_count(p, i);
    s.share[ARI_PART_BLOCKS] = s.layers / (double)p->step.config->layers;
    return s;
}

typedef struct composed {
    const ari_planned *p;
    const ari_time_options *o;
    const ari_passes *passes;
    const ari_outside *outside;
    ari_time *t;
    double micro;
    double share_again;             /* of the layers, by formula; 0: nothing */
    bool whole_again, scores_again; /* of what is computed again: blocks, or only scores */
    bool idle; /* some rank has no samples: its gradients are complete when it has heard the loss */
} composed;

/* What a part adds to a pass by computing again: forward once more, communication too. */
static ari_cost again(const composed *c, const ari_cost forward[ARI_MODEL_PARTS], ari_model_part part)
{
    const ari_cost *f = &forward[part];
    ari_cost a = {.products = 0.0};
    if (part == ARI_PART_BLOCKS && c->whole_again)
        ari_cost_add(&a, f, c->share_again);
    else if (part == ARI_PART_BLOCKS && c->scores_again)
        a.attention = c->share_again * f->attention;
    return a;
}

/* All micro-batches through a stage, without waiting. */
static double stage_seconds(const composed *c, const stage *s, double of[ARI_TIME_KINDS])
{
    double sum = 0.0;
    for (int part = 0; part < ARI_MODEL_PARTS; part++) {
        const ari_cost a = again(c, c->passes->all[ARI_GOES_FORWARD], (ari_model_part)part);
        of[ARI_TIME_AGAIN] += s->share[part] * (a.products + a.attention);
        of[ARI_TIME_TP] += s->share[part] * a.tp;
        of[ARI_TIME_CP] += s->share[part] * a.cp;
        for (int d = 0; d < ARI_DIRECTIONS; d++) {
            const ari_cost *all = &c->passes->all[d][part];
            of[ARI_TIME_PRODUCTS] += s->share[part] * (all->products + all->attention);
            of[ARI_TIME_AGAIN] += s->share[part] * all->again;
            of[ARI_TIME_TP] += s->share[part] * all->tp;
            of[ARI_TIME_CP] += s->share[part] * all->cp;
        }
    }
    for (int k = 0; k < ARI_TIME_KINDS; k++)
        sum += of[k];
    return sum;
}

/* Activations of a micro-batch, forward in and backward their gradients, at each chunk of a stage. */
static void add_sends(composed *c)
{
    const ar_run *run = &c->p->step.run;
    const double cp = ari_at_least_one(run->parallel.cp), dp = ari_at_least_one(run->parallel.dp);
    const double tp = run->parallel.sp ? ari_at_least_one(run->parallel.tp) : 1.0;
    const double tokens = ceil((double)run->batch / dp) * (double)run->seq / cp / c->micro / tp;
    const double bytes = 2.0 * tokens * (double)c->p->step.config->hidden;
    const double sends = 2.0 * ari_at_least_one(c->p->chunks) * c->micro;
    const ari_links l = ari_links_of_stages(c->p, c->o);
    if (l.n <= 1.0)
        return;
    const double seconds = ari_links_send(&l, bytes);
    c->t->of[ARI_TIME_PP] += sends * seconds;
    ari_moves_row(&c->t->moved, ARI_TIME_PP, "send", &l, sends, sends * bytes, sends * seconds);
}

/* 1F1B: every stage takes the time of the slowest, and the pipeline fills and drains once, with chunks by a chunk at a
 * time (Narayanan et al. 2021, arXiv:2104.04473, section 2.2): of equal stages (pp - 1) / chunks micro-batches. */
static stage add_stages(composed *c)
{
    const size_t pp = (size_t)ari_at_least_one(c->p->pp);
    stage slowest = {.layers = 0.0};
    double most = -1.0, sum = 0.0;
    for (size_t i = 0; i < pp; i++) {
        const stage s = stage_of(c->p, i);
        double of[ARI_TIME_KINDS] = {0.0};
        const double seconds = stage_seconds(c, &s, of);
        sum += seconds;
        if (seconds > most) {
            most = seconds;
            slowest = s;
            memcpy(c->t->of, of, sizeof of);
        }
    }
    c->t->of[ARI_TIME_BUBBLE] = (sum - most) / c->micro / ari_at_least_one(c->p->chunks);
    return slowest;
}

/* --- sums of gradients -------------------------------------------------------------------------------------------- */

/* The last backward pass of the first stage. */
typedef struct drain {
    double length, shared; /* seconds; share of them in which tp's collectives are on the same kind of link */
    double again;          /* seconds before each layer in which its forward pass is computed again */
    double absent;         /* seconds before the last block that only the last stage has: head and final norm */
} drain;

static drain drain_of(const composed *c, const stage *s)
{
    const double layers = (double)c->passes->layers;
    const ari_cost a = again(c, c->passes->last[ARI_GOES_FORWARD], ARI_PART_BLOCKS);
    const ari_links tp = ari_links_of(c->p, c->o, ARI_OVER_TP), dp = ari_links_of(c->p, c->o, ARI_OVER_DP);
    const ari_cost *after = &c->passes->last[ARI_GOES_BACKWARD][ARI_PART_AFTER];
    drain d = {.again = ari_cost_sum(&a) / layers, .absent = (1.0 - s->share[ARI_PART_AFTER]) * ari_cost_sum(after)};
    double tp_seconds = s->share[ARI_PART_BLOCKS] * a.tp;
    d.length = s->layers * d.again;
    for (int part = 0; part < ARI_MODEL_PARTS; part++) {
        const ari_cost *last = &c->passes->last[ARI_GOES_BACKWARD][part];
        d.length += s->share[part] * ari_cost_sum(last);
        tp_seconds += s->share[part] * last->tp;
    }
    if (c->o->shared_links && tp.between == dp.between && d.length > 0.0)
        d.shared = tp_seconds / d.length;
    return d;
}

/* When the buckets' queue has done them all, in seconds since the last backward pass began. Each waits for the gradient
 * that completes it, and for those before it; `backlog`: what earlier micro-batches left to do. */
static double drained(const composed *c, const drain *d, double backlog)
{
    const ari_outside *s = c->outside;
    const double layers = (double)s->layers;
    double at = backlog;
    for (size_t i = 0; i < s->n; i++) {
        const ari_bucket_cost *b = &s->bucket[i];
        const bool outside = b->last.layer == ARI_NO_LAYER, before = ari_section_of(b->last.role) == ARI_BEFORE_BLOCKS;
        const double done = outside ? (before ? layers : 0.0) : layers - (double)b->last.layer;
        const double ready = ari_passes_ready(c->passes, &b->last, s->layers) - d->absent + done * d->again;
        at = fmax(at, b->beside && !c->idle ? ready : d->length + s->loss);
        const double slowed = fmax(0.0, fmin(b->seconds, (d->length - at) * (1.0 - d->shared)));
        at += slowed / (1.0 - fmin(d->shared, 0.99)) + (b->seconds - slowed);
    }
    return at;
}

static double sums_of(const ari_outside *s)
{
    double sum = 0.0;
    for (size_t i = 0; i < s->n; i++)
        sum += s->bucket[i].seconds;
    return sum;
}

/* ZeRO-2 keeps shares of gradients, so that each micro-batch sums its own, beside the passes that follow. */
static void add_sums(composed *c, const stage *s, double pass_seconds)
{
    const drain d = drain_of(c, s);
    const double sums = sums_of(c->outside), before = c->p->step.run.parallel.zero == 2 ? c->micro - 1.0 : 0.0;
    const double backlog = before * fmax(0.0, sums - pass_seconds / c->micro);
    const double done = drained(c, &d, backlog), end = d.length + c->outside->loss;
    const double exposed = fmax(0.0, done - end) + c->outside->before + c->outside->loss + c->outside->after;
    const bool dp = ari_links_of(c->p, c->o, ARI_OVER_DP).n > 1.0;
    c->t->of[dp ? ARI_TIME_DP : ARI_TIME_TP] += exposed;
    c->t->hidden += (before + 1.0) * sums - fmax(0.0, done - end);
    ari_moves_add(&c->t->moved, &c->outside->moved, 1.0);
    for (int i = 0; i < c->t->moved.n && before > 0.0; i++) {
        ari_moved *row = &c->t->moved.row[i];
        if (row->over == ARI_TIME_DP && strcmp(row->call, ari_call_name(ARI_CALL_REDUCE_SCATTER)) == 0) {
            row->calls *= c->micro;
            row->bytes *= c->micro;
            row->seconds *= c->micro;
        }
    }
}

/* ZeRO-3: each block's weights are gathered before its forward pass and again before its backward pass, while the block
 * before is computed, and its gradients scattered while the next is. The first gather and the last scatter have nothing
 * to hide them. */
static void add_gathers(composed *c, const stage *s)
{
    const ari_links l = ari_links_of(c->p, c->o, ARI_OVER_DP);
    const double layers = (double)c->passes->layers, width = (double)ar_dtype_bytes(AR_BF16);
    const ari_cost a = again(c, c->passes->last[ARI_GOES_FORWARD], ARI_PART_BLOCKS);
    const double forward = ari_cost_sum(&c->passes->last[ARI_GOES_FORWARD][ARI_PART_BLOCKS]) / layers;
    const double backward =
        (ari_cost_sum(&c->passes->last[ARI_GOES_BACKWARD][ARI_PART_BLOCKS]) + ari_cost_sum(&a)) / layers;
    double exposed = 0.0;
    for (int part = 0; part < ARI_MODEL_PARTS; part++) {
        const double units = part == ARI_PART_BLOCKS ? s->layers : s->share[part];
        const double n = c->passes->parameters[part] / (part == ARI_PART_BLOCKS ? layers : 1.0);
        const double gather = ari_links_call(&l, ARI_CALL_ALL_GATHER, n, width);
        const double scatter = ari_links_call(&l, ARI_CALL_REDUCE_SCATTER, n, width), times = units * c->micro;
        const double bytes = ari_links_sent(&l, ARI_CALL_ALL_GATHER, n, width);
        if (units == 0.0 || n == 0.0)
            continue;
        const double hides_f = part == ARI_PART_BLOCKS ? forward : 0.0,
                     hides_b = part == ARI_PART_BLOCKS ? backward : 0.0;
        const double alone = 2.0 * gather + scatter;
        const double others = fmax(0.0, gather - hides_f) + fmax(0.0, gather + scatter - hides_b);
        exposed += c->micro * (alone + (units - 1.0) * others);
        ari_moves_row(&c->t->moved, ARI_TIME_DP, ari_call_name(ARI_CALL_ALL_GATHER), &l, 2.0 * times,
                      2.0 * times * bytes, 2.0 * times * gather);
        ari_moves_row(&c->t->moved, ARI_TIME_DP, ari_call_name(ARI_CALL_REDUCE_SCATTER), &l, times, times * bytes,
                      times * scatter);
        c->t->hidden += times * alone - c->micro * (alone + (units - 1.0) * others);
    }
    c->t->of[ARI_TIME_DP] += exposed;
}

/* --- together ----------------------------------------------------------------------------------------------------- */

void ari_time_compose(ari_time *t, const ari_planned *p, const ari_time_options *o, const ari_passes *passes,
                      const ari_outside *outside)
{
    const bool formula = o->account == ARI_ACCOUNT_PRODUCTION && !p->step.forward_only; /* else the list has it */
    const ar_recompute what = p->step.run.parallel.recompute.what;
    *t = (ari_time){.hidden = 0.0};
    composed c = {.p = p,
                  .o = o,
                  .passes = passes,
                  .outside = outside,
                  .t = t,
                  .idle = p->step.run.batch < (size_t)ari_at_least_one(p->step.run.parallel.dp),
                  .micro = ari_at_least_one(p->step.run.parallel.micro_batches),
                  .share_again = formula ? ari_recomputed_share(&p->step) : 0.0,
                  .whole_again = what == AR_RECOMPUTE_FULL,
                  .scores_again = what == AR_RECOMPUTE_SELECTIVE && !p->flash};
    const stage slowest = add_stages(&c), first = stage_of(p, 0);
    const double pass_seconds = ari_time_step(t) - t->of[ARI_TIME_BUBBLE];
    for (int part = 0; part < ARI_MODEL_PARTS; part++) {
        ari_moves_add(&t->moved, &passes->moved[part], slowest.share[part]);
        t->hidden += slowest.share[part] * passes->hidden[part];
    }
    add_sends(&c);
    if (p->step.run.parallel.zero >= 3)
        add_gathers(&c, &slowest);
    else
        add_sums(&c, &first, pass_seconds);
}

ar_status ari_time_of(ari_time *t, const ari_planned *p, const ari_time_options *o)
{
    ari_passes passes;
    ari_outside outside;
    AR_TRY(ari_passes_init(&passes, p, o));
    const ar_status st = ari_outside_init(&outside, p, o);
    if (st == AR_OK) {
        ari_time_compose(t, p, o, &passes, &outside);
        ari_outside_fini(&outside);
    }
    ari_passes_fini(&passes);
    return st;
}

typedef struct start {
    ari_links links;
    double seconds;
} start;

/* Broadcasts follow each other along the chain of ranks: after the first one each takes as long as between two
 * neighbours. */
static ar_status add_start(void *user, const ari_operation *op)
{
    start *s = user;
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

ar_status ari_time_start(double *seconds, const ari_planned *p, const ari_time_options *o)
{
    const ari_step_case c = ari_time_case(p, o, p->step.config);
    start s = {.links = ari_links_of(p, o, ARI_OVER_DP)};
    AR_TRY(ari_operations_start(&c, 0, add_start, &s));
    *seconds = s.seconds;
    return AR_OK;
}

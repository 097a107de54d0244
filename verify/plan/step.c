/* SPDX-License-Identifier: Apache-2.0 */
/* Time and memory of a step from the cost of a micro-batch (cost.c): pipeline stages and the bubble of their schedule,
 * recomputation, gradient reductions, gathered weights, the optimizer, and ZeRO's states.
 *
 * Letters: p pipeline ranks with v stages each, m micro-batches; F, I and W are the seconds of a forward pass, of the
 * gradient of a stage's input, and of the gradients of its weights; B = I + W. Sources: schedules Narayanan et al. 2021
 * (arXiv:2104.04473) and Qi et al. 2024 (ZB-H1, arXiv:2401.10241); ZeRO Rajbhandari et al. 2020 (arXiv:1910.02054), its
 * prefetch Zhao et al. 2023 (arXiv:2304.11277); buckets Li et al. 2020 (arXiv:2006.15704). */
#include <math.h>
#include <string.h>

#include "anyrank/config.h"
#include "ref/core/size.h"
#include "ref/models/parallel_private.h"
#include "ref/pipeline/schedule.h"
#include "ref/placement/context_private.h"
#include "verify/plan/cost.h"

static const double VALUE = 2.0, FLOAT = 4.0, COUNT = 8.0; /* bytes of a value, a sum and a count */
/* Bytes that the optimizer moves per updated parameter (it reads and writes the master weight and both moments), and
 * per gradient (it reads each twice, clears it, and writes the weight). */
static const double UPDATE_MOVES = 30.0, GRADIENT_MOVES = 8.0;

/* --- stages ------------------------------------------------------------------------------------------------------- */

static bool same_parts(const ari_part_counts *a, const ari_part_counts *b)
{
    return memcmp(a, b, sizeof *a) == 0;
}

static void add_parts(ari_part_counts *sum, const ari_part_counts *addend, double times)
{
    for (int i = 0; i < ARI_MODEL_PARTS; i++)
        sum->count[i] += times * addend->count[i];
}

static ari_part_counts parts_of_stage(const ari_planned *p, size_t stages, size_t i)
{
    ari_part_counts s = {.count = {[ARI_PART_BEFORE] = i == 0, [ARI_PART_AFTER] = i + 1 == stages}};
    const ar_config *c = p->step.config;
    size_t first_layer = 0, count = 0;
    ari_stage_layers(&first_layer, &count, &p->step.run.parallel.stages, c->layers, stages, i);
    for (size_t layer = first_layer; layer < first_layer + count; layer++)
        s.count[ar_config_has_experts(c, layer) ? ARI_PART_EXPERTS : ARI_PART_DENSE] += 1.0;
    return s;
}

void ari_pipeline_of(ari_pipeline *l, const ari_planned *p)
{
    const ar_parallel *layout = &p->step.run.parallel;
    const size_t ranks = (size_t)ari_at_least_one(layout->pp), stages = (size_t)ari_parallel_stages(layout);
    l->ranks = (int)ranks;
    l->stages = (int)(stages / ranks);
    l->schedule = layout->schedule;
    l->classes = 0;
    l->model = (ari_part_counts){.count = {0.0}};
    for (size_t r = 0; r < ranks; r++) {
        const ari_part_counts stage = parts_of_stage(p, stages, r);
        ari_part_counts rank = stage;
        for (size_t i = r + ranks; i < stages; i += ranks) {
            const ari_part_counts stage_parts = parts_of_stage(p, stages, i);
            add_parts(&rank, &stage_parts, 1.0);
        }
        ari_rank_class *last_class = l->classes > 0 ? &l->rank_class[l->classes - 1] : NULL;
        if (last_class && same_parts(&last_class->rank, &rank) && same_parts(&last_class->stage, &stage))
            last_class->last_rank = (int)r;
        else
            l->rank_class[l->classes++] = (ari_rank_class){(int)r, (int)r, rank, stage, l->model};
        add_parts(&l->model, &rank, 1.0);
    }
}

/* --- seconds of parts --------------------------------------------------------------------------------------------- */

typedef struct step {
    const ari_planned *planned;
    const ari_time_options *options;
    const ari_micro_cost *micro;
    const ari_pipeline *pipeline;
    const ari_sync *sync;
    double micros;                    /* m */
    double recomputed;                /* fraction of the layers that are recomputed */
    bool full, selective;             /* blocks, or scores alone */
    double forward[ARI_MODEL_PARTS];  /* F of each part */
    double backward[ARI_MODEL_PARTS]; /* seconds of the backward pass including the recomputation before it */
    double weights[ARI_MODEL_PARTS];  /* W */
    double layer[ARI_PASSES];         /* seconds of the mean layer */
} step;

static double dot(const ari_part_counts *parts, const double seconds[ARI_MODEL_PARTS])
{
    double sum = 0.0;
    for (int i = 0; i < ARI_MODEL_PARTS; i++)
        sum += parts->count[i] * seconds[i];
    return sum;
}

static double pass_seconds(const ari_pass_cost *c)
{
    double sum = 0.0;
    for (int k = 0; k < ARI_TIME_KINDS; k++)
        sum += c->seconds[k];
    return sum;
}

static step begin_step(const ari_planned *p, const ari_time_options *o, const ari_micro_cost *m, const ari_pipeline *l,
                       const ari_sync *sync)
{
    const ar_parallel *layout = &p->step.run.parallel;
    step s = {.planned = p,
              .options = o,
              .micro = m,
              .pipeline = l,
              .sync = sync,
              .micros = ari_at_least_one(layout->micro_batches),
              .recomputed = ari_recomputed_share(&p->step),
              .full = layout->recompute.part == AR_RECOMPUTE_FULL,
              .selective = layout->recompute.part == AR_RECOMPUTE_SELECTIVE && !p->flash};
    for (int i = 0; i < ARI_MODEL_PARTS; i++) {
        const ari_part_cost *part = &m->part[i];
        const double recompute_seconds = s.full        ? pass_seconds(&part->block)
                                         : s.selective ? part->pass[ARI_FORWARD].attention
                                                       : 0.0;
        s.forward[i] = pass_seconds(&part->pass[ARI_FORWARD]);
        s.backward[i] = pass_seconds(&part->pass[ARI_BACKWARD]) + s.recomputed * recompute_seconds;
        s.weights[i] = part->pass[ARI_BACKWARD].weights;
    }
    const double dense = l->model.count[ARI_PART_DENSE], experts = l->model.count[ARI_PART_EXPERTS];
    s.layer[ARI_FORWARD] =
        (dense * s.forward[ARI_PART_DENSE] + experts * s.forward[ARI_PART_EXPERTS]) / (dense + experts);
    s.layer[ARI_BACKWARD] =
        (dense * s.backward[ARI_PART_DENSE] + experts * s.backward[ARI_PART_EXPERTS]) / (dense + experts);
    return s;
}

/* Adds, for ZeRO-3, the seconds per micro-batch in which a rank waits for weights or gradients. Each block's weights
 * are gathered before its forward and backward pass while the previous block is computed, and its gradients are
 * scattered while the next block is computed. Nothing hides the first gather and the last scatter of each of a rank's
 * `stages`. */
static void add_exposed(double exposed[ARI_PASSES], const step *s, const ari_part_counts *parts, double stages)
{
    const ari_sync *sync = s->sync;
    const double layers = parts->count[ARI_PART_DENSE] + parts->count[ARI_PART_EXPERTS];
    const double late = s->options->late_gathers ? sync->unit_gather : 0.0, gather = sync->unit_gather,
                 scatter = sync->unit_scatter;
    exposed[ARI_FORWARD] = exposed[ARI_BACKWARD] = 0.0;
    if (s->planned->step.run.parallel.zero < 3)
        return;
    if (layers > 0.0) {
        exposed[ARI_FORWARD] = stages * gather + (layers - stages) * fmax(0.0, gather - s->layer[ARI_FORWARD]);
        exposed[ARI_BACKWARD] =
            stages * (gather + scatter) +
            (layers - stages) * (late + fmax(0.0, gather - late + scatter - s->layer[ARI_BACKWARD]));
    }
    for (int end = 0; end < 2; end++) {
        const double part_count = parts->count[end == 0 ? ARI_PART_BEFORE : ARI_PART_AFTER];
        exposed[ARI_FORWARD] += part_count * sync->end_gather[end];
        exposed[ARI_BACKWARD] += part_count * (sync->end_gather[end] + sync->end_scatter[end]);
    }
}

/* Returns the seconds of ZeRO-3's traffic for a micro-batch on a rank that are overlapped. */
static double hidden_units(const step *s, const ari_part_counts *parts)
{
    const ari_sync *sync = s->sync;
    double exposed[ARI_PASSES];
    add_exposed(exposed, s, parts, 1.0);
    double sum = (parts->count[ARI_PART_DENSE] + parts->count[ARI_PART_EXPERTS]) *
                 (2.0 * sync->unit_gather + sync->unit_scatter);
    for (int end = 0; end < 2; end++)
        sum += parts->count[end == 0 ? ARI_PART_BEFORE : ARI_PART_AFTER] *
               (2.0 * sync->end_gather[end] + sync->end_scatter[end]);
    return sum - exposed[ARI_FORWARD] - exposed[ARI_BACKWARD];
}

/* --- the schedule of a pipeline ----------------------------------------------------------------------------------- */

/* Seconds of one micro-batch on a rank, summed over its stages. */
typedef struct rank_time {
    double forward, backward, weights;
} rank_time;

static rank_time rank_time_of(const step *s, const ari_part_counts *parts)
{
    double exposed[ARI_PASSES];
    add_exposed(exposed, s, parts, s->pipeline->stages);
    return (rank_time){dot(parts, s->forward) + exposed[ARI_FORWARD], dot(parts, s->backward) + exposed[ARI_BACKWARD],
                       dot(parts, s->weights)};
}

/* ZB-H1: W of the first micro-batch fills one part of the wait for the other ranks' F and I, and the W of the next p-1
 * micro-batches fill as much again. For equal ranks: (p-1)(F+I-W). */
static double zero_bubble_end(const step *s, const rank_time *t, double peer_seconds, double transfer)
{
    const double behind = s->pipeline->ranks - 1.0, filled = (behind + fmin(s->micros - 1.0, behind)) * t->weights;
    return s->micros * (t->forward + t->backward) + fmax(0.0, peer_seconds - filled) + 2.0 * behind * transfer;
}

/* Interleaved schedule: forward and backward pass of the other ranks' first stage, (p-1)(F+B)/v for equal ranks. If p
 * does not divide m, the order is that of the next multiple. A round with fewer micro-batches than ranks then waits in
 * the other stages too: in both passes if it is the only round, otherwise in the backward pass only, because other
 * rounds fill the forward pass. */
static double interleaved_end(const step *s, const rank_time *t, double peer_seconds, double transfer)
{
    const double m = s->micros, p = s->pipeline->ranks, v = s->pipeline->stages,
                 micro_seconds = t->forward + t->backward;
    const double missing = ceil(m / p) * p - m, waits = m > p ? t->backward / micro_seconds : 1.0;
    return m * micro_seconds + peer_seconds / v + missing / (p - 1.0) * waits * peer_seconds * (v - 1.0) / v +
           2.0 * (p * v - 1.0) * transfer;
}

/* Returns when the last rank ends if rank `rank` is the busiest. before, after: F + B of the ranks before and after it;
 * transfer: seconds of a message. In 1F1B, the rank needs for each micro-batch either its own computation time, or the
 * time that its q successors take to return one of the q+1 micro-batches in flight. The first and the last q
 * micro-batches overlap with its successors or with its own passes. With equal ranks the bubble is (p-1)(F+B). */
static double schedule_end(const step *s, const rank_time *t, int rank, double before, double after, double transfer)
{
    const ari_pipeline *l = s->pipeline;
    const double m = s->micros, micro_seconds = t->forward + t->backward, q = l->ranks - 1 - rank;
    if (l->schedule == AR_PP_ZERO_BUBBLE)
        return zero_bubble_end(s, t, before + after, transfer);
    if (l->stages > 1)
        return interleaved_end(s, t, before + after, transfer);
    const double behind = after + 2.0 * q * transfer,
                 period = fmax(micro_seconds, (micro_seconds + behind) / (q + 1.0));
    if (m <= q)
        return before + 2.0 * rank * transfer + m * micro_seconds + behind;
    return before + 2.0 * rank * transfer + (m - q) * period + fmax(behind, q * t->forward) +
           fmax(behind, q * t->backward);
}

static double ranks_in(const ari_rank_class *k)
{
    return k->last_rank - k->first_rank + 1;
}

static double each_micro(const step *s, size_t rank_class)
{
    const rank_time t = rank_time_of(s, &s->pipeline->rank_class[rank_class].rank);
    return t.forward + t.backward;
}

/* Simulates a user's schedule operation by operation, since it has no closed form. Returns 0 if memory is short. */
static double own_schedule_end(const step *s, double transfer)
{
    const ari_pipeline *l = s->pipeline;
    const size_t stages = (size_t)l->ranks * (size_t)l->stages;
    ar_pp_times times[AR_MAX_STAGES];
    ar_pp_run run;
    for (size_t i = 0; i < stages; i++) {
        const ari_part_counts parts = parts_of_stage(s->planned, stages, i);
        const rank_time t = rank_time_of(s, &parts);
        times[i] = (ar_pp_times){.forward = t.forward,
                                 .backward_input = t.backward - t.weights,
                                 .backward_weight = t.weights,
                                 .transfer = transfer};
    }
    const ari_pp_timed timed = {times, &(int){0}, 1, transfer == 0.0};
    const ar_status st = ari_schedule_walk(&run, s->planned->step.run.parallel.own_schedule, &timed, NULL, NULL);
    return st == AR_OK ? run.makespan : 0.0;
}

/* Seconds from the first forward to the last backward pass. */
static double pipeline_end(const step *s, double transfer)
{
    const ari_pipeline *l = s->pipeline;
    if (s->planned->step.run.parallel.own_schedule)
        return own_schedule_end(s, transfer);
    double end = 0.0, total_seconds = 0.0, before = 0.0;
    rank_time longest = {.forward = transfer, .backward = transfer};
    for (size_t i = 0; i < l->classes; i++)
        total_seconds += ranks_in(&l->rank_class[i]) * each_micro(s, i);
    for (size_t i = 0; i < l->classes; i++) {
        const ari_rank_class *k = &l->rank_class[i];
        const rank_time t = rank_time_of(s, &k->rank);
        const double micro_seconds = t.forward + t.backward;
        for (int rank = k->first_rank; rank <= k->last_rank;
             rank += k->last_rank > k->first_rank ? k->last_rank - k->first_rank : 1) {
            const double earlier = before + (rank - k->first_rank) * micro_seconds;
            end = fmax(
                end, schedule_end(s, &t, rank, earlier, fmax(0.0, total_seconds - earlier - micro_seconds), transfer));
        }
        before += ranks_in(k) * micro_seconds;
        longest.forward = fmax(longest.forward, t.forward);
        longest.backward = fmax(longest.backward, t.backward);
    }
    if (l->schedule ==
        AR_PP_GPIPE) /* all forward passes, then all backward passes, each as fast as the slowest rank or link */
        return total_seconds + (s->micros - 1.0) * (longest.forward + longest.backward) +
               2.0 * (l->ranks - 1) * transfer;
    return end;
}

/* --- sums of gradients -------------------------------------------------------------------------------------------- */

/* Returns the bucket size of Megatron-LM: 40 million parameters, or a million for each rank of the all-reduce, so that
 * the latency of a long ring matters less. */
static double bucket_elements(const ari_planned *p)
{
    const double ranks = ari_extent(&p->step.run.parallel, ARI_CUTS_DATA);
    const size_t bucket_bytes = p->step.run.ddp.bucket_bytes;
    return bucket_bytes == ARI_BUCKETS_USUAL ? 1e6 * fmax(40.0, ranks) : fmax(1.0, (double)bucket_bytes / FLOAT);
}

/* Parameters that all ranks of data parallelism share, or the ranks with the same experts. */
typedef struct shared {
    double elements;
    ari_links reduce_links, replicas; /* ranks that reduce gradients (with ZeRO to shards), and ranks that all-reduce
                                         these shards */
} shared;

static shared shared_of(const ari_planned *p, const ari_time_options *o, double elements, bool experts)
{
    shared g = {.elements = elements};
    if (p->step.run.parallel.zero == 0) {
        g.reduce_links = ari_links_of(p, o, experts ? ARI_OVER_EDP : ARI_OVER_DP);
        return g;
    }
    g.reduce_links = ari_links_of(p, o, experts ? ARI_OVER_EXPERT_SHARD : ARI_OVER_SHARD);
    if (ari_at_least_one(p->step.run.parallel.dp_replicate) > 1)
        g.replicas = ari_links_of(p, o, experts ? ARI_OVER_EXPERT_REPLICATE : ARI_OVER_REPLICATE);
    return g;
}

/* Returns the seconds for reducing n gradients: an all-reduce, or with ZeRO a reduce-scatter to shards and an
 * all-reduce of the shards over replicas. */
static double sum_seconds(const shared *g, double n, double width, double times, bool divides, ari_traffic *traffic)
{
    const ari_links *links = &g->reduce_links;
    const ari_collective kind = divides ? ARI_MOVES_REDUCE_SCATTER : ARI_MOVES_ALL_REDUCE;
    const double share = n / g->reduce_links.ranks, call_seconds = ari_links_call(links, kind, n, width);
    const double copies =
        divides && g->replicas.ranks > 1.0 ? ari_links_call(&g->replicas, ARI_MOVES_ALL_REDUCE, share, width) : 0.0;
    ari_traffic_count(traffic, ARI_TIME_DP, links, kind, times, times * ari_links_sent(links, kind, n, width),
                      times * call_seconds);
    ari_traffic_count(traffic, ARI_TIME_DP, &g->replicas, ARI_MOVES_ALL_REDUCE, times,
                      times * ari_links_sent(&g->replicas, ARI_MOVES_ALL_REDUCE, share, width), times * copies);
    return call_seconds + copies;
}

static double gather_seconds(const shared *g, double n, double times, ari_traffic *traffic)
{
    const double call_seconds = ari_links_call(&g->reduce_links, ARI_MOVES_ALL_GATHER, n, VALUE);
    ari_traffic_count(traffic, ARI_TIME_DP, &g->reduce_links, ARI_MOVES_ALL_GATHER, times,
                      times * ari_links_sent(&g->reduce_links, ARI_MOVES_ALL_GATHER, n, VALUE), times * call_seconds);
    return call_seconds;
}

/* Counts the parameters of a rank: all, and those of experts. */
static void count_parameters(double n[2], const ari_micro_cost *m, const ari_part_counts *parts, bool pipeline)
{
    n[0] = n[1] = 0.0;
    for (int i = 0; i < ARI_MODEL_PARTS; i++) {
        n[0] += parts->count[i] * m->part[i].parameters;
        n[1] += parts->count[i] * m->part[i].experts;
    }
    n[0] += pipeline ? parts->count[ARI_PART_AFTER] * m->shared_table : 0.0;
}

/* A bucket is full when it has this many elements; no tensor is split between two buckets. */
static double bucket_count(const ari_planned *p, const ari_micro_cost *m, const ari_part_counts *parts, bool experts)
{
    const double bucket = bucket_elements(p);
    double n = 0.0;
    for (int i = 0; i < ARI_MODEL_PARTS; i++) {
        const ari_part_cost *part = &m->part[i];
        n += parts->count[i] * (experts ? fmin(part->expert_tensors, part->experts / bucket)
                                        : fmin(part->tensors + 1.0, (part->parameters - part->experts) / bucket));
    }
    return fmax(1.0, ceil(n));
}

/* Units of ZeRO-3: a block of the mean layer, and the ends. */
static void add_units(ari_sync *sync, const ari_planned *p, const ari_time_options *o, const ari_micro_cost *m,
                      const ari_pipeline *l, const ari_part_counts *rank, ari_traffic *traffic)
{
    const double width = o->fp32_sums ? FLOAT : VALUE, micros = ari_at_least_one(p->step.run.parallel.micro_batches);
    for (int unit = 0; unit < 3; unit++) { /* a block, the part before the blocks, the part after them */
        ari_part_counts parts = {.count = {[ARI_PART_BEFORE] = unit == 1, [ARI_PART_AFTER] = unit == 2}};
        double n[2], layers = l->model.count[ARI_PART_DENSE] + l->model.count[ARI_PART_EXPERTS], gather = 0.0,
                     sums = 0.0;
        for (int i = ARI_PART_DENSE; i <= ARI_PART_EXPERTS && unit == 0; i++)
            parts.count[i] = l->model.count[i] / layers;
        const double unit_count = unit == 0 ? rank->count[ARI_PART_DENSE] + rank->count[ARI_PART_EXPERTS]
                                            : rank->count[unit == 1 ? ARI_PART_BEFORE : ARI_PART_AFTER];
        count_parameters(n, m, &parts, l->ranks > 1);
        for (int experts = 0; experts < 2; experts++) {
            const double elements = experts ? n[1] : n[0] - n[1];
            if (elements <= 0.0 || unit_count == 0.0)
                continue;
            const shared g = shared_of(p, o, elements, experts);
            gather += gather_seconds(&g, g.elements, 2.0 * micros * unit_count, traffic);
            sums += sum_seconds(&g, g.elements, width, micros * unit_count, true, traffic);
        }
        *(unit == 0 ? &sync->unit_gather : &sync->end_gather[unit - 1]) = gather;
        *(unit == 0 ? &sync->unit_scatter : &sync->end_scatter[unit - 1]) = sums;
    }
}

/* Adds the reductions of scalars: number of targets, loss, and gradient norm over all ranks that hold different
 * elements. */
static void add_numbers(ari_sync *sync, const ari_planned *p, const ari_time_options *o, ari_traffic *traffic)
{
    const ari_links dp = ari_links_of(p, o, ARI_OVER_DP), tp = ari_links_of(p, o, ARI_OVER_TP);
    const ari_links *norms[] = {&tp, &dp, &sync->pipeline_links};
    const double data =
        ari_links_call(&dp, ARI_MOVES_ALL_REDUCE, 1.0, COUNT) + ari_links_call(&dp, ARI_MOVES_ALL_REDUCE, 1.0, FLOAT);
    sync->numbers = data;
    sync->stage_numbers = ari_links_call(&sync->pipeline_links, ARI_MOVES_BROADCAST, 1.0, FLOAT);
    if (traffic) {
        ari_traffic_count(traffic, ARI_TIME_DP, &dp, ARI_MOVES_ALL_REDUCE, 2.0,
                          ari_links_sent(&dp, ARI_MOVES_ALL_REDUCE, 1.0, COUNT + FLOAT), data);
        ari_traffic_count(traffic, ARI_TIME_PP, &sync->pipeline_links, ARI_MOVES_BROADCAST, 1.0,
                          ari_links_sent(&sync->pipeline_links, ARI_MOVES_BROADCAST, 1.0, FLOAT), sync->stage_numbers);
    }
    for (int i = 0; i < 3 && p->step.run.clip > 0.0; i++) {
        const double seconds = ari_links_call(norms[i], ARI_MOVES_ALL_REDUCE, 1.0, FLOAT) +
                               ari_links_call(norms[i], ARI_MOVES_ALL_REDUCE, 2.0, COUNT);
        if (i != 1 || p->step.run.parallel.zero > 0)
            *(i == 2 ? &sync->stage_numbers : &sync->numbers) += seconds;
    }
    if (o->shared_links) {
        const ari_links ep = ari_links_of(p, o, ARI_OVER_EP);
        sync->shares_links[0] = tp.inter_node == dp.inter_node;
        sync->shares_links[1] = ep.inter_node == dp.inter_node;
    }
}

ari_sync ari_sync_of(const ari_planned *p, const ari_time_options *o, const ari_micro_cost *m, const ari_pipeline *l,
                     size_t rank_class, ari_traffic *traffic)
{
    const ar_parallel *layout = &p->step.run.parallel;
    const ari_part_counts *rank = &l->rank_class[rank_class].rank;
    const double width = o->fp32_sums ? FLOAT : VALUE;
    const double micros = layout->zero == 2 ? ari_at_least_one(layout->micro_batches) : 1.0;
    const bool divides = layout->zero > 0;
    double n[2];
    ari_sync sync = {.pipeline_links = ari_links_of(p, o, ARI_OVER_PP),
                     .shares = divides ? ari_planned_shares(p) : 1.0,
                     .expert_shares = divides ? ari_planned_expert_shares(p) : 1.0};
    add_numbers(&sync, p, o, traffic);
    if (layout->zero >= 3) {
        add_units(&sync, p, o, m, l, rank, traffic);
        return sync;
    }
    count_parameters(n, m, rank, l->ranks > 1);
    for (int experts = 0; experts < 2; experts++) {
        const double elements = experts ? n[1] : n[0] - n[1];
        if (elements <= 0.0)
            continue;
        const shared g = shared_of(p, o, elements, experts);
        const double table = experts ? 0.0 : rank->count[ARI_PART_BEFORE] * m->part[ARI_PART_BEFORE].parameters;
        const double buckets = bucket_count(p, m, rank, experts), bucket_size = g.elements / buckets;
        sync.sums += buckets * sum_seconds(&g, bucket_size, width, micros * buckets, divides, traffic);
        sync.last_bucket = fmax(sync.last_bucket, sum_seconds(&g, fmax(bucket_size, table), width, 0.0, divides, NULL));
        sync.buckets += buckets;
        if (divides)
            sync.gathers += buckets * gather_seconds(&g, bucket_size, buckets, traffic);
    }
    if (m->shared_table > 0.0 && l->ranks > 1 &&
        (rank->count[ARI_PART_BEFORE] > 0.0 || rank->count[ARI_PART_AFTER] > 0.0)) {
        const ari_links end_links = ari_links_of(p, o, ARI_OVER_ENDS);
        const double seconds = ari_links_call(&end_links, ARI_MOVES_ALL_REDUCE, m->shared_table, width);
        sync.sums += seconds;
        sync.last_bucket += seconds;
        ari_traffic_count(traffic, ARI_TIME_PP, &end_links, ARI_MOVES_ALL_REDUCE, 1.0,
                          ari_links_sent(&end_links, ARI_MOVES_ALL_REDUCE, m->shared_table, width), seconds);
    }
    return sync;
}

/* Returns the fraction of a stage's backward pass in which tp and ep collectives use the kind of link that gradient
 * reductions use. */
static double share_on_links(const step *s, const ari_part_counts *stage)
{
    static const ari_time_kind kinds[] = {ARI_TIME_TP, ARI_TIME_EP};
    double called = 0.0, total = dot(stage, s->backward);
    for (int i = 0; i < ARI_MODEL_PARTS; i++) {
        for (int k = 0; k < 2 && s->sync->shares_links[k]; k++)
            called += stage->count[i] * s->micro->part[i].pass[ARI_BACKWARD].seconds[kinds[k]];
    }
    return total > 0.0 ? called / total : 0.0;
}

/* Returns the seconds from a rank's last backward pass until its gradients are reduced. Buckets become ready during the
 * pass; of a rank's stages all but the first have ended before. */
static double exposed_sums(const step *s, size_t i)
{
    const ari_pipeline *l = s->pipeline;
    const ari_rank_class *k = &l->rank_class[i];
    const ari_sync *sync = &s->sync[i];
    const double stage = dot(&k->stage, s->backward), rank = dot(&k->rank, s->backward) / l->stages;
    const double window = stage + (l->stages > 1 ? (l->stages - 1.0) * fmin(s->micros, l->ranks) * rank : 0.0);
    const double ready = sync->buckets > 0.0 ? window / sync->buckets : 0.0;
    double waiting = 0.0;
    if (s->planned->step.run.parallel.zero == 2) {
        const double pass = dot(&k->rank, s->forward) + dot(&k->rank, s->backward);
        waiting = (s->micros - 1.0) * fmax(0.0, sync->sums - pass);
    }
    const double used = (1.0 - share_on_links(s, &k->stage)) * (window - ready); /* the part of the window that
                                                                                    reductions can use */
    return sync->sums > 0.0 ? fmax(sync->last_bucket, sync->sums + waiting - used) : 0.0;
}

/* --- time --------------------------------------------------------------------------------------------------------- */

/* The micro-batches through a rank's stages, by kind; their sum. */
static double rank_seconds(const step *s, const ari_part_counts *parts, double seconds[ARI_TIME_KINDS])
{
    double exposed[ARI_PASSES], sum = 0.0;
    memset(seconds, 0, ARI_TIME_KINDS * sizeof *seconds);
    add_exposed(exposed, s, parts, 1.0);
    seconds[ARI_TIME_DP] = s->micros * (exposed[ARI_FORWARD] + exposed[ARI_BACKWARD]);
    for (int i = 0; i < ARI_MODEL_PARTS; i++) {
        const ari_part_cost *part = &s->micro->part[i];
        const double times = s->micros * parts->count[i], recomputed = times * s->recomputed;
        for (int k = 0; k < ARI_TIME_KINDS && times > 0.0; k++) {
            seconds[k] += times * (part->pass[ARI_FORWARD].seconds[k] + part->pass[ARI_BACKWARD].seconds[k]);
            if (s->full)
                seconds[k == ARI_TIME_PRODUCTS ? ARI_TIME_RECOMPUTE : k] += recomputed * part->block.seconds[k];
        }
        if (s->selective)
            seconds[ARI_TIME_RECOMPUTE] += recomputed * part->pass[ARI_FORWARD].attention;
    }
    for (int k = 0; k < ARI_TIME_KINDS; k++)
        sum += seconds[k];
    return sum;
}

/* Finds the rank with the most work and adds the pipeline's extra time: the bubble without transfers, then the
 * transfers. */
static const ari_rank_class *add_passes(ari_time *t, const step *s, ari_traffic *traffic)
{
    const ari_pipeline *l = s->pipeline;
    const ari_rank_class *busiest = NULL;
    double busy = -1.0, seconds[ARI_TIME_KINDS];
    for (size_t i = 0; i < l->classes; i++) {
        const double sum = rank_seconds(s, &l->rank_class[i].rank, seconds);
        if (sum <= busy)
            continue;
        busy = sum;
        busiest = &l->rank_class[i];
        memcpy(t->seconds, seconds, sizeof seconds);
    }
    for (int i = 0; i < ARI_MODEL_PARTS; i++)
        t->hidden += s->micros * busiest->rank.count[i] * s->micro->part[i].hidden;
    if (l->ranks == 1)
        return busiest;
    const ar_run *run = &s->planned->step.run;
    const ari_links *links = &s->sync->pipeline_links;
    const double data = (double)ari_extent(&run->parallel, ARI_CUTS_DATA),
                 sp = run->parallel.sp ? run->parallel.tp : 1.0;
    const double bytes = VALUE * (double)run->batch / data / s->micros * (double)run->seq / fmax(1.0, sp) *
                         (double)s->planned->step.config->hidden;
    const double transfer = ari_links_send(links, bytes), sends = 2.0 * l->stages * s->micros;
    const double alone = fmax(busy, pipeline_end(s, 0.0));
    const double waits = fmax(0.0, pipeline_end(s, transfer) - alone);
    t->seconds[ARI_TIME_BUBBLE] = alone - busy;
    t->seconds[ARI_TIME_PP] += waits;
    t->hidden += fmax(0.0, sends * transfer - waits);
    ari_traffic_count(traffic, ARI_TIME_PP, links, ARI_MOVES_MESSAGE, sends, sends * bytes, sends * transfer);
    return busiest;
}

/* Finds the rank whose gradients are reduced last. A rank's last backward pass ends before those of the earlier
 * stages. */
static void add_sums(ari_time *t, const step *s, double *hidden)
{
    const ari_pipeline *l = s->pipeline;
    double max_exposed = -INFINITY, waits = 0.0;
    size_t last_class = 0;
    for (size_t i = 0; i < l->classes; i++) {
        const double exposed = exposed_sums(s, i), gathers = s->sync[i].gathers;
        const double early = dot(&l->rank_class[i].before, s->backward) / l->stages;
        if (exposed + gathers - early <= max_exposed)
            continue;
        max_exposed = exposed + gathers - early;
        waits = exposed;
        last_class = i;
    }
    const double micros = s->planned->step.run.parallel.zero == 2 ? s->micros : 1.0;
    t->seconds[ARI_TIME_DP] += fmax(0.0, max_exposed);
    *hidden += fmax(0.0, micros * s->sync[last_class].sums - waits);
}

/* The optimizer updates the rank's share of the parameters. */
static double update_seconds(const step *s, const ari_part_counts *parts)
{
    const ari_rates rates = ari_time_rates(s->options);
    const int zero = s->planned->step.run.parallel.zero;
    double n[2], muon = 0.0, matrices = 0.0;
    count_parameters(n, s->micro, parts, s->pipeline->ranks > 1);
    const double share = (n[0] - n[1]) / s->sync->shares + n[1] / s->sync->expert_shares;
    for (int i = 0; i < ARI_MODEL_PARTS; i++) {
        muon += parts->count[i] * s->micro->part[i].muon;
        matrices += parts->count[i] * s->micro->part[i].matrices;
    }
    if (zero > 0 && matrices > 0.0) { /* each rank gathers its matrices */
        const ari_links shards = ari_links_of(s->planned, s->options, ARI_OVER_SHARD);
        muon += ari_links_call(&shards, ARI_MOVES_ALL_REDUCE, matrices, FLOAT);
    }
    return muon + ari_rates_moves(&rates, UPDATE_MOVES * share + GRADIENT_MOVES * (zero > 1 ? share : n[0]));
}

void ari_step_time(ari_time *t, const ari_planned *p, const ari_time_options *o, const ari_micro_cost *m,
                   const ari_pipeline *l, const ari_sync *sync, const ari_traffic traffic[ARI_MODEL_PARTS])
{
    const step s = begin_step(p, o, m, l, sync);
    const ari_rates rates = ari_time_rates(o);
    double hidden = 0.0, update = 0.0;
    memset(t->seconds, 0, sizeof t->seconds);
    t->hidden = 0.0;
    t->traffic.n = 0;
    const ari_rank_class *busiest = add_passes(t, &s, traffic ? &t->traffic : NULL);
    if (p->step.run.parallel.zero < 3)
        add_sums(t, &s, &hidden);
    else
        hidden = s.micros * hidden_units(&s, &busiest->rank);
    for (size_t i = 0; i < l->classes; i++)
        update = fmax(update, update_seconds(&s, &l->rank_class[i].rank));
    const bool data = ari_extent(&p->step.run.parallel, ARI_CUTS_DATA) > 1;
    t->seconds[data ? ARI_TIME_DP : ARI_TIME_TP] += sync->numbers;
    t->seconds[ARI_TIME_PP] += sync->stage_numbers;
    t->seconds[ARI_TIME_MEMORY] += update;
    t->seconds[ARI_TIME_DP] +=
        rates.gpu ? rates.gpu->sm_share * hidden : 0.0; /* processors that reductions take away from GEMMs */
    t->hidden += hidden;
    for (int i = 0; i < ARI_MODEL_PARTS && traffic; i++)
        ari_traffic_add(&t->traffic, &traffic[i], s.micros * busiest->rank.count[i]);
}

/* --- memory ------------------------------------------------------------------------------------------------------- */

/* Returns the same for a user's schedule: the largest number for the stage, on the worst rank of a class. */
static double own_in_flight(const ar_pipeline_schedule *schedule, const ari_rank_class *k, int stage, int ranks)
{
    double max_count = 0.0;
    for (int rank = k->first_rank; rank <= k->last_rank; rank++) {
        size_t n = 0;
        double count = 0.0;
        const ar_pp_operation *list = ari_pipeline_schedule_rank(schedule, rank, &n);
        for (size_t i = 0; i < n; i++) {
            const bool is_end = list[i].kind == AR_PP_BACKWARD || list[i].kind == AR_PP_BACKWARD_WEIGHT;
            if (list[i].stage / ranks == stage)
                count += list[i].kind == AR_PP_FORWARD ? 1.0 : is_end ? -1.0 : 0.0;
            max_count = fmax(max_count, count);
        }
    }
    return max_count;
}

/* Counts the micro-batches of a stage that a rank has in flight at its peak, and those with pending weight gradients.
 * after_input: right after an input gradient, when one more is pending. */
static void in_flight(double count[2], const step *s, int rank, int stage, bool after_input)
{
    const ari_pipeline *l = s->pipeline;
    const double p = l->ranks, m = s->micros, v = l->stages, turns = ceil(m / p) * p;
    count[1] = 0.0;
    if (l->ranks == 1 || l->schedule == AR_PP_GPIPE) {
        count[0] = l->ranks == 1 ? 1.0 : m;
    } else if (v > 1.0) { /* forward passes before the first backward pass, p of each stage in turn */
        const double passes = fmin(v * turns, 2.0 * (p - rank - 1.0) + (v - 1.0) * p + 1.0),
                     round = floor(passes / (p * v));
        count[0] = fmin(m, round * p + fmin(p, fmax(0.0, passes - round * p * v - stage * p)));
    } else {
        count[0] = fmin(m, p - rank) - after_input;
        count[1] = l->schedule == AR_PP_ZERO_BUBBLE ? fmin(m, p) - count[0] : 0.0;
    }
}

/* Adds a rank's saved activations: with full recomputation the inputs of blocks, with selective recomputation
 * everything except scores. */
static void add_saved(ari_memory *memory, const step *s, const ari_part_cost *part, const double times[2])
{
    for (int k = ARI_MEMORY_ATTENTION; k <= ARI_MEMORY_LOGITS; k++) {
        double saved = part->saved.bytes[k];
        if (s->full)
            saved -= s->recomputed * (part->blocks.bytes[k] - (k == ARI_MEMORY_BETWEEN ? part->input : 0.0));
        else if (s->selective && k == ARI_MEMORY_ATTENTION)
            saved -= s->recomputed * part->scores;
        memory->bytes[k] += times[0] * saved + times[1] * part->deferred.bytes[k];
    }
}

static double share_of(const ari_planned *p, const double n[2], int since)
{
    return p->step.run.parallel.zero >= since
               ? ceil((n[0] - n[1]) / ari_planned_shares(p)) + ceil(n[1] / ari_planned_expert_shares(p))
               : n[0];
}

/* Weights, gradients, master weights and moments: 2 + 2 + 12 bytes a parameter, divided by the stages of ZeRO. */
static void add_states(ari_memory *memory, const step *s, const ari_part_counts *parts)
{
    const ari_planned *p = s->planned;
    const ar_run *run = &p->step.run;
    const bool trains = !p->step.forward_only, updates = trains && run->steps > 0;
    double n[2], muon[2] = {0.0, 0.0}, frozen = 0.0;
    count_parameters(n, s->micro, parts, s->pipeline->ranks > 1);
    for (int i = 0; i < ARI_MODEL_PARTS; i++) {
        muon[0] += parts->count[i] * s->micro->part[i].matrices;
        frozen += parts->count[i] * s->micro->part[i].frozen;
    }
    muon[1] = muon[0] > 0.0 ? n[1] : 0.0;
    const double state = updates ? share_of(p, n, 1) : 0.0, momenta = updates ? share_of(p, muon, 1) : 0.0;
    const double gradient = p->fp32_gradients && run->parallel.zero < 2 ? FLOAT : VALUE;
    memory->bytes[ARI_MEMORY_WEIGHTS] = VALUE * (share_of(p, n, 3) + frozen);
    memory->bytes[ARI_MEMORY_GRADIENTS] = trains ? gradient * share_of(p, n, 2) : 0.0;
    memory->bytes[ARI_MEMORY_MASTER] = FLOAT * state;
    memory->bytes[ARI_MEMORY_OPTIMIZER] = FLOAT * (ari_optimizer_states(&run->optimizer) * state - momenta);
}

/* Adds memory that exists for one operation, one recomputed block or one ZeRO unit at a time. */
static void add_work(ari_memory *memory, const step *s, const ari_part_counts *parts)
{
    const ari_planned *p = s->planned;
    const bool trains = !p->step.forward_only;
    const int zero = p->step.run.parallel.zero;
    double largest = 0.0, recompute_bytes = 0.0, unit = 0.0;
    for (int i = 0; i < ARI_MODEL_PARTS; i++) {
        const ari_part_cost *part = &s->micro->part[i];
        const double blocks = i == ARI_PART_AFTER ? fmax(1.0, (double)p->step.config->mtp) : 1.0;
        const double saved = s->full ? ari_memory_sum(&part->blocks) - part->input : s->selective ? part->scores : 0.0;
        if (parts->count[i] == 0.0)
            continue;
        largest = fmax(largest, trains ? part->workspace : part->forward_workspace);
        recompute_bytes = fmax(recompute_bytes, saved / blocks);
        unit = fmax(unit, (ari_planned_shares(p) > 1.0 ? part->parameters - part->experts : 0.0) +
                              (ari_planned_expert_shares(p) > 1.0 ? part->experts : 0.0));
    }
    memory->bytes[ARI_MEMORY_WORKSPACE] = largest + (trains ? recompute_bytes : 0.0) +
                                          (zero >= 3 ? VALUE * unit : 0.0) + (zero >= 2 && trains ? VALUE * unit : 0.0);
    memory->bytes[ARI_MEMORY_RESERVE] = p->reserve;
}

static ari_part_counts parts_of_rank_stage(const ari_planned *p, const ari_pipeline *l, int rank, int stage)
{
    return parts_of_stage(p, (size_t)l->ranks * (size_t)l->stages, (size_t)rank + (size_t)stage * (size_t)l->ranks);
}

static void add_saved_of_rank(ari_memory *memory, const step *s, const ari_rank_class *k, int rank, bool after_input)
{
    const ari_pipeline *l = s->pipeline;
    for (int stage = 0; stage < l->stages && !s->planned->step.forward_only; stage++) {
        const ari_part_counts parts = l->stages == 1 ? k->rank : parts_of_rank_stage(s->planned, l, rank, stage);
        double count[2];
        in_flight(count, s, rank, stage, after_input);
        if (s->planned->step.run.parallel.own_schedule)
            count[0] = own_in_flight(s->planned->step.run.parallel.own_schedule, k, stage, l->ranks);
        for (int i = 0; i < ARI_MODEL_PARTS; i++) {
            if (parts.count[i] > 0.0)
                add_saved(memory, s, &s->micro->part[i],
                          (double[]){parts.count[i] * count[0], parts.count[i] * count[1]});
        }
    }
}

void ari_step_memory(ari_memory *memory, const ari_planned *p, const ari_micro_cost *m, const ari_pipeline *l)
{
    const step s = {.planned = p,
                    .micro = m,
                    .pipeline = l,
                    .micros = ari_at_least_one(p->step.run.parallel.micro_batches),
                    .recomputed = ari_recomputed_share(&p->step),
                    .full = p->step.run.parallel.recompute.part == AR_RECOMPUTE_FULL,
                    .selective = p->step.run.parallel.recompute.part == AR_RECOMPUTE_SELECTIVE && !p->flash};
    double max_bytes = -1.0;
    for (size_t i = 0; i < l->classes; i++) {
        const ari_rank_class *k = &l->rank_class[i];
        ari_memory sum = {.bytes = {0.0}}, later = sum;
        add_saved_of_rank(&sum, &s, k, k->first_rank, false);
        if (l->ranks > 1 && l->schedule == AR_PP_ZERO_BUBBLE) { /* the last rank has the most pending gradients */
            add_saved_of_rank(&later, &s, k, k->last_rank, true);
            sum = ari_memory_sum(&later) > ari_memory_sum(&sum) ? later : sum;
        }
        add_states(&sum, &s, &k->rank);
        add_work(&sum, &s, &k->rank);
        if (ari_memory_sum(&sum) <= max_bytes)
            continue;
        max_bytes = ari_memory_sum(&sum);
        *memory = sum;
    }
}

/* --- one layout --------------------------------------------------------------------------------------------------- */

ar_status ari_memory_production(ari_memory *memory, const ari_planned *p)
{
    const ar_parallel *layout = &p->step.run.parallel;
    const size_t layers = p->step.config->layers;
    const ari_time_options unit_options = {.cluster = {.flops = 1.0}};
    ari_micro_cost m;
    ari_pipeline l;
    if (layout->stages.n == 0 &&
        (double)ari_at_least_one(layout->pp) * ari_at_least_one(layout->virtual_stages) > (double)layers)
        return ar_error_set(
            AR_ERR_INDIVISIBLE,
            "%zu layers cannot be split into %d stages on each of %d ranks; use at most one stage for each layer",
            layers, ari_at_least_one(layout->virtual_stages), ari_at_least_one(layout->pp));
    AR_TRY(ari_micro_cost_of(&m, p, &unit_options, NULL));
    ari_pipeline_of(&l, p);
    ari_step_memory(memory, p, &m, &l);
    return AR_OK;
}

ar_status ari_time_of(ari_time *t, const ari_planned *p, const ari_time_options *o)
{
    ari_micro_cost m;
    ari_pipeline l;
    ari_sync sync[AR_MAX_STAGES];
    ari_traffic traffic[ARI_MODEL_PARTS] = {{.n = 0}};
    AR_TRY(ari_micro_cost_of(&m, p, o, traffic));
    ari_pipeline_of(&l, p);
    for (size_t i = 0; i < l.classes; i++)
        sync[i] = ari_sync_of(p, o, &m, &l, i, NULL);
    ari_step_time(t, p, o, &m, &l, sync, traffic);
    (void)ari_sync_of(p, o, &m, &l, 0, &t->traffic);
    return AR_OK;
}

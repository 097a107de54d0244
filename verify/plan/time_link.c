/* SPDX-License-Identifier: Apache-2.0 */
/* Locates groups of ranks on nodes and computes the time of their collectives: the closed forms of
 * simulated-cluster.md. */
#include <math.h>
#include <string.h>

#include "anyrank/config.h"
#include "ref/core/axis.h"
#include "ref/core/size.h"
#include "verify/plan/cost.h"

/* n ranks a stride apart, of blocks of n * stride neighbours. */
typedef struct run {
    double stride, n;
} run;

/* Returns how many members of a group share a node: those of the inner run, and of the outer run if a node has several
 * inner runs. */
static double neighbours(double node, run inner, run outer)
{
    if (node >= outer.stride && outer.n > 1.0)
        return inner.n * fmin(outer.n, floor(node / outer.stride));
    return fmin(inner.n, fmax(1.0, floor(node / inner.stride)));
}

/* A node's boundary lies within a block of neighbours unless blocks fill nodes: then some group spans nodes. */
static ari_links links(const ari_time_options *o, run inner, run outer, double world)
{
    const double node = o->cluster.ranks_per_node,
                 block = outer.n > 1.0 ? outer.n * outer.stride : inner.n * inner.stride;
    ari_links l = {.options = o, .ranks = inner.n * outer.n};
    l.inter_node = l.ranks > 1.0 && node > 0.0 && world > node && fmod(node, block) > 0.0;
    l.node_ranks = l.inter_node ? fmin(neighbours(node, inner, outer), ceil(l.ranks / 2.0))
                                : l.ranks; /* a group that spans two nodes */
    l.inside = !l.inter_node || l.node_ranks > 1.0;
    return l;
}

static double ranks_along(const ari_planned *p, ari_axes axes)
{
    return (double)ari_extent(&p->step.run.parallel, axes);
}

/* Returns the links among neighbours that hold the same KV head: those that exchange heads, then those of tp. */
static ari_links links_of_copies(const ari_planned *p, const ari_time_options *o, double world)
{
    const double tp = ranks_along(p, ARI_CUTS_FEATURES), inner = ranks_along(p, 1u << ARI_AXIS_INNER);
    const double kv = (double)p->step.config->kv_heads, heads = tp * inner;
    const double copies = kv > 0.0 && heads > kv ? floor(heads / kv) : 1.0;
    const run exchanging = inner > 1.0 ? (run){tp, fmin(copies, inner)} : (run){world, 1.0};
    return links(o, (run){1.0, ceil(copies / inner)}, exchanging, world);
}

/* Returns the links of a group. Ranks that share ZeRO's shards are neighbours among the ranks with the same parameters.
 * The same holds for expert-parallel ranks among the data-parallel ranks, and for tp ranks with sharded experts. Ranks
 * with the same experts are one of each such group, or one of each group with the same sequence. */
static ari_links links_of_parts(const ari_planned *p, const ari_time_options *o, ari_over group, double world)
{
    const ar_parallel *layout = &p->step.run.parallel;
    const bool experts = ari_over_experts(group), is_uncut = experts && ari_experts_unsplit(layout);
    const double ep = experts ? ari_at_least_one(layout->ep) : 1.0;
    const double total_ranks = ranks_along(p, experts ? ari_expert_axes(layout) : ARI_CUTS_DATA);
    const double stride = is_uncut ? 1.0 : ranks_along(p, ARI_CUTS_FEATURES);
    const double replicas = ari_at_least_one(layout->dp_replicate), shard_ranks = total_ranks / ep / replicas;
    const bool copies = group == ARI_OVER_REPLICATE || group == ARI_OVER_EXPERT_REPLICATE;
    const bool shares = group == ARI_OVER_SHARD || group == ARI_OVER_EXPERT_SHARD;
    const run members = group == ARI_OVER_EP          ? (run){stride, ep}
                        : copies                      ? (run){stride * ep * shard_ranks, replicas}
                        : shares                      ? (run){stride * ep, shard_ranks}
                        : group == ARI_OVER_EXPERT_CP ? (run){stride * ep, ari_expert_sequence(layout)}
                                                      : (run){stride * ep, total_ranks / ep};
    return links(o, members, (run){world, 1.0}, world);
}

/* The axes of a group are adjacent: its members are as far apart as there are ranks along the axes inside of them. */
ari_links ari_links_of(const ari_planned *p, const ari_time_options *o, ari_over group)
{
    const ari_axes axes = ari_over_axes(group);
    const double world = ranks_along(p, ARI_ALL_AXES);
    int innermost = ARI_PLACED_AXES - 1;
    if (group == ARI_OVER_COPIES)
        return links_of_copies(p, o, world);
    if (ari_over_experts(group) || group == ARI_OVER_SHARD || group == ARI_OVER_REPLICATE)
        return links_of_parts(p, o, group, world);
    while (!(axes >> innermost & 1))
        innermost--;
    const ari_axes inside = ARI_ALL_AXES & ~((2u << innermost) - 1);
    ari_links l = links(o, (run){ranks_along(p, inside), ranks_along(p, axes)}, (run){world, 1.0}, world);
    if (group == ARI_OVER_ENDS && l.ranks > 2.0) { /* only the first and the last member along the axis */
        l.ranks = 2.0;
        l.node_ranks = l.inter_node ? 1.0 : 2.0;
        l.inside = !l.inter_node;
    }
    return l;
}

/* Returns a link's rate as collectives achieve it: a fraction of the nominal rate for a known GPU. */
static ar_sim_link reached(const ari_links *l, bool inter_node)
{
    const ari_gpu *gpu = ari_time_rates(l->options).gpu;
    const ar_sim_link *link = inter_node ? &l->options->cluster.between : &l->options->cluster.inside;
    return (ar_sim_link){link->latency_s, link->bytes_per_s * (!gpu         ? 1.0
                                                               : inter_node ? gpu->inter_node
                                                                            : gpu->inside)};
}

static double seconds_over(ar_sim_link l, double bytes)
{
    return l.latency_s + bytes / l.bytes_per_s;
}

/* Returns the seconds of one ring step: the slowest link decides. */
double ari_links_send(const ari_links *l, double bytes)
{
    const double inside = l->inside ? seconds_over(reached(l, false), bytes) : 0.0;
    return l->inter_node ? fmax(inside, seconds_over(reached(l, true), bytes)) : inside;
}

static double rings_seconds(const ari_links *l, double bytes, double rings)
{
    const ar_sim_link near = reached(l, false), far = reached(l, true);
    const ari_ring_links links = {
        l->ranks, l->node_ranks, l->inter_node, {near.latency_s, near.bytes_per_s}, {far.latency_s, far.bytes_per_s}};
    return ari_gpu_rings(&links, bytes, rings);
}

/* Returns the seconds of a broadcast along a chain of small pieces: each link's latency once, and the slowest link's
 * rate. */
static double broadcast_seconds(const ari_links *l, double bytes)
{
    const ar_sim_link inside = reached(l, false), inter_node = reached(l, true);
    const double far = l->inter_node ? ceil(l->ranks / l->node_ranks) - 1.0 : 0.0, near = l->ranks - 1.0 - far;
    const double rate = l->inter_node ? inter_node.bytes_per_s : inside.bytes_per_s;
    return near * inside.latency_s + (far > 0.0 ? far * inter_node.latency_s : 0.0) + bytes / rate;
}

/* Returns the time of an all-to-all in which each member sends a message of `bytes` to every other member. Members on
 * the node with the fewest members send the most over the slower link. */
static double all_to_all(const ari_links *l, double bytes)
{
    const ar_sim_link inside = reached(l, false), inter_node = reached(l, true);
    const double local_ranks =
                     l->inter_node ? l->ranks - l->node_ranks * (ceil(l->ranks / l->node_ranks) - 1.0) : l->ranks,
                 far = l->ranks - local_ranks;
    return (l->inter_node ? inter_node.latency_s : inside.latency_s) +
           (local_ranks - 1.0) * bytes / inside.bytes_per_s + (far > 0.0 ? far * bytes / inter_node.bytes_per_s : 0.0);
}

static double ring_steps(ari_collective kind)
{
    return kind == ARI_MOVES_ALL_REDUCE ? 2.0 : 1.0;
}

double ari_links_call(const ari_links *l, ari_collective kind, double elements, double element_bytes)
{
    const double m = l->node_ranks, nodes = l->ranks / m;
    if (l->ranks <= 1.0)
        return 0.0;
    if (kind == ARI_MOVES_BROADCAST)
        return broadcast_seconds(l, elements * element_bytes);
    if (kind == ARI_MOVES_ALL_TO_ALL)
        return all_to_all(l, elements * element_bytes / (l->ranks * (l->ranks - 1.0)));
    if (kind == ARI_MOVES_MESSAGE)
        return ari_links_send(l, elements * element_bytes);
    if (ari_time_rates(l->options).gpu)
        return rings_seconds(l, elements * element_bytes, ring_steps(kind));
    if (l->options->hierarchical && l->inter_node && m > 1.0 && nodes == floor(nodes)) {
        const double inside = seconds_over(reached(l, false), ceil(elements / m) * element_bytes);
        const double inter_node = seconds_over(reached(l, true), ceil(elements / l->ranks) * element_bytes);
        return ring_steps(kind) * ((m - 1.0) * inside + (nodes - 1.0) * inter_node);
    }
    return ring_steps(kind) * (l->ranks - 1.0) * ari_links_send(l, ceil(elements / l->ranks) * element_bytes);
}

double ari_links_sent(const ari_links *l, ari_collective kind, double elements, double element_bytes)
{
    const double bytes = elements * element_bytes, share = l->ranks > 1.0 ? (l->ranks - 1.0) / l->ranks : 0.0;
    if (kind == ARI_MOVES_MESSAGE)
        return bytes;
    return kind == ARI_MOVES_ALL_TO_ALL ? bytes / l->ranks : ring_steps(kind) * share * bytes;
}

/* --- tables of traffic -------------------------------------------------------------------------------------------- */

static void add_row(ari_traffic *table, const ari_traffic_row *row, double times)
{
    int i = 0;
    while (i < table->n && (table->row[i].time_kind != row->time_kind || strcmp(table->row[i].call, row->call) != 0 ||
                            table->row[i].inter_node != row->inter_node))
        i++;
    if (i == ARI_TRAFFIC_ROWS || row->calls * times == 0.0 || row->ranks <= 1.0)
        return;
    ari_traffic_row *sum = &table->row[i];
    if (i == table->n) {
        table->n++;
        *sum = (ari_traffic_row){.time_kind = row->time_kind, .call = row->call, .inter_node = row->inter_node};
    }
    sum->ranks = fmax(sum->ranks, row->ranks);
    sum->calls += times * row->calls;
    sum->bytes += times * row->bytes;
    sum->seconds += times * row->seconds;
}

void ari_traffic_count(ari_traffic *table, ari_time_kind time_kind, const ari_links *l, ari_collective kind,
                       double calls, double bytes, double seconds)
{
    static const char *const names[] = {"",           "all_reduce", "reduce_scatter", "all_gather", "broadcast",
                                        "all_to_all", "send"};
    if (table)
        add_row(table, &(ari_traffic_row){time_kind, names[kind], l->ranks, l->inter_node, calls, bytes, seconds}, 1.0);
}

void ari_traffic_add(ari_traffic *table, const ari_traffic *addend, double times)
{
    for (int i = 0; i < addend->n; i++)
        add_row(table, &addend->row[i], times);
}

/* --- kinds of time ------------------------------------------------------------------------------------------------ */

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
        sum += t->seconds[k];
    return sum;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Groups of ranks on nodes, and what a collective over one takes: the closed forms of simulated-cluster.md. */
#include <math.h>

#include "ref/core/size.h"
#include "verify/plan/time_impl.h"

/* n ranks a stride apart, of blocks of n * stride neighbours. */
typedef struct run {
    double stride, n;
} run;

/* Members of a group that share a node: those of the inner run, and of the outer one where a node has several runs. */
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
    ari_links l = {.o = o, .n = inner.n * outer.n};
    l.between = l.n > 1.0 && node > 0.0 && world > node && fmod(node, block) > 0.0;
    l.in_node = l.between ? fmin(neighbours(node, inner, outer), ceil(l.n / 2.0)) : l.n; /* one that spans two */
    l.inside = !l.between || l.in_node > 1.0;
    return l;
}

static double ranks_along(const ari_planned *p, ari_axes axes)
{
    return (double)ari_extent(&p->step.run.parallel, axes);
}

/* Links of the neighbours that hold one KV head: those that exchange heads, then those of tp. */
static ari_links links_of_copies(const ari_planned *p, const ari_time_options *o, double world)
{
    const double tp = ranks_along(p, ARI_CUTS_FEATURES), inner = ranks_along(p, 1u << ARI_AXIS_INNER);
    const double kv = (double)p->step.config->kv_heads, heads = tp * inner;
    const double copies = kv > 0.0 && heads > kv ? floor(heads / kv) : 1.0;
    const run exchanging = inner > 1.0 ? (run){tp, fmin(copies, inner)} : (run){world, 1.0};
    return links(o, (run){1.0, ceil(copies / inner)}, exchanging, world);
}

/* Ranks that share out what ZeRO does not keep whole are neighbours among those with the same parameters, of which a group
 * has one of each of their groups. So are expert-parallel ranks among those with data, and those of tp with experts of
 * their own; ranks with the same experts are one of each of their groups, or of those of one sequence. */
static ari_links links_of_parts(const ari_planned *p, const ari_time_options *o, ari_over g, double world)
{
    const ar_parallel *layout = &p->step.run.parallel;
    const bool experts = ari_over_experts(g), whole = experts && ari_experts_whole(layout);
    const double ep = experts ? ari_at_least_one(layout->ep) : 1.0;
    const double all = ranks_along(p, experts ? ari_expert_axes(layout) : ARI_CUTS_DATA);
    const double stride = whole ? 1.0 : ranks_along(p, ARI_CUTS_FEATURES);
    const double replicas = ari_at_least_one(layout->dp_replicate), each = all / ep / replicas;
    const bool copies = g == ARI_OVER_REPLICATE || g == ARI_OVER_EXPERT_REPLICATE;
    const bool shares = g == ARI_OVER_SHARD || g == ARI_OVER_EXPERT_SHARD;
    const run members = g == ARI_OVER_EP          ? (run){stride, ep}
                        : copies                  ? (run){stride * ep * each, replicas}
                        : shares                  ? (run){stride * ep, each}
                        : g == ARI_OVER_EXPERT_CP ? (run){stride * ep, ari_expert_sequence(layout)}
                                                  : (run){stride * ep, all / ep};
    return links(o, members, (run){world, 1.0}, world);
}

/* The axes of a group follow each other: its members are as far apart as there are ranks along those inside of them. */
ari_links ari_links_of(const ari_planned *p, const ari_time_options *o, ari_over g)
{
    const ari_axes axes = ari_over_axes(g);
    const double world = ranks_along(p, ARI_ALL_AXES);
    int innermost = ARI_PLACED_AXES - 1;
    if (g == ARI_OVER_COPIES)
        return links_of_copies(p, o, world);
    if (ari_over_experts(g) || g == ARI_OVER_SHARD || g == ARI_OVER_REPLICATE)
        return links_of_parts(p, o, g, world);
    while (!(axes >> innermost & 1))
        innermost--;
    const ari_axes inside = ARI_ALL_AXES & ~((2u << innermost) - 1);
    ari_links l = links(o, (run){ranks_along(p, inside), ranks_along(p, axes)}, (run){world, 1.0}, world);
    if (g == ARI_OVER_ENDS && l.n > 2.0) { /* of those along the axis the first and the last */
        l.n = 2.0;
        l.in_node = l.between ? 1.0 : 2.0;
        l.inside = !l.between;
    }
    return l;
}

ari_time_kind ari_time_kind_of(ari_over g)
{
#define ARI_TIME_AXES(name, text, axes) axes,
    static const ari_axes of[ARI_TIME_KINDS] = {ARI_TIME_TABLE(ARI_TIME_AXES)};
#undef ARI_TIME_AXES
    int k = 0;
    if (g == ARI_OVER_EP)
        return ARI_TIME_EP;
    while (k + 1 < ARI_TIME_KINDS && (of[k] == 0 || ari_over_axes(g) & ~of[k]))
        k++;
    return (ari_time_kind)k;
}

/* A link as collectives find it: a known GPU's reach a share of the rate. */
static ar_sim_link reached(const ari_links *l, bool between)
{
    const ari_gpu *gpu = ari_time_rates(l->o).gpu;
    const ar_sim_link *of = between ? &l->o->cluster.between : &l->o->cluster.inside;
    return (ar_sim_link){of->latency_s, of->bytes_per_s * (!gpu ? 1.0 : between ? gpu->between : gpu->inside)};
}

static double seconds_over(ar_sim_link l, double bytes)
{
    return l.latency_s + bytes / l.bytes_per_s;
}

/* As one step of a ring: the slowest link of it decides. */
double ari_links_send(const ari_links *l, double bytes)
{
    const double inside = l->inside ? seconds_over(reached(l, false), bytes) : 0.0;
    return l->between ? fmax(inside, seconds_over(reached(l, true), bytes)) : inside;
}

static double rings_seconds(const ari_links *l, double bytes, double rings)
{
    const ar_sim_link near = reached(l, false), far = reached(l, true);
    const ari_ring_links links = {
        l->n, l->in_node, l->between, {near.latency_s, near.bytes_per_s}, {far.latency_s, far.bytes_per_s}};
    return ari_gpu_rings(&links, bytes, rings);
}

/* As a chain of small pieces: every link's latency once, and the slowest link's rate. */
static double broadcast_seconds(const ari_links *l, double bytes)
{
    const ar_sim_link inside = reached(l, false), between = reached(l, true);
    const double far = l->between ? ceil(l->n / l->in_node) - 1.0 : 0.0, near = l->n - 1.0 - far;
    const double rate = l->between ? between.bytes_per_s : inside.bytes_per_s;
    return near * inside.latency_s + (far > 0.0 ? far * between.latency_s : 0.0) + bytes / rate;
}

/* Each member sends a part to every other; a message is `bytes` long. Those on the node that has fewest send most over
 * the slower link. */
static double all_to_all(const ari_links *l, double bytes)
{
    const ar_sim_link inside = reached(l, false), between = reached(l, true);
    const double own = l->between ? l->n - l->in_node * (ceil(l->n / l->in_node) - 1.0) : l->n, far = l->n - own;
    return (l->between ? between.latency_s : inside.latency_s) + (own - 1.0) * bytes / inside.bytes_per_s +
           (far > 0.0 ? far * bytes / between.bytes_per_s : 0.0);
}

static double ring_steps(ari_call_kind kind)
{
    return kind == ARI_CALL_ALL_REDUCE ? 2.0 : 1.0;
}

double ari_links_call(const ari_links *l, ari_call_kind kind, double elements, double element_bytes)
{
    const double m = l->in_node, nodes = l->n / m;
    if (l->n <= 1.0)
        return 0.0;
    if (kind == ARI_CALL_BROADCAST)
        return broadcast_seconds(l, elements * element_bytes);
    if (kind == ARI_CALL_ALL_TO_ALL)
        return all_to_all(l, elements * element_bytes / (l->n * (l->n - 1.0)));
    if (kind == ARI_CALL_EXCHANGE)
        return ari_links_send(l, elements * element_bytes);
    if (ari_time_rates(l->o).gpu)
        return rings_seconds(l, elements * element_bytes, ring_steps(kind));
    if (l->o->hierarchical && l->between && m > 1.0 && nodes == floor(nodes)) {
        const double inside = seconds_over(reached(l, false), ceil(elements / m) * element_bytes);
        const double between = seconds_over(reached(l, true), ceil(elements / l->n) * element_bytes);
        return ring_steps(kind) * ((m - 1.0) * inside + (nodes - 1.0) * between);
    }
    return ring_steps(kind) * (l->n - 1.0) * ari_links_send(l, ceil(elements / l->n) * element_bytes);
}

double ari_links_elements(const ari_op_call *call)
{
    const double row = (double)call->row, ranks = (double)call->ranks, n = (double)call->elements;
    return row > 0.0 ? ranks * row * ceil(n / row / ranks) : n;
}

double ari_links_sent(const ari_links *l, ari_call_kind kind, double elements, double element_bytes)
{
    const double bytes = elements * element_bytes, share = l->n > 1.0 ? (l->n - 1.0) / l->n : 0.0;
    if (kind == ARI_CALL_EXCHANGE)
        return bytes;
    return kind == ARI_CALL_ALL_TO_ALL ? bytes / l->n : ring_steps(kind) * share * bytes;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* The table of GPUs. `product` and `host` were fitted to the marked rows of planner-runs.tsv (host of H100 by the
 * median of their errors); all other values are published ones. */
#include "ref/core/gpu.h"

#include <math.h>
#include <stddef.h>

/* Sources. peak, sms: data sheets. memory: 0.85 of the data sheet's rate (2.04, 3.35, 4.8, 8 TB/s), which copies
 * achieve (BabelStream). scores, half: A100 by figures 5 and 6 of Dao 2023 (arXiv:2307.08691); H100 and H200 by figures
 * 5 and 6 of Shah et al. 2024 (arXiv:2407.08608), whose abstract states FlashAttention-2's 35 % on H100 (older); B200
 * by the same fraction of its peak. inside: NCCL's bus bandwidth of large all-gathers over NVLink and InfiniBand
 * (nccl-tests), relative to the links' rates. taken: NCCL's 16 to 24 channels, one SM each. */
static const ari_gpu gpus[] = {
    {312e12, 0.80, 108, 1.73e12, {195e12, 178e12}, INFINITY, {400, 800}, 0.77, 0.90, 0.15, 1.07},    /* a100 */
    {989e12, 0.72, 132, 2.85e12, {640e12, 550e12}, 346e12, {700, 900}, 0.80, 0.92, 0.12, 1.19},      /* h100 */
    {989e12, 0.72, 132, 4.08e12, {640e12, 550e12}, 346e12, {700, 900}, 0.80, 0.92, 0.12, 1.19},      /* h200 */
    {2250e12, 0.72, 148, 6.80e12, {1450e12, 1250e12}, INFINITY, {700, 900}, 0.80, 0.92, 0.11, 1.19}, /* b200 */
    {2500e12, 0.72, 152, 6.80e12, {1610e12, 1390e12}, INFINITY, {700, 900}, 0.80, 0.92, 0.11, 1.19}, /* gb200-nvl72 */
};

/* Seconds of a kernel's launch with its first and last memory accesses, and of a tile's fill and drain. */
static const double LAUNCH = 4e-6, TILE = 1.5e-6;
static const double MOST_PARTS = 8.0, SHORTEST_SUM = 1024.0; /* maximum number of parts into which a tile's sum is
                                                                divided; minimum number of terms in a part */
static const double VALUE = 2.0, SUM = 8.0;                  /* bytes of an element, and of a sum that is read and
                                                                written */

ari_rates ari_rates_of(double flops, int gpu)
{
    return (ari_rates){flops, gpu > 0 ? &gpus[gpu - 1] : NULL};
}

double ari_rates_moves(const ari_rates *r, double bytes)
{
    const ari_gpu *g = r->gpu;
    return g && bytes > 0.0 ? g->host * fmax(LAUNCH, bytes / g->memory) : 0.0;
}

double ari_rates_kernel(const ari_rates *r, ari_gpu_moves kernel_kind, bool backward, double elements)
{
    static const double bytes[ARI_GPU_MOVES][2] = {
#define ARI_GPU_MOVES_BYTES(name, forward, backward) [ARI_GPU_MOVES_##name] = {forward, backward},
        ARI_GPU_MOVES_TABLE(ARI_GPU_MOVES_BYTES)
#undef ARI_GPU_MOVES_BYTES
    };
    return ari_rates_moves(r, bytes[kernel_kind][backward] * elements);
}

/* Returns the seconds of a product by tiles of one size, in waves over the processors. Tiles with long sums can be
 * split along them to fill the last wave. Smaller tiles read more per operation. */
static double tiled(const ari_gpu *g, const ari_gpu_product *p, const double tile[3])
{
    const double tiles = p->count * ceil(p->m / tile[0]) * ceil(p->n / tile[1]);
    const double tile_time = 2.0 * tile[0] * tile[1] * p->k / (tile[2] * g->product * g->peak / g->sms);
    double min_time = INFINITY;
    for (double parts = 1.0; parts <= fmax(1.0, fmin(MOST_PARTS, p->k / SHORTEST_SUM)); parts *= 2.0)
        min_time = fmin(min_time, ceil(tiles * parts / g->sms) * (TILE + tile_time / parts));
    return min_time;
}

double ari_rates_product(const ari_rates *r, const ari_gpu_product *p)
{
    const ari_gpu *g = r->gpu;
    static const double tile[][3] = {{128, 256, 1.0}, {256, 128, 1.0}, {128, 128, 0.9}, {64, 128, 0.7}, {128, 64, 0.7}};
    const double flops = 2.0 * p->count * p->m * p->n * p->k;
    if (!g || flops == 0.0)
        return flops / r->flops;
    const double bytes = p->count * (VALUE * p->k * (p->m + p->n) + (p->accumulates ? SUM : VALUE) * p->m * p->n);
    double min_time = INFINITY;
    for (size_t i = 0; i < sizeof tile / sizeof *tile; i++)
        min_time = fmin(min_time, tiled(g, p, tile[i]));
    return g->host * fmax(LAUNCH, fmax(min_time, bytes / g->memory));
}

double ari_rates_scores(const ari_rates *r, const ari_gpu_scores *s)
{
    const ari_gpu *g = r->gpu;
    if (!g || s->flops == 0.0)
        return s->flops / r->flops;
    const double width = fmin(1.0, 0.4 + 0.6 * s->head / 128.0); /* for heads half as wide: 0.7 (from the same
                                                                    figures) */
    const double peak_rate = s->older ? fmin(g->older, g->scores[s->backward]) : g->scores[s->backward];
    const double rate = peak_rate * width * s->positions / (s->positions + g->half[s->backward]);
    return g->host * fmax(LAUNCH, s->flops / rate);
}

/* Models NCCL: each of m members in a node begins its own ring, which leaves the node by that member's port, so that
 * all ports carry data. Short all-reduces use a tree of nodes. */
double ari_gpu_rings(const ari_ring_links *l, double bytes, double rings)
{
    const double nodes = ceil(l->n / l->in_node), hops = l->is_inter_node ? nodes : 0.0;
    const double rate = l->is_inter_node ? fmin(l->in_node > 1.0 ? l->near.bytes_per_s : (double)INFINITY,
                                                l->in_node * l->far.bytes_per_s)
                                         : l->near.bytes_per_s;
    const double ring =
        rings * ((l->n - hops) * l->near.latency_s + hops * l->far.latency_s + bytes * (l->n - 1.0) / l->n / rate);
    const double tree = 2.0 * ((l->in_node - 1.0) * l->near.latency_s + log2(nodes) * l->far.latency_s + bytes / rate);
    return rings > 1.0 ? fmin(ring, tree) : ring;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* The table of GPUs. `product` and `host` were fitted to the rows of planner.tsv that say so; all else is as published. */
#include "planner/gpu.h"

#include <math.h>

/* peak, sms: data sheets. memory: of the data sheet's rate (2.04, 3.35, 4.8, 8 TB/s) the 0.85 that copies reach
 * (BabelStream). scores, half: A100 by figures 5 and 6 of Dao 2023 (arXiv:2307.08691); H100 and H200 by figures 5 and
 * 6 of Shah et al. 2024 (arXiv:2407.08608), whose abstract has FlashAttention-2's 35 % on H100 (older); B200 by that
 * share of its peak. inside: NCCL's bus bandwidth of large all-gathers over NVLink and InfiniBand (nccl-tests) over
 * the links' rates. taken: NCCL's 16 to 24 channels, one SM each. */
static const ari_gpu gpus[] = {
    {312e12, 0.80, 108, 1.73e12, {195e12, 178e12}, INFINITY, {400, 800}, 0.77, 0.90, 0.15, 1.07},    /* a100 */
    {989e12, 0.72, 132, 2.85e12, {640e12, 550e12}, 346e12, {700, 900}, 0.80, 0.92, 0.12, 1.14},      /* h100 */
    {989e12, 0.72, 132, 4.08e12, {640e12, 550e12}, 346e12, {700, 900}, 0.80, 0.92, 0.12, 1.14},      /* h200 */
    {2250e12, 0.72, 148, 6.80e12, {1450e12, 1250e12}, INFINITY, {700, 900}, 0.80, 0.92, 0.11, 1.14}, /* b200 */
    {2500e12, 0.72, 152, 6.80e12, {1610e12, 1390e12}, INFINITY, {700, 900}, 0.80, 0.92, 0.11, 1.14}, /* gb200-nvl72 */
};

/* A kernel's start and its first and last accesses to memory; a tile's fill and drain. */
static const double LAUNCH = 4e-6, TILE = 1.5e-6;
static const double MOST_PARTS = 8.0, SHORTEST_SUM = 1024.0; /* into which a tile's sum is divided; terms of a part */
static const double VALUE = 2.0, SUM = 8.0;                  /* bytes of an element; of a sum, read and written */

const ari_gpu *ari_gpu_of(const ari_time_options *o)
{
    const int gpu = o->cluster.gpu;
    return o->cost_model == ARI_COST_PRODUCTION && gpu > 0 ? &gpus[gpu - 1] : NULL;
}

double ari_gpu_moves_seconds(const ari_gpu *g, double bytes)
{
    return bytes > 0.0 ? g->host * fmax(LAUNCH, bytes / g->memory) : 0.0;
}

/* By tiles of a size, in waves over the processors; tiles whose sums are long can be divided along them, so that the last
 * wave is full. Smaller tiles read more for each operation. */
static double tiled(const ari_gpu *g, const ari_gpu_product *p, const double tile[3])
{
    const double tiles = p->count * ceil(p->m / tile[0]) * ceil(p->n / tile[1]);
    const double each = 2.0 * tile[0] * tile[1] * p->k / (tile[2] * g->product * g->peak / g->sms);
    double best = INFINITY;
    for (double parts = 1.0; parts <= fmax(1.0, fmin(MOST_PARTS, p->k / SHORTEST_SUM)); parts *= 2.0)
        best = fmin(best, ceil(tiles * parts / g->sms) * (TILE + each / parts));
    return best;
}

double ari_gpu_product_seconds(const ari_gpu *g, const ari_gpu_product *p)
{
    static const double tile[][3] = {{128, 256, 1.0}, {256, 128, 1.0}, {128, 128, 0.9}, {64, 128, 0.7}, {128, 64, 0.7}};
    const double bytes = p->count * (VALUE * p->k * (p->m + p->n) + (p->accumulates ? SUM : VALUE) * p->m * p->n);
    double best = INFINITY;
    for (size_t i = 0; i < sizeof tile / sizeof *tile; i++)
        best = fmin(best, tiled(g, p, tile[i]));
    return g->host * fmax(LAUNCH, fmax(best, bytes / g->memory));
}

double ari_gpu_scores_seconds(const ari_gpu *g, bool older, double flops, double positions, double head, bool backward)
{
    const double width = fmin(1.0, 0.4 + 0.6 * head / 128.0); /* half as wide: 0.7 (the same figures) */
    const double most = older ? fmin(g->older, g->scores[backward]) : g->scores[backward];
    const double rate = most * width * positions / (positions + g->half[backward]);
    return g->host * fmax(LAUNCH, flops / rate);
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of a norm with another mean or variance than the reference's. */
#include "verify/diagnose/hypothesis.h"

/* --- a norm's mean and variance ----------------------------------------------------------------------------------- */

typedef struct lines {
    bool possible, moved; /* moved: some row is not a mere multiple */
    size_t n;             /* rows */
    double low, high;     /* slopes */
} lines;

/* Relative tolerance of squares in fp32, with a margin. */
static const double rounding = 1e-10;

/* Fits value = slope * reference + shift. The residual must be small compared to the difference, not to the values: a
 * bias that is added after the stretching leaves that much. */
static void add_line(lines *l, const ari_run *run)
{
    ari_fit f = {0}, apart = {0};
    double slope, shift, mean;
    for (size_t i = 0; i < run->count; i++) {
        ari_fit_add(&f, (double)run->value[i], (double)run->ref[i], 1.0);
        ari_fit_add(&apart, (double)run->value[i] - (double)run->ref[i], 1.0, 0.0);
    }
    const double left = f.yy * ari_fit_two(&slope, &shift, &f), differ = apart.yy * ari_fit_one(&mean, &apart);
    l->possible = l->possible && slope > 0.0 && left <= 0.05 * differ + rounding * f.yy;
    l->low = l->n == 0 || slope < l->low ? slope : l->low;
    l->high = l->n == 0 || slope > l->high ? slope : l->high;
    l->moved = l->moved || ari_fit_one(&mean, &f) > rounding;
    l->n++;
}

ar_status ari_measure_statistic(ari_trace *t, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    lines l = {.possible = true};
    if (!(c->is & ARI_IS_NORM) || g->nd < 2 || g->cols < 8)
        return AR_OK;
    for (ari_run run = ari_runs_of(g); l.possible && ari_runs_next(&run);) {
        if (run.count == g->cols && ari_run_is_wrong(g, &run))
            add_line(&l, &run);
    }
    if (!l.possible || l.n == 0 || (fabs(l.low - 1.0) < ARI_KNOWN && fabs(l.high - 1.0) < ARI_KNOWN))
        return AR_OK;
    size_t padded = 1;
    while (padded < g->cols)
        padded *= 2;
    const double factor = sqrt((double)padded / (double)g->cols);
    const bool by_padding = padded > g->cols && fabs(l.low / factor - 1.0) < 0.02 && fabs(l.high / factor - 1.0) < 0.02;
    if (!l.moved && !by_padding) /* a factor for each row */
        return AR_OK;
    ARI_FINDING(t, ARI_FOUND_STATISTIC, by_padding ? ARI_IF(PADDED) : 0, {"low", .number = l.low},
                {"high", .number = l.high}, {"padded", .count = padded}, {"lanes", .count = g->cols},
                {"factor", .number = factor});
    return AR_OK;
}

/* --- a batch norm's mean and variance ----------------------------------------------------------------------------- */

/* Those of blocks of samples, such as a rank has: in each block each channel is a line, slope * reference + shift. */
typedef struct blocks {
    int dim;         /* of channels */
    size_t n, count; /* blocks, channels */
    ari_fit *fit;    /* [n][count] */
    double *slope, *shift;
} blocks;

static size_t block_of(const blocks *b, const ari_grid *g, size_t i)
{
    return ari_grid_index(g, i, 0) * b->n / g->shape[0] * b->count + ari_grid_index(g, i, b->dim);
}

static double of_block(const ari_hypothesis *h, const ari_run *run, size_t i)
{
    const blocks *b = h->of;
    const size_t k = block_of(b, run->g, run->index + i);
    return b->slope[k] * (double)run->ref[i] + b->shift[k];
}

/* True if the blocks' lines hold, and most channels have other slopes in different blocks. */
static ar_status fit_blocks(bool *held, double *low, double *high, blocks *b, const ari_case *c)
{
    const size_t n = b->n * b->count;
    size_t differ = 0;
    AR_TRY(ARI_TAKE(&b->fit, c->arena, n, c->d->name));
    AR_TRY(ARI_TAKE(&b->slope, c->arena, n, c->d->name));
    AR_TRY(ARI_TAKE(&b->shift, c->arena, n, c->d->name));
    for (size_t i = 0; i < c->count; i++)
        ari_fit_add(&b->fit[block_of(b, &c->grid, i)], (double)c->val[i], (double)c->ref[i], 1.0);
    *low = HUGE_VAL, *high = 0.0;
    for (size_t i = 0; i < n; i++) {
        ari_fit_two(&b->slope[i], &b->shift[i], &b->fit[i]);
        *low = fmin(*low, b->slope[i]), *high = fmax(*high, b->slope[i]);
        differ += fabs(b->slope[i] / b->slope[i % b->count] - 1.0) > ARI_KNOWN;
    }
    const ari_hypothesis h = {.expect = of_block, .c = c, .of = b, .factor = *high};
    *held = *low > 0.0 && 2 * differ >= n - b->count && ari_holds_all(NULL, &h);
    return AR_OK;
}

/* As many blocks as there are ranks and micro-batches, if these are known. */
ar_status ari_measure_batch_norm(ari_trace *t, const ari_case *c)
{
    enum { FEWEST = 3 }; /* elements for each of a line's two numbers */
    const ari_grid *g = &c->grid;
    const size_t samples = g->shape[0], dp = (size_t)c->facts.dp, micro = (size_t)c->facts.micro_batches;
    bool held = false;
    double low = 0.0, high = 0.0;
    blocks b = {.dim = g->nd > 1 ? 1 : 0};
    for (b.n = 2; b.dim > 0 && 2 * b.n <= samples && !held; b.n++) {
        b.count = g->shape[b.dim];
        if (samples % b.n != 0 || (dp > 0 && micro > 0 && b.n != dp && b.n != micro && b.n != dp * micro) ||
            c->count < 2 * FEWEST * b.n * b.count)
            continue;
        ARI_ARENA_SCOPE(c->arena);
        AR_TRY(fit_blocks(&held, &low, &high, &b, c));
        if (held)
            ARI_FINDING(t, ARI_FOUND_STATISTIC, ARI_IF(SAMPLES), {"blocks", .count = b.n}, {"low", .number = low},
                        {"high", .number = high});
    }
    return AR_OK;
}

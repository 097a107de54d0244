/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu/tiles/plan.h"

#include "ref/core/size.h"

/* Costs in nanoseconds for choosing between tilings. They come from the rates of one H200, or are estimates: 1.45e15
 * int8 operations a second over 132 processors with parts of 128 x 256; 4300 bytes a nanosecond from memory, where the
 * pass reads a plane and six tenths of its writing take longer than the concurrent GEMMs; 8000 from the cache. Only
 * ratios matter, and the tilings give equal bits. */
#define CALL 1500.0               /* a launch, and the idle time before the next one */
#define WAVE 1000.0               /* cost of a part's start and end */
#define TERM 6.0                  /* cost of one term of a run in a part */
#define FROM_CACHE (1.0 / 8000.0) /* a byte of a plane */
#define FROM_MEMORY (1.6 / 4300.0)
#define STATE (34.0 / 4300.0) /* an element of an accumulator, 17 bytes read and written */

/* Largest number of parts along a side of a tile: more would leave less than a part in twenty-five idle. */
#define SIDE ((size_t)24)

/* One tile. */
typedef struct extent {
    size_t matrices, rows, cols;
} extent;

static size_t parts_of(const extent *x, const ari_tile_machine *m)
{
    const size_t flat = ari_ceil_div(x->rows, m->part_rows) * ari_ceil_div(x->cols, m->part_cols);
    return ari_smaller(flat, ari_ceil_div(x->rows, m->part_cols) * ari_ceil_div(x->cols, m->part_rows));
}

static double plane_bytes(const ari_tile_work *w, const extent *x)
{
    return (double)x->matrices * (double)x->rows * (double)x->cols * (double)(w->planes * w->blocks) * 4.0;
}

/* Returns the waves of a block's products with one run each; a product of several runs takes as many times as long. */
static size_t waves_of(const ari_tile_work *w, const ari_tile_machine *m, const extent *x, bool together)
{
    const size_t parts = parts_of(x, m);
    return together ? x->matrices * ari_ceil_div(parts * w->planes, m->processors)
                    : ari_ceil_div(parts * x->matrices, m->processors) * w->runs;
}

static double time_of(const ari_tile_work *w, const ari_tile_machine *m, const extent *x, bool together)
{
    const double calls = (double)(together ? x->matrices : w->planes), bytes = plane_bytes(w, x);
    const double waves = (double)waves_of(w, m, x, together),
                 starts = together ? waves : waves / (double)w->runs * calls;
    const double products = calls * CALL + starts * WAVE + waves * (double)w->terms * TERM;
    const double rate = bytes <= (double)m->cache_bytes ? FROM_CACHE : FROM_MEMORY;
    const double state = w->one_result ? (double)(x->rows * x->cols) * STATE : 0.0;
    return (double)w->blocks * products + bytes * rate + state + CALL;
}

/* Returns the sum over all tiles; tiles at the lower and right edges and of the last matrices may be smaller. */
static double sum_over(const ari_tile_work *w, const ari_tile_machine *m, const ari_tiling *t,
                       double (*f)(const ari_tile_work *w, const ari_tile_machine *m, const extent *x, bool together))
{
    const size_t full_sizes[3] = {w->batch, w->m, w->n}, tile_sizes[3] = {t->matrices, t->rows, t->cols};
    double sum = 0.0;
    for (int corner = 0; corner < 8; corner++) {
        size_t extents[3], count = 1;
        for (int i = 0; i < 3; i++) {
            const size_t rest = full_sizes[i] % tile_sizes[i];
            extents[i] = corner >> i & 1 ? rest : tile_sizes[i];
            count *= corner >> i & 1 ? rest != 0 : full_sizes[i] / tile_sizes[i];
        }
        const extent x = {extents[0], extents[1], extents[2]};
        if (count > 0)
            sum += (double)count * f(w, m, &x, t->together);
    }
    return sum;
}

typedef struct choice {
    const ari_tile_work *w;
    const ari_tile_machine *m;
    ari_tiling tiling;
    double time;
} choice;

/* Takes a tiling, for calls of either kind, if its planes are not too large and it is the best so far. */
static void consider(choice *c, size_t matrices, size_t rows, size_t cols)
{
    const extent x = {matrices, rows, cols};
    if (plane_bytes(c->w, &x) > (double)c->m->plane_bytes)
        return;
    for (int together = 0; together <= (int)c->w->is_uniform; together++) {
        const ari_tiling t = {matrices, rows, cols, together};
        const double time = sum_over(c->w, c->m, &t, time_of);
        if (c->time >= 0.0 && time >= c->time)
            continue;
        c->tiling = t;
        c->time = time;
    }
}

/* Sets *side to the next number of parts along a side of even tiles, from the largest down; 0 before the first. Returns
 * false if there is none. */
static bool next_side(size_t *side, size_t parts)
{
    const size_t max_parts = *side == 0 ? ari_smaller(parts, SIDE) : *side - 1;
    if (max_parts == 0)
        return false;
    *side = ari_ceil_div(parts, ari_ceil_div(parts, max_parts));
    return true;
}

/* Considers tiles of rows and columns of several matrices. */
static void consider_parts(choice *c, size_t matrices)
{
    const ari_tile_work *w = c->w;
    const ari_tile_machine *m = c->m;
    for (size_t down = 0; next_side(&down, ari_ceil_div(w->m, m->part_rows));)
        for (size_t across = 0; next_side(&across, ari_ceil_div(w->n, m->part_cols));)
            consider(c, matrices, ari_smaller(w->m, down * m->part_rows), ari_smaller(w->n, across * m->part_cols));
}

ari_tiling ari_plan_tiles(const ari_tile_work *w, const ari_tile_machine *m)
{
    choice c = {.w = w, .m = m, .time = -1.0};
    size_t matrices = w->one_result ? w->batch : 1;
    for (size_t groups = 1; groups <= ari_smaller(w->batch, SIDE); groups++)
        consider(&c, ari_ceil_div(w->batch, groups), w->m, w->n);
    consider(&c, 1, w->m, w->n);
    consider_parts(&c, matrices);
    while (c.time < 0.0 && matrices > 1)
        consider_parts(&c, matrices /= 2);
    if (c.time < 0.0)
        c.tiling = (ari_tiling){1, ari_smaller(w->m, m->part_rows), ari_smaller(w->n, m->part_cols), w->is_uniform};
    return c.tiling;
}

static double room_of(const ari_tile_work *w, const ari_tile_machine *m, const extent *x, bool together)
{
    return (double)w->blocks * (double)waves_of(w, m, x, together) *
           (double)(m->processors * m->part_rows * m->part_cols);
}

double ari_tiling_share(const ari_tile_work *w, const ari_tile_machine *m, const ari_tiling *t)
{
    const double work = (double)w->batch * (double)w->m * (double)w->n * (double)(w->blocks * w->runs);
    return work / sum_over(w, m, t, room_of);
}

/* --- bands -------------------------------------------------------------------------------------------------------- */

/* Number of parts in a band of rows. */
#define BAND_PARTS ((size_t)4)
/* The rest of a part gets its own launches from this share of the result on. */
#define WORTH 0.1

/* Returns the smallest extent below n that contains the extents of all rows [p->row, p->row + p->rows). */
static void hull_of(size_t edge[2], const ari_tile_part *p, const ar_band *band, size_t n)
{
    size_t begin = n, end = 0;
    for (size_t i = 0; i < ari_smaller(p->rows, band->rows); i++) {
        const int32_t *edges = band->edges + 2 * ((p->row + i) % band->rows);
        const size_t row_begin = edges[0] > 0 ? (size_t)edges[0] : 0,
                     row_end = edges[1] > 0 ? ari_smaller((size_t)edges[1], n) : 0;
        if (row_begin >= row_end)
            continue;
        begin = ari_smaller(begin, row_begin);
        end = end > row_end ? end : row_end;
    }
    edge[0] = ari_smaller(begin, end) / 16 * 16;
    edge[1] = end;
}

/* Sets the nonzero part of p, whose rows are given. */
static void fill_part(ari_tile_part *p, const ari_tile_work *w, const ar_band *band)
{
    size_t edge[2] = {0, 0};
    p->col = p->term = 0;
    p->cols = w->n;
    p->terms = w->terms;
    if (band && band->of_terms) {
        hull_of(edge, p, band, w->terms);
        p->term = edge[0];
        p->terms = edge[1] > edge[0] ? ari_round_up(edge[1] - edge[0], 16) : ari_smaller(w->terms, 16);
    } else if (band) {
        hull_of(edge, p, band, w->n);
        p->col = edge[0];
        p->cols = ari_smaller(ari_round_up(edge[1] - edge[0], 4), w->n - edge[0]);
    }
}

/* Rows of a part. */
static size_t part_height(const ari_tile_work *w, const ari_tile_machine *m, const ar_band *band)
{
    const size_t height = ari_round_up(ari_ceil_div(band->rows, BAND_PARTS), m->part_rows);
    double remaining = 0.0;
    for (ari_tile_part p = {0}; p.row < w->m; p.row += height) {
        p.rows = ari_smaller(height, w->m - p.row);
        fill_part(&p, w, band);
        remaining += (double)p.rows * ((double)p.cols / (double)w->n) * ((double)p.terms / (double)w->terms);
    }
    return remaining > (1.0 - WORTH) * (double)w->m ? w->m : height;
}

bool ari_band_next(ari_tile_part *p, const ari_tile_work *w, const ari_tile_machine *m, const ar_band *band)
{
    const bool has_band =
        band && band->rows > 0 && w->terms > 0 && (!band->of_terms || (w->is_uniform && w->blocks == 1));
    const size_t height = has_band ? part_height(w, m, band) : w->m;
    do {
        p->row += p->rows;
        p->rows = ari_smaller(height, w->m - p->row);
        if (p->rows == 0)
            return false;
        fill_part(p, w, height < w->m ? band : NULL);
    } while (p->cols == 0); /* these rows have no nonzero part */
    return true;
}

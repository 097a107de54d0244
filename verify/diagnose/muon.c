/* SPDX-License-Identifier: Apache-2.0 */
/* A matrix's update under Muon: of what parts of it the other run has made orthogonal matrices, in place of the
 * reference's. Both are computed from the reference's momentum and gradient, in binary64. */
#include "verify/diagnose/hypothesis.h"
#include "verify/dump/dump_private.h"

enum { MOST_PARTS = 16, MOST_BLOCKS = 3, LEAST_VECTOR = 8 };
/* Products of one iteration; a larger matrix is not looked at. */
static const double MOST_WORK = 0x1p25;
/* A number of rows from two fitted rates, which fp32 weights round to 1e-6. */
static const double NEAR_ROWS = 1e-2;

typedef struct look {
    size_t rows, cols;
    const double *u; /* [rows, cols]: the direction */
    double *x;       /* of the same shape: what is made of it */
    double *room;    /* [4, rows, cols], of squares as well */
    float *now;      /* the other's new weights */
    double rate;     /* of the reference, and of what last fitted */
    bool rms;        /* the rate of match_rms_adamw */
    bool across;     /* stored [in, out] */
} look;

/* Rows [row, row + rows) and columns [col, col + cols). */
typedef struct part {
    size_t row, rows, col, cols;
} part;

static double size_of(const look *l, const part *p)
{
    double sum = 0.0;
    for (size_t i = p->row; i < p->row + p->rows; i++)
        for (size_t k = p->col; k < p->col + p->cols; k++)
            sum += l->u[i * l->cols + k] * l->u[i * l->cols + k];
    return sqrt(sum);
}

/* c [m, n] = a [m, k] times b [k, n]; turned: b is [n, k]. */
static void multiply(double *c, const double *a, const double *b, size_t m, size_t n, size_t k, bool turned)
{
    memset(c, 0, m * n * sizeof *c);
    for (size_t i = 0; i < m; i++)
        for (size_t t = 0; t < (turned ? n : k); t++)
            for (size_t j = 0; j < (turned ? k : n); j++)
                c[turned ? i * n + t : i * n + j] += turned ? a[i * k + j] * b[t * k + j] : a[i * k + t] * b[t * n + j];
}

/* One iteration of x [m, n]; room: [3, all], all at least m*n and m*m. */
static void iterate(double *x, size_t m, size_t n, double *room, size_t all)
{
    double *gram = room, *square = gram + all, *product = square + all;
    multiply(gram, x, x, m, m, n, true);
    multiply(square, gram, gram, m, m, m, false);
    for (size_t i = 0; i < m * m; i++)
        gram[i] = -4.775 * gram[i] + 2.0315 * square[i];
    multiply(product, gram, x, m, n, m, false);
    for (size_t i = 0; i < m * n; i++)
        x[i] = 3.4445 * x[i] + product[i];
}

/* The same of each of `of` shards of the columns by itself: of the shard's own X X^T. */
static void iterate_shards(double *x, size_t m, size_t n, double *room, size_t all, size_t of)
{
    const size_t each = n / of;
    double *own = room + 2 * all + m * each; /* behind the shard's product */
    for (size_t at = 0; at < of; at++) {
        for (size_t i = 0; i < m; i++)
            memcpy(own + i * each, x + i * n + at * each, each * sizeof *x);
        iterate(own, m, each, room, all);
        for (size_t i = 0; i < m; i++)
            memcpy(x + i * n + at * each, own + i * each, each * sizeof *x);
    }
}

/* Newton-Schulz of a part, divided by `norm` first (0: its own), and times the rate of its shape. The last iteration is
 * that of `of` shards of the longer side, of a square those of its columns or its rows. */
static void orthogonalise(const look *l, const part *p, double norm, size_t of, bool columns)
{
    const bool tall = p->rows > p->cols || (p->rows == p->cols && !columns);
    const size_t m = tall ? p->cols : p->rows, n = tall ? p->rows : p->cols, all = l->rows * l->cols;
    double *x = l->room;
    const double by = norm > 0.0 ? norm : fmax(size_of(l, p), 1e-7), r = (double)(l->across ? p->cols : p->rows);
    const double c = (double)(l->across ? p->rows : p->cols);
    const double rate = l->rms ? sqrt(fmax(r, c)) : sqrt(fmax(1.0, r / c));
    for (size_t i = 0; i < m * n; i++)
        x[i] = l->u[(p->row + (tall ? i % n : i / n)) * l->cols + p->col + (tall ? i / n : i % n)] / by;
    for (int step = 0; step < 5; step++) {
        if (step == 4 && of > 1)
            iterate_shards(x, m, n, x + all, all, of);
        else
            iterate(x, m, n, x + all, all);
    }
    for (size_t i = 0; i < m * n; i++)
        l->x[(p->row + (tall ? i % n : i / n)) * l->cols + p->col + (tall ? i / n : i % n)] = rate * x[i];
}

/* --- what may have been made orthogonal --------------------------------------------------------------------------- */

typedef struct form {
    size_t blocks, block[MOST_BLOCKS]; /* matrices side by side: q | k | v, gate | up */
    bool across;                       /* along the columns: stored [in, out] */
} form;

/* Block b of a form, or shard `at` of `of` of it along the rows or the columns. */
static part part_of(const look *l, const form *f, size_t b, size_t at, size_t of, bool columns)
{
    part p = {0, l->rows, 0, l->cols};
    size_t *const start = f->across ? &p.col : &p.row, *const extent = f->across ? &p.cols : &p.rows;
    for (size_t i = 0; i < b; i++)
        *start += f->block[i];
    *extent = f->block[b];
    size_t *const from = columns ? &p.col : &p.row, *const n = columns ? &p.cols : &p.rows;
    *n /= of;
    *from += at * *n;
    return p;
}

/* Each shard of each block by itself. */
static void make_shards(const look *l, const form *f, size_t of, bool columns)
{
    for (size_t i = 0; i < f->blocks * of; i++) {
        const part p = part_of(l, f, i / of, i % of, of, columns);
        orthogonalise(l, &p, 0.0, 1, true);
    }
}

/* Each block as a whole, but the last X X^T of each shard of its longer side by itself. False: one is cut otherwise. */
static bool make_by_grams(const look *l, const form *f, size_t of, bool columns)
{
    for (size_t b = 0; b < f->blocks; b++) {
        const part p = part_of(l, f, b, 0, 1, columns);
        if (columns ? p.rows > p.cols : p.cols > p.rows)
            return false;
        orthogonalise(l, &p, 0.0, of, columns);
    }
    return true;
}

/* Each block as a whole, but every shard's owner divides by the norm of its shard. `kept`: what others made. */
static void make_by_norms(const look *l, const form *f, size_t of, bool columns, double *kept)
{
    for (size_t at = 0; at < of; at++) {
        double norm = 0.0;
        for (size_t b = 0; b < f->blocks; b++) {
            const part p = part_of(l, f, b, at, of, columns);
            norm = hypot(norm, size_of(l, &p));
        }
        for (size_t b = 0; b < f->blocks; b++) {
            const part whole = part_of(l, f, b, 0, 1, columns), p = part_of(l, f, b, at, of, columns);
            orthogonalise(l, &whole, norm, 1, true);
            for (size_t row = p.row; row < p.row + p.rows; row++)
                memcpy(kept + row * l->cols + p.col, l->x + row * l->cols + p.col, p.cols * sizeof *kept);
        }
    }
    memcpy(l->x, kept, l->rows * l->cols * sizeof *kept);
}

static bool divides(const look *l, const form *f, size_t of, bool columns)
{
    bool fits = (columns ? l->cols : l->rows) % of == 0;
    for (size_t b = 0; b < f->blocks && columns == f->across; b++)
        fits = fits && f->block[b] % of == 0 && f->block[b] >= of;
    return fits;
}

/* --- fits --------------------------------------------------------------------------------------------------------- */

/* True if what a dump's weights have lost is x times a number, and a part of the weights. */
static bool fits(look *l, const ari_case *c, const float *now)
{
    ari_fit f = {0};
    double decay;
    for (size_t i = 0; i < c->grid.count; i++)
        ari_fit_add(&f, (double)c->d->before[i] - (double)now[i], l->x[i], (double)c->d->before[i]);
    return ari_fit_two(&l->rate, &decay, &f) < ARI_UNFITTED && l->rate > 0.0;
}

/* The direction from the reference's tensors: m = p g + q m0 says how both add up, u = q m + p g. */
static ar_status find_direction(double *u, bool *found, const ari_case *c)
{
    const ari_difference *d = c->d;
    const char *stem = d->name;
    const ar_dump *from = c->known->reference;
    const size_t length = strlen(stem);
    const ar_dump_tensor *const tensor[3] = {
        ari_tensor_of_step(from, stem, length, "m", d->step), ari_tensor_of_step(from, stem, length, "grad", d->step),
        d->step > 1 ? ari_tensor_of_step(from, stem, length, "m", d->step - 1) : NULL};
    ari_fit f = {0};
    double p = 0.0, q = 0.0, *kept = NULL;
    *found = false;
    if (!tensor[0] || !tensor[1] || tensor[0]->count != c->grid.count || tensor[1]->count != c->grid.count ||
        (d->step > 1 && (!tensor[2] || tensor[2]->count != c->grid.count)))
        return AR_OK;
    AR_TRY(ARI_TAKE(&kept, c->arena, 3 * c->grid.count, "Muon's momentum"));
    for (int i = 0; i < 3; i++) {
        if (tensor[i])
            AR_TRY(ari_dump_read_f64(tensor[i], 0, c->grid.count, kept + (size_t)i * c->grid.count));
    }
    const double *m = kept, *g = m + c->grid.count, *m0 = g + c->grid.count;
    for (size_t i = 0; i < c->grid.count; i++)
        ari_fit_add(&f, m[i], g[i], m0[i]);
    *found = ari_fit_two(&p, &q, &f) < ARI_FIT;
    for (size_t i = 0; i < c->grid.count; i++)
        u[i] = d->step > 1 ? q * m[i] + p * g[i] : g[i];
    return AR_OK;
}

/* Finds the reference's form and rate among those that there may be. */
static bool find_form(look *l, form *found, const ari_case *c)
{
    const size_t h = c->facts.heads, kv = c->facts.kv_heads, all = h + 2 * kv;
    for (int i = 0; i < 8; i++) {
        const bool across = i % 2 == 1;
        const size_t n = across ? l->cols : l->rows, each = all > 0 ? n / all : 0;
        const form forms[] = {{1, {n}, across},
                              {2, {n / 2, n - n / 2}, across},
                              {3, {n / 3, n / 3, n - n / 3 * 2}, across},
                              {3, {each * h, each * kv, each * kv}, across}};
        const form *f = &forms[i / 2];
        if ((i == 1) || (i / 2 == 1 && n % 2) || (i / 2 == 2 && n % 3) ||
            (i / 2 == 3 && (each == 0 || n % all || h == kv)))
            continue;
        for (int rms = 0; rms < 2; rms++) {
            l->rms = rms == 1;
            l->across = across;
            make_shards(l, f, 1, false);
            if (fits(l, c, c->d->reference)) {
                *found = *f;
                return true;
            }
        }
    }
    return false;
}

static void state(ari_trace *t, ari_properties flags, size_t parts, bool columns)
{
    ARI_FINDING(t, ARI_FOUND_MUON, flags, {"parts", .count = parts}, {"along", .text = columns ? "columns" : "rows"});
}

/* Every part takes what its neighbour has. */
static void turn(const look *l, double *kept, size_t by, bool columns)
{
    for (size_t i = 0; i < l->rows; i++)
        for (size_t k = 0; k < l->cols; k++)
            kept[i * l->cols + k] =
                columns ? l->x[i * l->cols + (k + by) % l->cols] : l->x[(i + by) % l->rows * l->cols + k];
    memcpy(l->x, kept, l->rows * l->cols * sizeof *kept);
}

/* True if the parts of one matrix are those of other places. */
static bool find_turned(ari_trace *t, look *l, const form *f, const ari_case *c, double *kept)
{
    make_shards(l, f, 1, false);
    for (int columns = 0; columns < 2; columns++)
        for (size_t of = 2; of <= MOST_PARTS; of++) {
            const size_t n = columns ? l->cols : l->rows;
            for (size_t i = 0; i < of && n % of == 0; i++) {
                turn(l, kept, n / of, columns);
                if (i + 1 < of && fits(l, c, l->now)) {
                    state(t, ARI_IF(EXCHANGED), of, columns);
                    return true;
                }
            }
        }
    return false;
}

/* True if the update is as large as a matrix with some rows more has it, outputs of nothing. */
static bool find_padded(ari_trace *t, look *l, const form *f, const ari_case *c)
{
    const double right = l->rate, cols = (double)(f->across ? l->rows : l->cols), rows = (double)f->block[0];
    make_shards(l, f, 1, false);
    const bool fit = fits(l, c, l->now);
    const double counted = l->rate / right * (l->rate / right) * fmax(rows, cols), whole = round(counted);
    if (!fit || !(whole > fmax(rows, cols) && whole <= 2.0 * rows) || fabs(counted - whole) > NEAR_ROWS)
        return false;
    ARI_FINDING(t, ARI_FOUND_MUON, ARI_IF(PADDED), {"padded", .count = (size_t)whole}, {"rows", .count = f->block[0]});
    return true;
}

static void find_other(ari_trace *t, look *l, const form *f, const ari_case *c, double *kept)
{
    const form one = {1, {l->rows}, false};
    if (find_padded(t, l, f, c))
        return;
    if (f->blocks == 1 && find_turned(t, l, f, c, kept))
        return;
    if (f->blocks > 1) {
        make_shards(l, &one, 1, false);
        if (fits(l, c, l->now)) {
            state(t, ARI_IF(PACKED), f->blocks, f->across);
            return;
        }
    }
    for (size_t of = 2; of <= MOST_PARTS && f->blocks > 1; of++) {
        form stale = *f;
        for (size_t b = 0; b + 1 < f->blocks; b++) {
            stale.block[b] = f->block[b] / of;
            stale.block[f->blocks - 1] += f->block[b] - stale.block[b];
        }
        if (!divides(l, f, of, f->across))
            continue;
        make_shards(l, &stale, 1, false);
        if (fits(l, c, l->now)) {
            state(t, ARI_IF(HEADS), of, f->across);
            return;
        }
    }
    for (size_t of = 2; of <= MOST_PARTS; of++)
        for (int k = 0; k < (f->blocks > 1 ? 12 : 6); k++) {
            static const ari_properties kinds[] = {ARI_IF(OF_SHARDS), ARI_IF(SOME), ARI_IF(LAST)};
            const bool columns = k % 2 == 1;
            const int kind = k / 2 % 3;
            bool made = divides(l, f, of, columns);
            l->rms = k / 6 == 1;
            if (made && kind == 0)
                make_shards(l, f, of, columns);
            else if (made && kind == 1)
                make_by_norms(l, f, of, columns, kept);
            else if (made)
                made = make_by_grams(l, f, of, columns);
            if (!made || !fits(l, c, l->now))
                continue;
            state(t, kinds[kind], of, columns);
            return;
        }
}

/* --- QK-Clip ------------------------------------------------------------------------------------------------------ */

/* Each row of queries or keys is the reference's times a number, and these are the ranks' own; where ranks update shares
 * of the weights and gather them, the heads'. */
static bool find_clipped(ari_trace *t, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    const ari_role role = ari_module_of(g->d->name, ari_order_of(g->d->name, NULL).stem).role;
    size_t scaled = 0, row = SIZE_MAX;
    double factor = 1.0, least = HUGE_VAL, most = 0.0;
    if (g->nd != 2 || (role != ARI_Q && role != ARI_K))
        return false;
    for (ari_run run = ari_runs_of(g); ari_runs_next(&run);)
        for (size_t i = 0; i < run.count; i++) {
            const double ref = (double)run.ref[i], value = (double)run.value[i];
            if (i == 0 || (run.index + i) / g->cols != row)
                factor = value / ref;
            row = (run.index + i) / g->cols;
            scaled += fabs(factor - 1.0) > ARI_FIT;
            least = fmin(least, factor);
            most = fmax(most, factor);
            if (!(fabs(value - factor * ref) <= ARI_FIT * fabs(value)))
                return false;
        }
    const bool found = scaled > 0 && (c->survey.disagree > 0 || most - least > ARI_FIT);
    if (found)
        ari_trace_set(t, ARI_FOUND_MUON, ARI_IF(ROWS));
    return found;
}

ar_status ari_measure_muon(ari_trace *t, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    if (!c->step && find_clipped(t, c))
        return AR_OK;
    const double small = fmin((double)g->rows, (double)g->cols), large = fmax((double)g->rows, (double)g->cols);
    look l = {.rows = g->rows, .cols = g->cols};
    form f = {0};
    double *all = NULL;
    bool found = false;
    const bool vector = g->nd == 1 && g->count >= LEAST_VECTOR && c->d->step == 1;
    if (c->step || (!vector && (g->nd != 2 || small * small * large > MOST_WORK || small < 2.0)))
        return AR_OK;
    AR_TRY(ARI_TAKE(&all, c->arena, 8 * g->count, "Muon's update"));
    l.u = all, l.x = all + g->count, l.room = all + 2 * g->count, l.now = (float *)(all + 7 * g->count);
    for (ari_run run = ari_runs_of(g); ari_runs_next(&run);)
        memcpy(l.now + run.index, run.value, run.count * sizeof *l.now);
    AR_TRY(find_direction(all, &found, c));
    if (vector && found) { /* one row made orthogonal is itself times a number; AdamW's is not */
        memcpy(l.x, all, g->count * sizeof *all);
        if (!fits(&l, c, c->d->reference) && fits(&l, c, l.now))
            ari_trace_set(t, ARI_FOUND_MUON, ARI_IF(ONE));
    } else if (found && find_form(&l, &f, c))
        find_other(t, &l, &f, c, all + 6 * g->count);
    return AR_OK;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/core/size.h"
#include "ref/cpu/device.h"
#include "ref/cpu/gemm.h"
#include "ref/cpu/kernels.h"
#include "ref/numerics/integer_sum.h"

/* --- rounding ----------------------------------------------------------------------------------------------------- */

/* fl32(fl64(S)*2^(e+f-50)), numerics.md, "Contraction", step 5. The power of two is applied as 2^(e-50) and 2^f.
 * Exponents of fp32 values shifted by exponents of fp32 values are in -297..256 and |S| < 2^116, so both products are
 * normal in binary64 and exact, and the conversion to fp32 is the only rounding after fl64. A flag is a factor: NaN
 * makes everything NaN, also next to a zero; 0 leaves +0, because the sum of an all-zero row is +0. */

static inline double factor(int32_t f, int32_t shift)
{
    const int special = f == ARI_EXP_ZERO || f == ARI_EXP_NONFINITE;
    const double finite = ari_pow2(ari_clamp32(special ? 0 : f, -900, 900) + shift);
    const double flagged = f == ARI_EXP_NONFINITE ? (double)ari_nan32() : finite;
    return f == ARI_EXP_ZERO ? 0.0 : flagged;
}

/* Computes scale[j] = 2^f[j]; 0 for ARI_EXP_ZERO, NaN for ARI_EXP_NONFINITE. */
static ARI_SIMD void round_factors(double *restrict scale, const int32_t *restrict f, size_t n)
{
    for (size_t j = 0; j < n; j++)
        scale[j] = factor(f[j], 0);
}

/* Returns 2^(e-50), with the same two exceptions. */
static double round_row_factor(int32_t e)
{
    return factor(e, -2 * ARI_CONTRACT_BITS);
}

/* fl32 of fl64(S) times the row's and the column's power of two. */
static inline float rounded(double sum, double row, double scale)
{
    return ari_canonical32((float)(sum * row * scale));
}

/* hi*2^13 is exact, and the addition rounds once to nearest even, so the sum is fl64(S). Adding +0 first makes a zero
 * sum +0 whatever the signs of its halves. */
ARI_SIMD void ari_round_halves(float *restrict y, const double *restrict hi, const double *restrict lo, double row,
                               const double *restrict scale, size_t n)
{
    for (size_t j = 0; j < n; j++) {
        const double sum = hi[j] * 8192.0 + (lo[j] + 0.0);
        y[j] = rounded(sum, row, scale[j]);
    }
}

ARI_SIMD void ari_round_sums(float *restrict y, const int64_t *restrict s, double row, const double *restrict scale,
                             size_t n)
{
    for (size_t j = 0; j < n; j++)
        y[j] = rounded(ari_double64(s[j]), row, scale[j]);
}

/* The magic sum of ari_nearest_integer, turned round. */
ARI_SIMD void ari_round_small_sums(float *restrict y, const int64_t *restrict s, double row,
                                   const double *restrict scale, size_t n)
{
    for (size_t j = 0; j < n; j++)
        y[j] = rounded(ari_float64((uint64_t)s[j] + ARI_ROUND_MAGIC_BITS) - ARI_ROUND_MAGIC, row, scale[j]);
}

ARI_SIMD void ari_halves_to_int64(int64_t *restrict s, const double *restrict hi, const double *restrict lo, bool add,
                                  size_t n)
{
    for (size_t j = 0; j < n; j++) {
        const uint64_t sum = (uint64_t)(int64_t)hi[j] * 8192u + (uint64_t)(int64_t)lo[j];
        s[j] = (int64_t)((add ? (uint64_t)s[j] : 0u) + sum);
    }
}

/* S = (hi >> 19)*2^32 + rest with rest = (hi mod 2^19)*2^13 + lo and |rest| < 2^54. */
ARI_SIMD void ari_halves_to_limbs(int64_t *restrict s, const double *restrict hi, const double *restrict lo, bool add,
                                  size_t n)
{
    for (size_t j = 0; j < n; j++) {
        const int64_t h = (int64_t)hi[j];
        const int64_t low_bits = h & 0x7ffff;
        const int64_t rest = low_bits * 8192 + (int64_t)lo[j];
        const int64_t rest_low = rest & 0xffffffff;
        const int64_t high = (h - low_bits) / 524288 + (rest - rest_low) / 4294967296;
        s[2 * j] = ari_add64(add ? s[2 * j] : 0, high);
        s[2 * j + 1] = ari_add64(add ? s[2 * j + 1] : 0, rest_low);
    }
}

ARI_SIMD void ari_sums_to_limbs(int64_t *restrict s, const int64_t *restrict sums, bool add, size_t n)
{
    for (size_t j = 0; j < n; j++) {
        const int64_t low = sums[j] & 0xffffffff;
        const int64_t high = (sums[j] - low) / 4294967296; /* the division leaves no remainder */
        s[2 * j] = ari_add64(add ? s[2 * j] : 0, high);
        s[2 * j + 1] = ari_add64(add ? s[2 * j + 1] : 0, low);
    }
}

/* number of columns whose factors are computed at a time */
#define COLUMNS ((size_t)2048)

/* Sums from other ranks may not be 0 where a flag says so: a product with 0 is +0 or -0, and adding +0 makes it +0 and
 * leaves all other values unchanged. */
ARI_SIMD static void round_run(float *restrict y, const int64_t *restrict s, double row, const double *restrict scale,
                               size_t n)
{
    for (size_t j = 0; j < n; j++)
        y[j] = ari_canonical32((float)(ari_double64(s[j]) * (row * scale[j]) + 0.0));
}

/* The elements [start, start + count) of a matrix of n columns. */
typedef struct round_job {
    float *y;
    const int64_t *s;
    int limbs;
    size_t start, count, n;
    const int32_t *e, *f;
} round_job;

/* Rounds the sums in columns [col_begin, col_end) of row i. */
static void round_piece(const round_job *r, size_t i, size_t col_begin, size_t col_end, const double *scale)
{
    const size_t begin = i * r->n + col_begin < r->start ? r->start - i * r->n : col_begin;
    const size_t run_end = r->start + r->count - i * r->n, end = run_end < col_end ? run_end : col_end;
    if (begin >= end)
        return;
    float *y = r->y + (i * r->n + begin - r->start);
    const int64_t *s = r->s + (i * r->n + begin - r->start) * (size_t)r->limbs;
    if (r->limbs == 1)
        round_run(y, s, round_row_factor(r->e[i]), scale + (begin - col_begin), end - begin);
    for (size_t j = 0; r->limbs == 2 && j < end - begin; j++)
        y[j] = ari_contract_value2(s[2 * j], s[2 * j + 1], r->e[i], r->f[begin + j]);
}

/** Implements slot round_i64. Errors: none. */
ar_status ari_cpu_round_i64(ar_device *d, ARI_AT_ONCE, ar_buf y, ar_cbuf s, int limbs, size_t start, size_t count,
                            size_t n, ar_cbuf e, ar_cbuf f)
{
    enum { ROWS = 16 };
    if (count == 0 || n == 0)
        return AR_OK;
    const round_job r = {y.ptr, s.ptr, limbs, start, count, n, e.ptr, f.ptr};
    const size_t first_row = start / n, rows = (start + count - 1) / n - first_row + 1;
    const size_t down = (rows + ROWS - 1) / ROWS, across = (n + COLUMNS - 1) / COLUMNS;
    ARI_PARALLEL_FOR (t, down * across, d, count) {
        double scale[COLUMNS];
        const size_t col_begin = t % across * COLUMNS, col_end = n - col_begin < COLUMNS ? n : col_begin + COLUMNS;
        const size_t top = t / across * ROWS, block_rows = rows - top < ROWS ? rows - top : ROWS;
        round_factors(scale, r.f + col_begin, col_end - col_begin);
        for (size_t i = first_row + top; i < first_row + top + block_rows; i++)
            round_piece(&r, i, col_begin, col_end, scale);
    }
    return AR_OK;
}

/* --- gemm exact --------------------------------------------------------------------------------------------------- */

/* Slots of the exact contraction: the part that all paths share (gemm.h). Rounding, bias and activation read a tile
 * once, while it is in the cache. */

/* Returns the size of a part when n is split into `parts` nearly equal parts, a multiple of `step` if there are
 * several. */
static size_t part_extent(size_t n, size_t parts, size_t step)
{
    return parts <= 1 ? n : ari_round_up(ari_ceil_div(n, parts), step);
}

/* Requirements of a job over tiles on their plan. */
typedef struct tile_request {
    size_t matrices; /* number of results: one per batch element, or one for all products */
    size_t products; /* number of products: matrices of a batch, or ranges of terms */
    size_t k;        /* terms of the longest product */
    size_t terms;    /* the longest sum between two flushes */
    size_t values;   /* products whose rounded values have memory next to the sums: 0, or those with terms */
    bool direct;     /* true if sums are complete when they have been computed, so that they may be rounded at once */
    const ar_runs *runs;
} tile_request;

/* Returns the operand of one product. */
static ar_packed product_of(const ar_packed *p, const ar_runs *runs, size_t number)
{
    ar_packed operand = *p;
    operand.batch = 1;
    operand.q = ari_packed_at(p, runs ? 0 : number, 0, runs ? runs->first + runs->cut[number] : 0);
    operand.k = runs ? runs->cut[number + 1] - runs->cut[number] : p->k;
    return operand;
}

/* Returns true if some threads would be idle while others compute the last of `tiles` tiles. With four tiles per thread
 * that is at most a fifth of the time. */
static bool leaves_threads_idle(size_t tiles, size_t threads)
{
    return tiles < 4 * threads && tiles % threads != 0;
}

/* Returns the number of column factors, padded to whole panels. */
static size_t scales_of(const ari_exact_path *path, const ari_tile_plan *p)
{
    return ari_round_up(p->tile_cols, path->col_step);
}

/* Returns how many rows of rounded values are kept for an accumulated product: all if they come at once. */
static size_t kept_rows(const ari_tile_plan *p, size_t rows)
{
    return p->direct ? rows : 1;
}

static ari_tile_plan plan_tiles(const ari_exact_path *path, const ar_device *d, const ar_packed *a, const ar_packed *b,
                                const tile_request *r)
{
    ari_tile_plan p = {.down = ari_ceil_div(a->rows, path->rows),
                       .across = ari_ceil_div(b->rows, path->cols),
                       .narrow = a->narrow,
                       .direct = r->direct};
    /* Few tiles are cut further until every thread has as many, though never below 32 rows or columns. */
    while (leaves_threads_idle(r->matrices * p.down * p.across, (size_t)d->threads)) {
        const size_t rows = a->rows / p.down, cols = b->rows / p.across;
        if (rows < 64 && cols < 64)
            break;
        if (rows >= cols)
            p.down++;
        else
            p.across++;
    }
    p.tile_rows = part_extent(a->rows, p.down, 8);
    p.tile_cols = part_extent(b->rows, p.across, path->col_step);
    p.down = ari_ceil_div(a->rows, p.tile_rows);
    p.across = ari_ceil_div(b->rows, p.tile_cols);
    path->plan(&p, r->k);
    p.panels = ari_ceil_div(b->rows, path->col_step);
    p.wide = r->terms < r->k ? 2 * p.tile_rows * p.tile_cols : 0;
    if (r->values > 0)
        p.row = ari_ceil_div(p.tile_cols * (kept_rows(&p, p.tile_rows) + (r->values > 1 ? p.tile_rows : 0)), 2);
    p.total = ari_round_up8(p.path + scales_of(path, &p) + p.tile_rows + p.wide + p.row);
    return p;
}

static ari_tile tile_of(const ari_exact_path *path, const ari_tile_plan *p, const ar_packed *a, const ar_packed *b,
                        size_t number, double *words, const double *panels)
{
    ari_tile t = {
        .matrix = number / (p->down * p->across), .a = a, .b = b, .plan = p, .panels = panels, .words = words};
    t.row = number / p->across % p->down * p->tile_rows;
    t.col = number % p->across * p->tile_cols;
    t.rows = a->rows - t.row < p->tile_rows ? a->rows - t.row : p->tile_rows;
    t.cols = b->rows - t.col < p->tile_cols ? b->rows - t.col : p->tile_cols;
    t.scale = words + p->path;
    t.result.row = t.scale + scales_of(path, p);
    t.wide = (int64_t *)(void *)(t.result.row + p->tile_rows);
    t.values = (float *)(void *)(t.wide + p->wide);
    return t;
}

/* Refuses operands whose shapes do not match. */
static ar_status check_pair(const ar_packed *a, const ar_packed *b, const char *label)
{
    if (a->narrow != b->narrow)
        return ar_error_set(AR_ERR_ARG, "%s: one operand is narrow, the other is not", label);
    if (a->batch != b->batch || a->k != b->k)
        return ar_error_set(AR_ERR_SHAPE, "%s: left operand [%zu, %zu, k %zu], right operand [%zu, %zu, k %zu]", label,
                            a->batch, a->rows, a->k, b->batch, b->rows, b->k);
    return AR_OK;
}

/* Returns the longest run of terms that a path sums at once: all of K, or full slices, so that no short slice is left
 * between two blocks. */
static size_t block_of(size_t k, size_t terms, size_t slice)
{
    return k <= terms ? k : terms / slice * slice;
}

/* Returns the path of a product whose longest sum has `terms` terms. Call it once per product. */
static const ari_exact_path *path_of(const ar_device *d, size_t terms)
{
    const ari_exact_choice *exact = &((const ari_cpu_device *)d)->exact;
    return terms < exact->path->least_terms ? exact->brief : exact->path;
}

/* Runs job(path, context, tile) for every tile, spread over the threads. */
static ar_status for_each_tile(ar_device *d, const ari_exact_path *path, const ar_packed *a, const ar_packed *b,
                               const tile_request *r,
                               void (*job)(const ari_exact_path *path, const void *context, const ari_tile *t),
                               const void *context)
{
    if (r->products == 0 || a->rows == 0 || b->rows == 0)
        return AR_OK;
    const ari_tile_plan p = plan_tiles(path, d, a, b, r);
    const size_t tiles = r->matrices * p.down * p.across, panels = r->products * p.panels;
    const int threads = ari_threads_for(d, tiles, r->products * a->rows * b->rows * (r->k + 8) / 8);
    ar_buf words = {NULL};
    size_t count = 0;
    AR_TRY(ari_mul_size(&count, p.panel, panels));
    AR_TRY(ari_add_size(&count, count, p.total * (size_t)threads));
    AR_TRY(ari_mul_size(&count, count, sizeof(double)));
    AR_TRY(ari_cpu_alloc(d, NULL, &words, count));
    double *base = words.ptr, *packed = base + p.total * (size_t)threads;
#pragma omp parallel for num_threads(threads) if (p.panel > 0)
    for (size_t i = 0; i < (p.panel > 0 ? panels : 0); i++) {
        const ar_packed operand = product_of(b, r->runs, i / p.panels);
        path->pack(packed + i * p.panel, &operand, 0, i % p.panels * path->col_step);
    }
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (size_t i = 0; i < tiles; i++) {
        const ari_tile t = tile_of(path, &p, a, b, i, base + ari_thread_number() * p.total, packed);
        job(path, context, &t);
    }
    ari_cpu_free(d, NULL, words);
    return AR_OK;
}

/* --- integers out ------------------------------------------------------------------------------------------------- */

typedef struct int_output {
    int64_t *s; /* [batch, m, n] of `limbs` */
    int limbs;
    bool add;
} int_output;

static void int_tile(const ari_exact_path *path, const void *context, const ari_tile *t)
{
    const int_output *o = context;
    const size_t k = t->a->k, n = t->b->rows, limbs = (size_t)o->limbs;
    const size_t block = block_of(k, ARI_CONTRACT_BLOCK, t->plan->slice);
    size_t begin = 0;
    do {
        const size_t end = k - begin < block ? k : begin + block;
        path->sum(t, begin, end);
        for (size_t i = 0; i < t->rows; i++) {
            int64_t *s = o->s + ((t->matrix * t->a->rows + t->row + i) * n + t->col) * limbs;
            if (limbs == 1)
                path->row_to_int64(t, i, s, o->add || begin > 0);
            else
                path->row_to_limbs(t, i, s, o->add || begin > 0);
        }
        begin = end;
    } while (begin < k);
}

/** Slot gemm_i64. Errors: AR_ERR_SHAPE, AR_ERR_ARG (limbs; one limb for more than 8191 terms), AR_ERR_MEMORY,
 *  AR_ERR_OVERFLOW. */
ar_status ari_cpu_gemm_i64(ar_device *d, ARI_AT_ONCE, ar_buf s, const ar_packed *a, const ar_packed *b, int limbs,
                           bool add)
{
    AR_TRY(check_pair(a, b, "gemm_i64"));
    if (limbs != 1 && limbs != 2)
        return ar_error_set(AR_ERR_ARG, "gemm_i64: %d limbs, expected 1 or 2", limbs);
    if (limbs == 1 && a->k > ARI_CONTRACT_BLOCK && !a->narrow)
        return ar_error_set(AR_ERR_ARG, "gemm_i64: k %zu needs two limbs, one holds up to %d terms", a->k,
                            ARI_CONTRACT_BLOCK);
    const int_output o = {.s = s.ptr, .limbs = limbs, .add = add};
    const tile_request r = {.matrices = a->batch, .products = a->batch, .k = a->k, .terms = ARI_CONTRACT_BLOCK};
    return for_each_tile(d, path_of(d, a->k), a, b, &r, int_tile, &o);
}

/* --- rounded values out ------------------------------------------------------------------------------------------- */

typedef struct round_output {
    ar_device *d;
    const ar_tensor *y, *z;
    const int32_t *e, *f; /* exponents [batch, m] and [batch, n] */
    const float *bias;    /* [n] or NULL */
    ar_activation act;
} round_output;

/* Sums over more terms than the path holds in one sum: limbs are kept next to its workspace. */
static void wide_sums(const ari_exact_path *path, const ari_tile *t)
{
    const size_t block = block_of(t->a->k, path->terms, t->plan->slice);
    for (size_t begin = 0; begin < t->a->k; begin += block) {
        const size_t end = t->a->k - begin < block ? t->a->k : begin + block;
        path->sum(t, begin, end);
        for (size_t i = 0; i < t->rows; i++)
            path->row_to_limbs(t, i, t->wide + i * 2 * t->cols, begin > 0);
    }
}

/* Computes the tile's sums and the factors of its columns from the exponents f, and rounds with those of its rows, e,
 * if the path does that. */
static void make_sums(const ari_exact_path *path, const ari_tile *t, const int32_t *e, const int32_t *f,
                      ari_tile_result result)
{
    ari_tile tile = *t;
    if (t->plan->direct) {
        tile.result = (ari_tile_result){result.y, result.ld, t->result.row};
        for (size_t i = 0; i < t->rows; i++)
            tile.result.row[i] = round_row_factor(e[i]);
    }
    round_factors(t->scale, f, t->cols);
    if (t->a->k > path->terms)
        wide_sums(path, t);
    else
        path->sum(&tile, 0, t->a->k);
}

/* Rounds row i of the tile unless it is rounded already; e: its exponent. */
static void round_row_of(const ari_exact_path *path, const ari_tile *t, size_t i, float *y, int32_t e, const int32_t *f)
{
    if (t->plan->direct)
        return;
    if (t->a->k <= path->terms) {
        path->round_row(t, i, y, round_row_factor(e));
        return;
    }
    const int64_t *s = t->wide + i * 2 * t->cols;
    for (size_t j = 0; j < t->cols; j++)
        y[j] = ari_contract_value2(s[2 * j], s[2 * j + 1], e, f[j]);
}

static ar_tensor row_view(float *row, size_t cols)
{
    return (ar_tensor){.dtype = AR_F32, .ndim = 2, .shape = {1, cols}, .stride = {(ptrdiff_t)cols, 1}, .data = {row}};
}

/* Bias and activation by the element-wise kernel, on a row that is still in the first cache level. */
static void finish_row(const round_output *o, const ari_tile *t, size_t i, float *y)
{
    if (!o->bias && o->act == AR_ACT_NONE)
        return;
    const ar_cbuf bias = {o->bias ? o->bias + t->col : NULL};
    const ar_tensor sums = row_view(y, t->cols);
    ar_tensor values = sums;
    if (o->act != AR_ACT_NONE) {
        const ari_matrices zm = ari_matrices_of(o->z);
        values.data.ptr = ari_matrix_at(o->z, t->matrix) + (ptrdiff_t)(t->row + i) * zm.row_stride + t->col;
    }
    (void)ari_cpu_bias_act(o->d, NULL, &sums, bias, o->act, &values); /* this call cannot fail */
}

static void round_tile(const ari_exact_path *path, const void *context, const ari_tile *t)
{
    const round_output *o = context;
    const ari_matrices ym = ari_matrices_of(o->y);
    float *origin = ari_matrix_at(o->y, t->matrix) + (ptrdiff_t)t->row * ym.row_stride + t->col;
    const int32_t *e = o->e + t->matrix * t->a->rows + t->row, *f = o->f + t->matrix * t->b->rows + t->col;
    make_sums(path, t, e, f, (ari_tile_result){origin, (size_t)ym.row_stride, NULL});
    for (size_t i = 0; i < t->rows; i++) {
        float *y = origin + (ptrdiff_t)i * ym.row_stride;
        round_row_of(path, t, i, y, e[i], f);
        finish_row(o, t, i, y);
    }
}

/** Slot gemm_round. z may be NULL for AR_ACT_NONE. Errors: AR_ERR_SHAPE, AR_ERR_MEMORY, AR_ERR_OVERFLOW. */
ar_status ari_cpu_gemm_round(ar_device *d, ARI_AT_ONCE, const ar_tensor *y, const ar_packed *a, const ar_packed *b,
                             ar_cbuf e, ar_cbuf f, ar_cbuf bias, ar_activation act, const ar_tensor *z,
                             const ar_band *band)
{
    (void)band; /* products of full matrices are small here: attention splits the others by rows */
    AR_TRY(check_pair(a, b, "gemm_round"));
    const ari_matrices ym = ari_matrices_of(y);
    if (ym.batch != a->batch || ym.rows != a->rows || ym.cols != b->rows)
        return ar_error_set(AR_ERR_SHAPE, "gemm_round: result [%zu, %zu, %zu], expected [%zu, %zu, %zu]", ym.batch,
                            ym.rows, ym.cols, a->batch, a->rows, b->rows);
    const round_output o = {.d = d, .y = y, .z = z, .e = e.ptr, .f = f.ptr, .bias = bias.ptr, .act = act};
    const ari_exact_path *path = path_of(d, a->k);
    const tile_request r = {.matrices = a->batch,
                            .products = a->batch,
                            .k = a->k,
                            .terms = path->terms,
                            .direct = a->k > 0 && a->k <= path->terms};
    return for_each_tile(d, path, a, b, &r, round_tile, &o);
}

/* --- rounded values into an accumulator --------------------------------------------------------------------------- */

typedef struct acc_output {
    uint8_t *t;           /* [m, n] accumulator */
    int64_t *h, *l;       /* [m, n] accumulator */
    const int32_t *e, *f; /* exponents [products, m] and [products, n] */
    const tile_request *r;
    bool fresh, narrow;
} acc_output;

/* Computes the tile of a product and saves its rounded values, or adds them together with those already saved, because
 * a state has four times the bytes. Smaller tiles, which would stay in the second cache level, were measured and are
 * slower: they pack the operands more often. */
static void acc_product(const ari_exact_path *path, const acc_output *o, const ari_tile *t, size_t number,
                        bool is_deferred, bool has_deferred, bool fresh)
{
    const int32_t *e = o->e + number * t->a->rows + t->row, *f = o->f + number * t->b->rows + t->col;
    float *second = t->values + kept_rows(t->plan, t->rows) * t->cols;
    make_sums(path, t, e, f, (ari_tile_result){is_deferred ? second : t->values, t->cols, NULL});
    for (size_t i = 0; i < t->rows; i++) {
        const size_t offset = (t->row + i) * t->b->rows + t->col;
        float *pair[2] = {t->values + (t->plan->direct ? i : 0) * t->cols, second + i * t->cols};
        round_row_of(path, t, i, pair[is_deferred], e[i], f);
        if (!is_deferred)
            ari_accumulate(o->t + offset, o->h + offset, o->l + offset, (const float *const *)pair,
                           has_deferred ? 2 : 1, t->cols, fresh, o->narrow);
    }
}

/* Computes one tile of every product and adds the rounded values to the accumulator. Values of two products are added
 * together: those of the first one are deferred until the second one is rounded. */
static void acc_tile(const ari_exact_path *path, const void *context, const ari_tile *tile)
{
    const acc_output *o = context;
    bool has_deferred = false, fresh = o->fresh;
    for (size_t i = 0, remaining = o->r->values; remaining > 0; i++) {
        const ar_packed a = product_of(tile->a, o->r->runs, i), b = product_of(tile->b, o->r->runs, i);
        ari_tile t = *tile;
        if (o->r->runs && a.k == 0)
            continue;
        t.a = &a;
        t.b = &b;
        t.panels += i * t.plan->panels * t.plan->panel;
        remaining--;
        const bool is_deferred = !has_deferred && remaining > 0;
        acc_product(path, o, &t, i, is_deferred, has_deferred, fresh);
        fresh = fresh && is_deferred;
        has_deferred = is_deferred;
    }
}

/** Slot gemm_acc. Threads share out the elements of the accumulator. Errors: AR_ERR_SHAPE, AR_ERR_MEMORY,
 *  AR_ERR_OVERFLOW. */
ar_status ari_cpu_gemm_acc(ar_device *d, ARI_AT_ONCE, ar_buf t, ar_buf hl, size_t low, bool narrow, const ar_packed *a,
                           const ar_packed *b, ar_cbuf e, ar_cbuf f, const ar_runs *runs, bool fresh)
{
    AR_TRY(check_pair(a, b, "gemm_acc"));
    int64_t *sums = hl.ptr;
    tile_request r = {.matrices = 1, .products = a->batch, .k = a->k, .values = a->batch};
    if (runs)
        r = (tile_request){.matrices = 1, .products = runs->n, .runs = runs};
    for (size_t i = 0; runs && i < runs->n; i++) {
        const size_t terms = runs->cut[i + 1] - runs->cut[i];
        r.k = terms > r.k ? terms : r.k;
        r.values += terms > 0 ? 1 : 0;
    }
    const ari_exact_path *path = path_of(d, r.k);
    r.terms = path->terms;
    r.direct = r.k > 0 && r.k <= path->terms;
    const acc_output o = {t.ptr, sums, sums + low, e.ptr, f.ptr, &r, fresh, narrow};
    return for_each_tile(d, path, a, b, &r, acc_tile, &o);
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Sums along a row (numerics.md section 4) and over samples and tokens (section 3). */
#include "ref/baseline/run.h"

#include "ref/numerics/elementary.h"

enum { SLICES = 9, NARROW_SLICES = 22, NONFINITE_TOP = NARROW_SLICES, CHUNK = 256 };

/* --- a row -------------------------------------------------------------------------------------------------------- */

double ari_bl_row_sum_below(const ari_bl_run *run, const double *x, size_t n, int32_t e)
{
    if (run->o->mode != AR_MODE_EXACT) {
        double sum = 0.0;
        for (size_t i = 0; i < n; i++)
            sum = ari_bl_fl(run, sum + ari_bl_fl(run, x[i]));
        return sum;
    }
    if (e == ARI_EXP_ZERO)
        return 0.0;
    int bits = 0; /* ceil(log2(n + 1)) */
    while (bits < 62 && ((size_t)1 << bits) < n + 1)
        bits++;
    const int32_t p = 62 - bits < 40 ? 62 - bits : 40;
    int64_t sum = 0;
    for (size_t i = 0; i < n; i++) {
        if (e == ARI_EXP_NONFINITE || ari_exponent64(x[i]) == ARI_EXP_NONFINITE)
            return (double)ari_nan32();
        sum += (int64_t)ari_rint(ari_scale2(x[i], p - e));
    }
    return ari_scale2((double)sum, e - p);
}

double ari_bl_row_sum(const ari_bl_run *run, const double *x, size_t n)
{
    int32_t e = ARI_EXP_ZERO;
    if (run->o->mode == AR_MODE_EXACT)
        for (size_t i = 0; i < n; i++) {
            const int32_t of_x = ari_exponent64(x[i]);
            e = of_x > e ? of_x : e;
        }
    return ari_bl_row_sum_below(run, x, n, e);
}

/* --- samples and tokens ------------------------------------------------------------------------------------------- */

ar_status ari_bl_sums_open(ari_bl_run *run, ari_bl_sums *sums, size_t n, bool matrix)
{
    const bool exact = run->o->mode == AR_MODE_EXACT, narrow = exact && matrix && run->o->bf16;
    *sums = (ari_bl_sums){.run = run, .n = n, .place = ARI_BL_INNER, .bits = narrow ? 13 : 32};
    if (exact) {
        sums->slice = ari_bl_take(run, n, narrow ? NARROW_SLICES : SLICES, sizeof *sums->slice);
        sums->top = ari_bl_take(run, n, 1, sizeof *sums->top);
    } else {
        sums->plain = ari_bl_doubles(run, n, 1);
    }
    return run->memory;
}

/* Adds at most 256 values exactly. I = |v|*2^149 is v's 24-bit significand shifted left by (biased exponent - 1), so it
 * touches at most two slices, or three of 13 bits. I < 2^277, so a part beyond the last slice is zero. */
__attribute__((always_inline)) static inline void add_exact(int64_t *restrict slice, int64_t *restrict top,
                                                            size_t stride, const double *restrict v, size_t n,
                                                            uint32_t width, int64_t slices)
{
    enum { PARTS = 3 };
    int64_t first_slice[CHUNK], part[PARTS][CHUNK], lowest = slices, highest = 0;
    const uint64_t mask = ((uint64_t)1 << width) - 1;
    for (size_t i = 0; i < n; i++) {
        const uint64_t bits = ari_bits32((float)v[i]), biased = (bits >> 23) & 255, normal = biased != 0;
        const uint64_t shift = biased - normal, number = shift / width;
        const uint64_t finite = biased != 255, significand = ((bits & 0x7fffff) | normal << 23) * finite;
        const uint64_t shifted = significand << (shift - number * width);
        const int64_t sign = -(int64_t)(bits >> 31); /* 0 or -1: (x ^ sign) - sign is x or -x */
        const int64_t p0 = (int64_t)(shifted & mask), p1 = (int64_t)(shifted >> width & mask);
        const int64_t p2 = (int64_t)(shifted >> width >> width);
        const int64_t last_part = p2 != 0 ? 2 : p1 != 0 ? 1 : 0;
        const int64_t reached = (shifted != 0 ? (int64_t)number + last_part : 0) + (finite ? 0 : NONFINITE_TOP);
        first_slice[i] = (int64_t)number;
        part[0][i] = (p0 ^ sign) - sign;
        part[1][i] = (p1 ^ sign) - sign;
        part[2][i] = (p2 ^ sign) - sign;
        top[i] = top[i] > reached ? top[i] : reached;
    }
    for (size_t i = 0; i < n; i++) {
        lowest = lowest < first_slice[i] ? lowest : first_slice[i];
        highest = highest > first_slice[i] ? highest : first_slice[i];
    }
    for (int64_t b = lowest; b < slices && b < highest + PARTS; b++) {
        int64_t *dst = slice + (size_t)b * stride;
        for (size_t i = 0; i < n; i++)
            dst[i] += (first_slice[i] == b ? part[0][i] : 0) + (first_slice[i] + 1 == b ? part[1][i] : 0) +
                      (first_slice[i] + 2 == b ? part[2][i] : 0);
    }
}

ARI_SIMD static void add_wide(const ari_bl_sums *sums, size_t first_sum, const double *v, size_t n)
{
    add_exact(sums->slice + first_sum, sums->top + first_sum, sums->n, v, n, 32, SLICES);
}

ARI_SIMD static void add_narrow(const ari_bl_sums *sums, size_t first_sum, const double *v, size_t n)
{
    add_exact(sums->slice + first_sum, sums->top + first_sum, sums->n, v, n, 13, NARROW_SLICES);
}

void ari_bl_sums_add(const ari_bl_sums *sums, size_t first_sum, const double *v, size_t n)
{
    for (size_t i = 0; sums->plain != NULL && i < n; i++)
        sums->plain[first_sum + i] = ari_bl_round(sums->run, sums->plain[first_sum + i] + v[i], sums->place);
    for (size_t i = 0; sums->plain == NULL && i < n; i += CHUNK)
        (sums->bits == 32 ? add_wide : add_narrow)(sums, first_sum + i, v + i, n - i < CHUNK ? n - i : CHUNK);
}

double ari_bl_sums_value(const ari_bl_sums *sums, size_t i)
{
    if (sums->plain != NULL)
        return sums->plain[i];
    const int t = (int)sums->top[i];
    if (t == NONFINITE_TOP)
        return (double)ari_nan32();
    const double high = (double)sums->slice[(size_t)t * sums->n + i];
    const double low = t > 0 ? (double)sums->slice[(size_t)(t - 1) * sums->n + i] : 0.0;
    const double value = ari_scale2(ari_scale2(high, sums->bits) + low, sums->bits * (t - 1) - 149);
    return sums->bits == 32 ? (double)(float)value : ari_bl_keep(sums->run, (double)(float)value);
}

/* --- gradients ---------------------------------------------------------------------------------------------------- */

/* Returns the number of parts of a sample: halves of halves while they have at least 512 positions; an expert's rows of
 * a sample are one part. */
static size_t parts_of_sample(const ari_bl_run *run, const ari_bl_terms *terms)
{
    size_t length = run->s;
    while (terms->sample_begin == NULL && run->o->mode == AR_MODE_EXACT && length % 2 == 0 && length >= 1024)
        length /= 2;
    return run->s / length;
}

/* Computes the gradient's terms from one part of a sample: dW = dY^T X over its tokens, rounded once. */
static void part_of(const ari_bl_run *run, const ari_bl_terms *terms, size_t i, size_t cols, size_t *k,
                    ari_bl_matrix *dy, ari_bl_matrix *x)
{
    const size_t length = run->s / parts_of_sample(run, terms);
    const size_t begin = terms->sample_begin != NULL ? terms->sample_begin[i] : i * length;
    *k = terms->sample_begin != NULL ? terms->sample_begin[i + 1] - begin : length;
    *dy = (ari_bl_matrix){terms->dy + begin * terms->ld, 1, terms->ld};
    *x = (ari_bl_matrix){terms->x + begin * cols, 1, cols};
}

/* Gradient [rows, cols]: the products of all parts of all samples, and the 16 x 16 tiles of their sums. */
typedef struct gradient {
    const ari_bl_terms *terms;
    double *value;
    size_t rows, cols;
    ari_bl_product *product; /* products in the order of the terms */
} gradient;

/* With errors: rounds a sum to its storage format if that is not the fp32 in which it was added up. */
static double round_sum(const ari_bl_run *run, double sum, const ari_bl_terms *terms)
{
    const int place = terms->stream ? ARI_BL_STREAM : ARI_BL_PRODUCT;
    const double unit = terms->stream ? run->noise->unit.stream : run->noise->unit.product;
    return unit > run->noise->unit.inner ? ari_bl_round(run, sum, place) : sum;
}

/* Returns true for a matrix, whose terms are products or chosen rows. */
static bool is_matrix(const ari_bl_terms *terms)
{
    return terms->dy != NULL || terms->row_of != NULL;
}

/* Adds tokens to rows [row, row + rows) and columns [col, col + cols) of a gradient; row r's sums begin at r*stride.
 * Gradients of tables and norms are accumulated in their storage format, as PyTorch does on the CPU. Other sums are one
 * operation. */
static void add_tokens(const gradient *g, ari_bl_sums *sums, const ari_bl_terms *terms, size_t row, size_t rows,
                       size_t col, size_t cols, size_t stride)
{
    const ari_bl_run *run = sums->run;
    sums->place = terms->row_of != NULL || terms->stream ? ARI_BL_STREAM : ARI_BL_INNER;
    const size_t per_token = terms->per_token > 0 ? terms->per_token : 1;
    const size_t total_rows = terms->sample_begin != NULL ? terms->sample_begin[run->b] : run->tokens * per_token;
    for (size_t t = 0; t < total_rows; t++) {
        const size_t of_token = terms->row_of != NULL ? terms->row_of[t] : 0;
        if (of_token >= row && of_token < row + rows)
            ari_bl_sums_add(sums, (of_token - row) * stride, terms->values + t * g->cols + col, cols);
    }
}

/* Sums 16 x 16 elements of a gradient. */
static ar_status sum_tile(ari_bl_run *run, void *arg, size_t tile)
{
    ARI_BL_SCOPE(run);
    enum { SIDE = ARI_BL_PANEL };
    const gradient *g = arg;
    const size_t i = tile / ari_bl_panels(g->cols), j = tile % ari_bl_panels(g->cols), row = i * SIDE, col = j * SIDE;
    const size_t rows = g->rows - row < SIDE ? g->rows - row : SIDE, cols = g->cols - col < SIDE ? g->cols - col : SIDE;
    const ari_bl_product *product = g->product;
    double c[SIDE][SIDE];
    ari_bl_sums sums;
    AR_TRY(ari_bl_sums_open(run, &sums, SIDE * SIDE, is_matrix(g->terms)));
    for (const ari_bl_terms *t = g->terms; t != NULL; t = t->next) {
        for (size_t part = 0; t->dy != NULL && part < run->b * parts_of_sample(run, t); part++) {
            ari_bl_product_tile(product++, c, i, j);
            ari_bl_sums_add(&sums, 0, c[0], SIDE * SIDE);
        }
        if (t->values != NULL)
            add_tokens(g, &sums, t, row, rows, col, cols, SIDE);
    }
    for (size_t r = 0; r < rows; r++)
        for (size_t k = 0; k < cols; k++)
            g->value[(row + r) * g->cols + col + k] = ari_bl_sums_value(&sums, r * SIDE + k);
    return AR_OK;
}

/* Opens the products of all parts, one after the other. */
static ar_status open_products(ari_bl_run *run, gradient *g)
{
    size_t n = 0;
    for (const ari_bl_terms *t = g->terms; t != NULL; t = t->next)
        n += t->dy != NULL ? run->b * parts_of_sample(run, t) : 0;
    g->product = ari_bl_take(run, n, 1, sizeof *g->product);
    AR_TRY(run->memory);
    n = 0;
    for (const ari_bl_terms *t = g->terms; t != NULL; t = t->next)
        for (size_t i = 0; t->dy != NULL && i < run->b * parts_of_sample(run, t); i++) {
            size_t k;
            ari_bl_matrix dy, x;
            part_of(run, t, i, g->cols, &k, &dy, &x);
            AR_TRY(ari_bl_product_open(run, &g->product[n++], g->rows, g->cols, k, dy, x, ARI_BL_SCALED));
        }
    return AR_OK;
}

/* Sums with random errors, which are drawn in the order of the sums: 256 rows at a time. */
static ar_status gradient_with_errors(ari_bl_run *run, const gradient *g)
{
    enum { BAND = 256 };
    for (size_t first_row = 0; first_row < g->rows; first_row += BAND) {
        ARI_BL_SCOPE(run);
        const size_t rows = g->rows - first_row < BAND ? g->rows - first_row : BAND;
        double *dw = ari_bl_doubles(run, rows, g->cols);
        ari_bl_sums sums;
        AR_TRY(ari_bl_sums_open(run, &sums, rows * g->cols, is_matrix(g->terms)));
        for (const ari_bl_terms *t = g->terms; t != NULL; t = t->next) {
            for (size_t i = 0; t->dy != NULL && i < run->b * parts_of_sample(run, t); i++) {
                size_t k;
                ari_bl_matrix dy, x;
                part_of(run, t, i, g->cols, &k, &dy, &x);
                dy.data += first_row;
                AR_TRY(ari_bl_contract(run, dw, rows, g->cols, k, dy, x, ARI_BL_SCALED));
                ari_bl_sums_add(&sums, 0, dw, rows * g->cols);
            }
            if (t->values != NULL)
                add_tokens(g, &sums, t, first_row, rows, 0, g->cols, g->cols);
        }
        for (size_t i = 0; i < rows * g->cols; i++)
            g->value[first_row * g->cols + i] = round_sum(run, ari_bl_sums_value(&sums, i), g->terms);
    }
    return AR_OK;
}

ar_status ari_bl_gradient(ari_bl_run *run, double *value, size_t rows, size_t cols, const ari_bl_terms *terms)
{
    ARI_BL_SCOPE(run);
    gradient g = {.terms = terms, .value = value, .rows = rows, .cols = cols};
    if (run->noise != NULL)
        return gradient_with_errors(run, &g);
    AR_TRY(open_products(run, &g));
    return ari_bl_each(run, ari_bl_panels(rows) * ari_bl_panels(cols), sum_tile, &g);
}

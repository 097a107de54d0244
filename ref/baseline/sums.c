/* SPDX-License-Identifier: Apache-2.0 */
/* Sums along a row (numerics.md section 4) and over samples and tokens (section 3). */
#include "ref/baseline/run.h"

#include "ref/numerics/scalar.h"

enum { SLICES = 9, NARROW_SLICES = 22, NONFINITE_TOP = NARROW_SLICES, BAND = 256 };

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
    *sums = (ari_bl_sums){.run = run, .place = ARI_BL_INNER, .bits = 32, .slices = SLICES};
    if (run->o->mode == AR_MODE_EXACT) {
        if (matrix && run->o->bf16) {
            sums->bits = 13;
            sums->slices = NARROW_SLICES;
        }
        sums->slice = ari_bl_take(run, n, sums->slices, sizeof *sums->slice);
        sums->top = ari_bl_take(run, n, 1, sizeof *sums->top);
        return sums->slice == NULL || sums->top == NULL ? run->memory : AR_OK;
    }
    sums->plain = ari_bl_doubles(run, n, 1);
    return sums->plain == NULL ? run->memory : AR_OK;
}

/* I = |v|*2^149 is v's 24-bit significand shifted left by (biased exponent - 1), so it touches two slices at most, or
 * three of 13 bits. */
void ari_bl_sums_add(ari_bl_sums *sums, size_t i, double v)
{
    if (sums->plain != NULL) {
        sums->plain[i] = ari_bl_round(sums->run, sums->plain[i] + v, sums->place);
        return;
    }
    const uint32_t bits = ari_bits32((float)v);
    const uint32_t biased = (bits >> 23) & 255U;
    if (biased == 255U)
        sums->top[i] = NONFINITE_TOP;
    if (sums->top[i] == NONFINITE_TOP)
        return;
    const uint64_t significand = (bits & 0x7fffffU) | (biased != 0 ? 0x800000U : 0U);
    const uint32_t shift = biased != 0 ? biased - 1U : 0U;
    const int bits_of_slice = sums->bits;
    uint64_t rest = significand << (shift % (uint32_t)bits_of_slice);
    const int64_t sign = (bits >> 31) != 0 ? -1 : 1;
    for (int b = (int)shift / bits_of_slice; rest != 0; b++, rest >>= bits_of_slice) { /* I < 2^277: the slice exists */
        const int64_t part = (int64_t)(rest & (((uint64_t)1 << bits_of_slice) - 1));
        if (part == 0)
            continue;
        sums->slice[i * sums->slices + (size_t)b] += sign * part;
        if (sums->top[i] < b)
            sums->top[i] = (int8_t)b;
    }
}

double ari_bl_sums_value(const ari_bl_sums *sums, size_t i)
{
    if (sums->plain != NULL)
        return sums->plain[i];
    const int t = sums->top[i];
    if (t == NONFINITE_TOP)
        return (double)ari_nan32();
    const int64_t *slice = sums->slice + i * sums->slices;
    const double high = (double)slice[t];
    const double low = t > 0 ? (double)slice[t - 1] : 0.0;
    const double value = ari_scale2(ari_scale2(high, sums->bits) + low, sums->bits * (t - 1) - 149);
    return sums->bits == 32 ? (double)(float)value : ari_bl_keep(sums->run, (double)(float)value);
}

/* Halves of halves of a sample while they have 512 positions; an expert's rows of it are in one piece. */
static size_t parts_of_sample(const ari_bl_run *run, const ari_bl_terms *terms)
{
    size_t length = run->s;
    while (terms->of == NULL && run->o->mode == AR_MODE_EXACT && length % 2 == 0 && length >= 1024)
        length /= 2;
    return run->s / length;
}

/* One contraction over the tokens of each part of a sample, for rows [first, first + rows) of the gradient; one rounding each. */
static ar_status add_samples(ari_bl_run *run, ari_bl_sums *sums, size_t first, size_t rows, size_t cols,
                             const ari_bl_terms *terms)
{
    double *dw = ari_bl_doubles(run, rows, cols);
    AR_TRY(run->memory);
    const size_t parts = parts_of_sample(run, terms), length = run->s / parts;
    for (size_t i = 0; i < run->b * parts; i++) {
        const size_t begin = terms->of != NULL ? terms->of[i] : i * length;
        const size_t end = terms->of != NULL ? terms->of[i + 1] : begin + length;
        const ari_bl_matrix a = {terms->dy + begin * terms->ld + first, 1, terms->ld};
        const ari_bl_matrix b = {terms->x + begin * cols, 1, cols};
        AR_TRY(ari_bl_contract(run, dw, rows, cols, end - begin, a, b, ARI_BL_SCALED));
        for (size_t k = 0; k < rows * cols; k++)
            ari_bl_sums_add(sums, k, dw[k]);
    }
    return AR_OK;
}

/* Gradients of tables and norms are added up where they are stored: so PyTorch does it on the CPU. Others' sums are
 * one operation. */
static void add_tokens(const ari_bl_run *run, ari_bl_sums *sums, size_t first, size_t rows, size_t cols,
                       const ari_bl_terms *terms)
{
    sums->place = terms->row_of != NULL || terms->stream ? ARI_BL_STREAM : ARI_BL_INNER;
    const size_t each = terms->per_token > 0 ? terms->per_token : 1;
    const size_t all = terms->of != NULL ? terms->of[run->b] : run->tokens * each;
    for (size_t t = 0; t < all; t++) {
        const size_t row = terms->row_of != NULL ? terms->row_of[t] : 0;
        if (row < first || row >= first + rows)
            continue;
        for (size_t i = 0; i < cols; i++)
            ari_bl_sums_add(sums, (row - first) * cols + i, terms->values[t * cols + i]);
    }
}

/* A sum as it is stored, where that takes more than the fp32 in which it was added up. */
static double round_sum(const ari_bl_run *run, double sum, const ari_bl_terms *terms)
{
    if (run->noise == NULL)
        return sum;
    const int place = terms->stream ? ARI_BL_STREAM : ARI_BL_PRODUCT;
    const double unit = terms->stream ? run->noise->unit.stream : run->noise->unit.product;
    return unit > run->noise->unit.inner ? ari_bl_round(run, sum, place) : sum;
}

/* A matrix has terms of products, or of rows that are chosen. */
static bool is_matrix(const ari_bl_terms *terms)
{
    return terms->dy != NULL || terms->row_of != NULL;
}

/* Bands of rows, since nine slices take 72 bytes an element. */
ar_status ari_bl_gradient(ari_bl_run *run, double *gradient, size_t rows, size_t cols, const ari_bl_terms *terms)
{
    for (size_t first = 0; first < rows; first += BAND) {
        ARI_BL_SCOPE(run);
        const size_t band = rows - first < BAND ? rows - first : BAND;
        ari_bl_sums sums;
        AR_TRY(ari_bl_sums_open(run, &sums, band * cols, is_matrix(terms)));
        for (const ari_bl_terms *t = terms; t != NULL; t = t->next) {
            if (t->dy != NULL)
                AR_TRY(add_samples(run, &sums, first, band, cols, t));
            if (t->values != NULL)
                add_tokens(run, &sums, first, band, cols, t);
        }
        for (size_t i = 0; i < band * cols; i++)
            gradient[first * cols + i] = round_sum(run, ari_bl_sums_value(&sums, i), terms);
    }
    return AR_OK;
}

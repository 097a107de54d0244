/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "ref/core/size.h"
#include "ref/cpu/gemm.h"
#include "ref/cpu/storage.h"
#include "ref/numerics/integer_sum.h"

/* Exponents of rows and columns (numerics.md, "Contraction", steps 0 and 1). The bits of magnitudes order as the
 * magnitudes do, infinities and then NaNs above every finite value: so a group's exponent is the exponent of its
 * largest magnitude as an unsigned integer, and one integer maximum an element does. Scaled values are compared in
 * binary64, where A*2^c is exact and normal; 0 times a non-finite value is a NaN, so a column that takes no part
 * (factor 0) still flags its row.
 *
 * fp32 does where the largest rounded product is above 2^-126 and finite: then none overflowed, that one is exact, and
 * those that were rounded have become 2^-126 at most, which leaves the largest exponent as it is. 2^-126 itself may be
 * (2 - 2^-23)*2^-127, whose exponent is smaller, rounded up. */

#define BLOCK ((size_t)2048) /* groups whose maxima are kept in the first cache level together */

/* The maximum over a run of contiguous elements, of one group. */
ARI_SIMD static uint32_t top_of_run(ari_stored_run x, size_t n)
{
    uint32_t top = 0;
    for (size_t k = 0; k < n; k++) {
        const uint32_t bits = ari_bits32(ari_stored_value(x, k)) & 0x7fffffffu;
        top = bits > top ? bits : top;
    }
    return top;
}

/* One element each of n groups that lie side by side. */
ARI_SIMD static void top_of_each(uint32_t *restrict top, ari_stored_run x, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const uint32_t bits = ari_bits32(ari_stored_value(x, i)) & 0x7fffffffu;
        top[i] = bits > top[i] ? bits : top[i];
    }
}

ARI_SIMD static uint64_t scaled_top_of_run(ari_stored_run x, const double *restrict scale, size_t n)
{
    uint64_t top = 0;
    for (size_t k = 0; k < n; k++) {
        const uint64_t bits = ari_bits64((double)ari_stored_value(x, k) * scale[k]) & 0x7fffffffffffffffu;
        top = bits > top ? bits : top;
    }
    return top;
}

ARI_SIMD static void scaled_top_of_each(uint64_t *restrict top, ari_stored_run x, double scale, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const uint64_t bits = ari_bits64((double)ari_stored_value(x, i) * scale) & 0x7fffffffffffffffu;
        top[i] = bits > top[i] ? bits : top[i];
    }
}

ARI_SIMD static uint32_t narrow_top_of_run(ari_stored_run x, const float *restrict scale, size_t n)
{
    uint32_t top = 0;
    for (size_t k = 0; k < n; k++) {
        const uint32_t bits = ari_bits32(ari_stored_value(x, k) * scale[k]) & 0x7fffffffu;
        top = bits > top ? bits : top;
    }
    return top;
}

ARI_SIMD static void narrow_top_of_each(uint32_t *restrict top, ari_stored_run x, float scale, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const uint32_t bits = ari_bits32(ari_stored_value(x, i) * scale) & 0x7fffffffu;
        top[i] = bits > top[i] ? bits : top[i];
    }
}

/* Groups are lines of a matrix: element `at` of group g is first + g*group_stride + at*along_stride of a's memory. */
typedef struct groups {
    const ar_tensor *a;
    ptrdiff_t first;
    size_t along; /* elements of a group */
    ptrdiff_t group_stride, along_stride;
    bool narrow; /* of an operand of 15 bits */
} groups;

/* True if groups are read side by side, an element of each at a time; else one after the other, in runs. */
static bool side_by_side(const groups *g)
{
    return g->group_stride == 1 && g->along_stride != 1;
}

/* Elements [k, k + n) of group i, or (side by side) element k of the groups [i, i + n): n <= BLOCK of them. */
static ari_stored_run run_of(const groups *g, size_t i, size_t k, size_t n, float room[BLOCK])
{
    const ptrdiff_t at = g->first + (ptrdiff_t)i * g->group_stride + (ptrdiff_t)k * g->along_stride;
    return ari_stored_gather(g->a, at, side_by_side(g) ? 1 : g->along_stride, n, room);
}

/* The next run of a group. */
static size_t run_length(const groups *g, size_t k)
{
    return g->along - k < BLOCK ? g->along - k : BLOCK;
}

/* From the largest magnitude of a group. */
static void store_exponent(int32_t *e, double top, const groups *g, bool max_into)
{
    const int32_t own = g->narrow ? ari_narrow_exponent(top) : ari_exponent64(top);
    *e = max_into && *e > own ? *e : own;
}

/* e[0..n) of n <= BLOCK groups, scaled by scale[0..along) unless that is NULL. False, with nothing written, where fp32 does
 * not tell. */
static bool narrow_block(int32_t *e, const groups *g, const float *scale, size_t n, bool max_into)
{
    float room[BLOCK];
    uint32_t top[BLOCK] = {0};
    bool normal = true;
    for (size_t k = 0; side_by_side(g) && k < g->along; k++) {
        const ari_stored_run x = run_of(g, 0, k, n, room);
        if (scale)
            narrow_top_of_each(top, x, scale[k], n);
        else
            top_of_each(top, x, n);
    }
    for (size_t i = 0; !side_by_side(g) && i < n; i++)
        for (size_t k = 0; k < g->along; k += BLOCK) {
            const size_t length = run_length(g, k);
            const ari_stored_run x = run_of(g, i, k, length, room);
            const uint32_t of_run = scale ? narrow_top_of_run(x, scale + k, length) : top_of_run(x, length);
            top[i] = of_run > top[i] ? of_run : top[i];
        }
    for (size_t i = 0; scale && i < n; i++)
        normal &= top[i] > 0x00800000u && top[i] < 0x7f800000u;
    for (size_t i = 0; normal && i < n; i++)
        store_exponent(e + i, (double)ari_float32(top[i]), g, max_into);
    return normal;
}

/* The same in binary64. */
static void scaled_block(int32_t *e, const groups *g, const double *scale, size_t n, bool max_into)
{
    float room[BLOCK];
    uint64_t top[BLOCK] = {0};
    for (size_t k = 0; side_by_side(g) && k < g->along; k++)
        scaled_top_of_each(top, run_of(g, 0, k, n, room), scale[k], n);
    for (size_t i = 0; !side_by_side(g) && i < n; i++)
        for (size_t k = 0; k < g->along; k += BLOCK) {
            const uint64_t of_run =
                scaled_top_of_run(run_of(g, i, k, run_length(g, k), room), scale + k, run_length(g, k));
            top[i] = of_run > top[i] ? of_run : top[i];
        }
    for (size_t i = 0; i < n; i++)
        store_exponent(e + i, ari_float64(top[i]), g, max_into);
}

/* e[batch, rows] over the columns of a, scaled by s, of [batch, cols], unless that is NULL. */
static void exponents(const ar_device *d, int32_t *e, const ar_tensor *a, const ari_shifts *s, bool max_into,
                      bool narrow)
{
    const ari_matrices m = ari_matrices_of(a);
    /* Short blocks where there are few rows, so that every thread has some. */
    const size_t share = (m.rows + (size_t)d->threads - 1) / (size_t)d->threads;
    const size_t block = share < 16 ? 16 : share < BLOCK ? share : BLOCK;
    const size_t blocks = (m.rows + block - 1) / block;
    ARI_PARALLEL_FOR (i, m.batch * blocks, d, m.batch * m.rows * m.cols) {
        const size_t at = i / blocks, first = i % blocks * block;
        const size_t n = m.rows - first < block ? m.rows - first : block;
        const ptrdiff_t begin = ari_matrix_offset(a, at) + (ptrdiff_t)first * m.row_stride;
        const groups g = {a, begin, m.cols, m.row_stride, m.col_stride, narrow};
        int32_t *out = e + at * m.rows + first;
        const float *narrow_scale = s && s->narrow ? s->narrow + at * m.cols : NULL;
        if ((s && !narrow_scale) || !narrow_block(out, &g, narrow_scale, n, max_into))
            scaled_block(out, &g, s->wide + at * m.cols, n, max_into);
    }
}

/* An exponent of fp32 values lies in -148..128, so the factor is a normal binary64 number either way. */
ARI_SIMD static void factors_of(double *restrict out, const int32_t *restrict c, int32_t sign, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const int special = c[i] == ARI_EXP_ZERO || c[i] == ARI_EXP_NONFINITE;
        const double factor = ari_pow2(sign * (special ? 0 : c[i]));
        out[i] = c[i] == ARI_EXP_ZERO ? 0.0 : factor;
    }
}

/* The least and the largest power that a factor other than 0 has, 0 among them. */
ARI_SIMD static void range_of(ari_shifts *s, const int32_t *c, int32_t sign, size_t n)
{
    int32_t least = 0, most = 0;
    for (size_t i = 0; i < n; i++) {
        const int32_t power = c[i] == ARI_EXP_ZERO || c[i] == ARI_EXP_NONFINITE ? 0 : sign * c[i];
        least = power < least ? power : least;
        most = power > most ? power : most;
    }
    s->least = least;
    s->most = most;
}

ARI_SIMD static void narrow_of(float *restrict narrow, const double *restrict wide, size_t n)
{
    for (size_t i = 0; i < n; i++)
        narrow[i] = (float)wide[i];
}

ar_status ari_shifts_init(ari_shifts *s, const int32_t *c, int sign, size_t batch, size_t k)
{
    size_t n = 0;
    void *memory = NULL;
    AR_TRY(ari_mul_size(&n, batch, k));
    AR_TRY(ari_alloc(&memory, n, sizeof *s->wide + sizeof *s->narrow, "the factors of equilibration"));
    *s = (ari_shifts){.wide = memory};
    if (c) {
        factors_of(s->wide, c, sign, n);
        range_of(s, c, sign, n);
    } else {
        for (size_t i = 0; i < n; i++)
            s->wide[i] = 1.0;
    }
    if (s->least >= -126 && s->most <= 127) {
        s->narrow = (float *)(void *)(s->wide + n);
        narrow_of(s->narrow, s->wide, n);
    }
    return AR_OK;
}

void ari_shifts_fini(ari_shifts *s)
{
    free(s->wide);
}

/** Slot col_exponents. Errors: none. */
ar_status ari_cpu_col_exponents(ar_device *d, ARI_AT_ONCE, ar_buf c, const ar_tensor *b, bool max_into)
{
    const ar_tensor columns = ar_tensor_transposed(b);
    exponents(d, c.ptr, &columns, NULL, max_into, false);
    return AR_OK;
}

/** Slot row_exponents. Errors: AR_ERR_MEMORY, AR_ERR_OVERFLOW (the table of factors 2^c). */
ar_status ari_cpu_row_exponents(ar_device *d, ARI_AT_ONCE, ar_buf e, const ar_tensor *a, ar_cbuf c, int sign,
                                bool max_into, bool narrow)
{
    const ari_matrices m = ari_matrices_of(a);
    ari_shifts s = {NULL, NULL, 0, 0};
    if (c.ptr)
        AR_TRY(ari_shifts_init(&s, c.ptr, sign, m.batch, m.cols));
    exponents(d, e.ptr, a, c.ptr ? &s : NULL, max_into, narrow);
    ari_shifts_fini(&s);
    return AR_OK;
}

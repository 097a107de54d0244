/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdlib.h>

#include "ref/core/size.h"
#include "ref/core/tensor_private.h"
#include "ref/cpu/gemm.h"
#include "ref/cpu/storage.h"
#include "ref/numerics/integer_sum.h"

/* --- exponents ---------------------------------------------------------------------------------------------------- */

/* Exponents of rows and columns (numerics.md, "Contraction", steps 0 and 1). The bits of magnitudes order as the
 * magnitudes do, infinities and then NaNs above every finite value: so a group's exponent is the exponent of its
 * largest magnitude as an unsigned integer, and one integer maximum an element does. Scaled values are compared in
 * binary64, where A*2^c is exact and normal; 0 times a non-finite value is a NaN, so a column that takes no part
 * (factor 0) still flags its row.
 *
 * fp32 does where the largest rounded product is above 2^-126 and finite: then none overflowed, that one is exact, and
 * those that were rounded have become 2^-126 at most, which leaves the largest exponent as it is. 2^-126 itself may be
 * (2 - 2^-23)*2^-127, whose exponent is smaller, rounded up. */

#define BLOCK ((size_t)2048) /* number of groups whose maxima fit in the L1 cache together */

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

/* Updates the maxima of n groups that are side by side with one element each. */
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

/* Groups are lines of a matrix: element i of group g is base_offset + g*group_stride + i*along_stride of a's memory. */
typedef struct groups {
    const ar_tensor *a;
    ptrdiff_t base_offset;
    size_t along; /* elements of a group */
    ptrdiff_t group_stride, along_stride;
    bool narrow; /* true for an operand of 15 bits */
} groups;

/* Returns true if groups are read side by side, one element of each at a time; false if they are read one after the
 * other, in runs. */
static bool side_by_side(const groups *g)
{
    return g->group_stride == 1 && g->along_stride != 1;
}

/* Returns elements [k, k + n) of group i or, if side by side, element k of groups [i, i + n); n <= BLOCK. */
static ari_stored_run run_of(const groups *g, size_t i, size_t k, size_t n, float scratch[BLOCK])
{
    const ptrdiff_t offset = g->base_offset + (ptrdiff_t)i * g->group_stride + (ptrdiff_t)k * g->along_stride;
    return ari_stored_gather(g->a, offset, side_by_side(g) ? 1 : g->along_stride, n, scratch);
}

/* The next run of a group. */
static size_t run_length(const groups *g, size_t k)
{
    return g->along - k < BLOCK ? g->along - k : BLOCK;
}

/* Stores the exponent of a group's largest magnitude. */
static void store_exponent(int32_t *e, double top, const groups *g, bool max_into)
{
    const int32_t exponent = g->narrow ? ari_narrow_exponent(top) : ari_exponent64(top);
    *e = max_into && *e > exponent ? *e : exponent;
}

/* Computes e[0..n) of n <= BLOCK groups, scaled by scale[0..along) unless that is NULL. Returns false, with nothing
 * written, if fp32 does not suffice. */
static bool narrow_block(int32_t *e, const groups *g, const float *scale, size_t n, bool max_into)
{
    float scratch[BLOCK];
    uint32_t top[BLOCK] = {0};
    bool normal = true;
    for (size_t k = 0; side_by_side(g) && k < g->along; k++) {
        const ari_stored_run x = run_of(g, 0, k, n, scratch);
        if (scale)
            narrow_top_of_each(top, x, scale[k], n);
        else
            top_of_each(top, x, n);
    }
    for (size_t i = 0; !side_by_side(g) && i < n; i++)
        for (size_t k = 0; k < g->along; k += BLOCK) {
            const size_t length = run_length(g, k);
            const ari_stored_run x = run_of(g, i, k, length, scratch);
            const uint32_t of_run = scale ? narrow_top_of_run(x, scale + k, length) : top_of_run(x, length);
            top[i] = of_run > top[i] ? of_run : top[i];
        }
    for (size_t i = 0; scale && i < n; i++)
        normal &= top[i] > 0x00800000u && top[i] < 0x7f800000u;
    for (size_t i = 0; normal && i < n; i++)
        store_exponent(e + i, (double)ari_float32(top[i]), g, max_into);
    return normal;
}

/* Does the same in binary64. */
static void scaled_block(int32_t *e, const groups *g, const double *scale, size_t n, bool max_into)
{
    float scratch[BLOCK];
    uint64_t top[BLOCK] = {0};
    for (size_t k = 0; side_by_side(g) && k < g->along; k++)
        scaled_top_of_each(top, run_of(g, 0, k, n, scratch), scale[k], n);
    for (size_t i = 0; !side_by_side(g) && i < n; i++)
        for (size_t k = 0; k < g->along; k += BLOCK) {
            const uint64_t of_run =
                scaled_top_of_run(run_of(g, i, k, run_length(g, k), scratch), scale + k, run_length(g, k));
            top[i] = of_run > top[i] ? of_run : top[i];
        }
    for (size_t i = 0; i < n; i++)
        store_exponent(e + i, ari_float64(top[i]), g, max_into);
}

/* Computes e [batch, rows] over the columns of a, scaled by s [batch, cols] unless s is NULL. */
static void exponents(const ar_device *d, int32_t *e, const ar_tensor *a, const ari_shifts *s, bool max_into,
                      bool narrow)
{
    const ari_matrices m = ari_matrices_of(a);
    /* Blocks are short if there are few rows, so that every thread has some. */
    const size_t share = (m.rows + (size_t)d->threads - 1) / (size_t)d->threads;
    const size_t block = share < 16 ? 16 : share < BLOCK ? share : BLOCK;
    const size_t blocks = (m.rows + block - 1) / block;
    ARI_PARALLEL_FOR (i, m.batch * blocks, d, m.batch * m.rows * m.cols) {
        const size_t matrix_index = i / blocks, first_row = i % blocks * block;
        const size_t n = m.rows - first_row < block ? m.rows - first_row : block;
        const ptrdiff_t begin = ari_matrix_offset(a, matrix_index) + (ptrdiff_t)first_row * m.row_stride;
        const groups g = {a, begin, m.cols, m.row_stride, m.col_stride, narrow};
        int32_t *out = e + matrix_index * m.rows + first_row;
        const float *narrow_scale = s && s->narrow ? s->narrow + matrix_index * m.cols : NULL;
        if ((s && !narrow_scale) || !narrow_block(out, &g, narrow_scale, n, max_into))
            scaled_block(out, &g, s->wide + matrix_index * m.cols, n, max_into);
    }
}

/* Computes factors. Exponents of fp32 values are in -148..128, so the factor is a normal binary64 number for either
 * sign. */
ARI_SIMD static void factors_of(double *restrict out, const int32_t *restrict c, int32_t sign, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const int special = c[i] == ARI_EXP_ZERO || c[i] == ARI_EXP_NONFINITE;
        const double factor = ari_pow2(sign * (special ? 0 : c[i]));
        out[i] = c[i] == ARI_EXP_ZERO ? 0.0 : factor;
    }
}

/* Computes the least and the largest power of the non-zero factors, with 0 included. */
ARI_SIMD static void range_of(ari_shifts *s, const int32_t *c, int32_t sign, size_t n)
{
    int32_t min_power = 0, max_power = 0;
    for (size_t i = 0; i < n; i++) {
        const int32_t power = c[i] == ARI_EXP_ZERO || c[i] == ARI_EXP_NONFINITE ? 0 : sign * c[i];
        min_power = power < min_power ? power : min_power;
        max_power = power > max_power ? power : max_power;
    }
    s->min_power = min_power;
    s->max_power = max_power;
}

ARI_SIMD static void narrow_of(float *restrict narrow, const double *restrict wide, size_t n)
{
    for (size_t i = 0; i < n; i++)
        narrow[i] = (float)wide[i];
}

/* Initialises the shifts. c NULL: all factors are 1. The caller calls shifts_fini. Errors: AR_ERR_OVERFLOW,
 * AR_ERR_MEMORY. */
static ar_status shifts_init(ari_shifts *s, const int32_t *c, int sign, size_t batch, size_t k)
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
    if (s->min_power >= -126 && s->max_power <= 127) {
        s->narrow = (float *)(void *)(s->wide + n);
        narrow_of(s->narrow, s->wide, n);
    }
    return AR_OK;
}

/* Frees the shifts. */
static void shifts_fini(ari_shifts *s)
{
    free(s->wide);
}

/** Implements slot col_exponents. Errors: none. */
ar_status ari_cpu_col_exponents(ar_device *d, ARI_AT_ONCE, ar_buf c, const ar_tensor *b, bool max_into)
{
    const ar_tensor columns = ari_tensor_transposed(b);
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
        AR_TRY(shifts_init(&s, c.ptr, sign, m.batch, m.cols));
    exponents(d, e.ptr, a, c.ptr ? &s : NULL, max_into, narrow);
    shifts_fini(&s);
    return AR_OK;
}

/* --- pack --------------------------------------------------------------------------------------------------------- */

/** Slot packed_create. AR_PACKED_LEFT has no effect here, since both operands have the same form. Errors:
 *  AR_ERR_OVERFLOW, AR_ERR_MEMORY. */
ar_status ari_cpu_packed_create(ar_device *d, ARI_AT_ONCE, ar_packed **out, size_t batch, size_t rows, size_t k,
                                unsigned form)
{
    ARI_OWNED void *memory = NULL;
    ar_buf integers = {NULL};
    size_t n = 0;
    AR_TRY(ari_cpu_packed_room(d, &n, batch, rows, k, form, NULL));
    AR_TRY(ari_alloc(&memory, 1, sizeof(ar_packed), "a packed operand"));
    AR_TRY(ari_cpu_alloc(d, q, &integers, n));
    ar_packed *p = memory;
    *p = (ar_packed){.batch = batch,
                     .rows = rows,
                     .k = k,
                     .ld = k,
                     .step = rows * k,
                     .q = integers.ptr,
                     .narrow = form & AR_PACKED_NARROW};
    *out = p;
    memory = NULL;
    return AR_OK;
}

/** Slot packed_part. Errors: AR_ERR_SHAPE (not inside `full`), AR_ERR_MEMORY. */
ar_status ari_cpu_packed_part(ar_device *d, ARI_AT_ONCE, ar_packed **out, const ar_packed *full, const ar_part *part)
{
    (void)d;
    void *memory = NULL;
    AR_TRY(ari_part_check(part, full->batch, full->rows, full->k, "packed_part"));
    AR_TRY(ari_alloc(&memory, 1, sizeof(ar_packed), "a part of a packed operand"));
    ar_packed *p = memory;
    *p = (ar_packed){.batch = part->matrices,
                     .rows = part->rows,
                     .k = part->cols,
                     .ld = full->ld,
                     .step = full->step,
                     .q = ari_packed_at(full, part->matrix, part->row, part->col),
                     .part = true,
                     .narrow = full->narrow};
    *out = p;
    return AR_OK;
}

/** Slot packed_destroy. */
void ari_cpu_packed_destroy(ar_device *d, ARI_AT_ONCE, ar_packed *p)
{
    if (!p)
        return;
    if (!p->part)
        ari_cpu_free(d, q, (ar_buf){p->q});
    free(p);
}

/** Slot packed_bytes. */
size_t ari_cpu_packed_bytes(const ar_packed *p)
{
    return p->part ? 0 : p->batch * p->rows * p->k * ari_packed_width(p->narrow);
}

/** Slot packed_room. */
ar_status ari_cpu_packed_room(const ar_device *d, size_t *bytes, size_t batch, size_t rows, size_t k, unsigned form,
                              const ar_part *part)
{
    (void)d;
    *bytes = 0;
    if (part) /* in the place of the full operand */
        return AR_OK;
    AR_TRY(ari_mul_size(bytes, batch, rows));
    AR_TRY(ari_mul_size(bytes, *bytes, k));
    return ari_mul_size(bytes, *bytes, ari_packed_width(form & AR_PACKED_NARROW));
}

static inline int32_t limit_of(bool narrow)
{
    return narrow ? ARI_CONTRACT_NARROW_LIMIT : ARI_QUANTISED_MAX;
}

static inline void store_integer(void *q, size_t k, int32_t value, bool narrow)
{
    if (narrow)
        ((int16_t *)q)[k] = (int16_t)value;
    else
        ((int32_t *)q)[k] = value;
}

/* q = clamp(rint(x*2^c*2^(25-e))): ari_contract_quantise with its two powers of two outside of the loop.
 *
 * Both products are exact in binary64: |x| is in 2^-149..2^128, c in -148..128, and e within 148 of c's range, so no
 * exponent leaves -1022..1023. Adding 1.5*2^52 rounds |v| <= 2^51 to an integer, half to even, and leaves the integer
 * in the low bits. The clamp also catches non-finite values (an exponent that does not belong to these values), so that
 * nothing is undefined. */
ARI_SIMD static void quantise_wide(void *restrict q, ari_stored_run x, const double *restrict scale, double row,
                                   bool narrow, size_t n)
{
    const double limit = limit_of(narrow);
    for (size_t k = 0; k < n; k++) {
        double v = (double)ari_stored_value(x, k) * scale[k] * row;
        v = v < limit ? v : limit;
        v = v > -limit ? v : -limit;
        store_integer(q, k, (int32_t)(uint32_t)(ari_bits64(v + ARI_ROUND_MAGIC) - ARI_ROUND_MAGIC_BITS), narrow);
    }
}

/* The same integer for every x by way of fp32, for a limit of 2^25 - 1, where `factor` = 2^(c+25-e) is a normal number
 * or 0. With w = x*factor:
 *   |w| >= 2^-126 has the 24 bits of x and is exact, or is infinite. Below 2^25 it is at most 2^25 - 2, so that neither
 *   way clamps, and both round it to the same integer; from there on both give the limit.
 *   |w| < 2^-126 may be rounded, to 2^-126 at max_magnitude: either way the integer is 0.
 *   NaN, of a NaN or of an infinity times 0, gives the limit either way.
 * 2^25 - 1 is no number of fp32, hence the second clamp, which also serves a smaller limit. */
static inline int32_t quantised(float x, float factor, int32_t max_magnitude)
{
    const float limit = 1 << ARI_QUANTISED_BITS;
    const float w = x * factor;
    const float low = w < limit ? w : limit;
    const int32_t q = (int32_t)rintf(low > -limit ? low : -limit);
    return ari_clamp32(q, -max_magnitude, max_magnitude);
}

ARI_SIMD static void quantise_narrow(void *restrict q, ari_stored_run x, const float *restrict scale, float row,
                                     bool narrow, size_t n)
{
    for (size_t k = 0; k < n; k++)
        store_integer(q, k, quantised(ari_stored_value(x, k), scale[k] * row, limit_of(narrow)), narrow);
}

/* What the rows of one matrix have in common. */
typedef struct pack_job {
    char *q;   /* first element of the destination */
    size_t ld; /* row length of the packed integers */
    const ar_tensor *a;
    ptrdiff_t base_offset; /* index of the matrix's first element */
    ptrdiff_t row_stride, col_stride;
    bool narrow;      /* the destination */
    ari_shifts scale; /* [cols] factors */
    const int32_t *e; /* [rows] */
} pack_job;

static bool row_is_zero(int32_t e)
{
    return e == ARI_EXP_ZERO || e == ARI_EXP_NONFINITE;
}

/* True if 2^(25-e) and its products with all columns' factors are normal numbers of fp32. */
static bool row_is_narrow(const pack_job *j, size_t row)
{
    const int64_t power = (int64_t)ARI_QUANTISED_BITS - j->e[row];
    return j->scale.narrow && power + j->scale.min_power >= -126 && power + j->scale.max_power <= 127;
}

static void *destination(const pack_job *j, size_t row, size_t k)
{
    return j->q + (row * j->ld + k) * ari_packed_width(j->narrow);
}

static void quantise_row(const pack_job *j, size_t row, size_t term_begin, ari_stored_run x, size_t n)
{
    void *out = destination(j, row, term_begin);
    const double factor = row_is_zero(j->e[row]) ? 0.0 : ari_scale2(1.0, ARI_QUANTISED_BITS - j->e[row]);
    if (row_is_zero(j->e[row]))
        memset(out, 0, n * ari_packed_width(j->narrow));
    else if (row_is_narrow(j, row))
        quantise_narrow(out, x, j->scale.narrow + term_begin, (float)factor, j->narrow, n);
    else
        quantise_wide(out, x, j->scale.wide + term_begin, factor, j->narrow, n);
}

/* --- rows that lie side by side: a transposed view ---------------------------------------------------------------- */

/* Side of a tile of terms by rows: few enough bytes of each at a time that writes go to few places. Measured: tiles of
 * 16 terms take three times as long if rows are a multiple of 4096 bytes apart. */
#define TILE ((size_t)64)
#define CHUNK ((size_t)1024) /* number of terms that a thread processes at a time */
#define GROUP ((size_t)8)    /* number of rows and terms in a transposition */

/* Factors of up to TILE rows; mask: 0 for rows that are zero. */
typedef struct tile_rows {
    float factor[TILE];
    int32_t mask[TILE];
    size_t n; /* a multiple of GROUP */
} tile_rows;

/* Quantises n terms of the rows in memory order and writes them as rows, while prefetching the next tile's lines and
 * the lines to be written. */
ARI_SIMD static void quantise_tile(void *restrict q, const pack_job *j, ptrdiff_t offset, const float *restrict scale,
                                   const tile_rows *restrict rows, size_t n)
{
    const bool narrow = j->narrow;
    const size_t width = ari_packed_width(narrow), ld = j->ld;
    _Alignas(int32_t) char tile[TILE * TILE * sizeof(int32_t)];
    for (size_t k = 0; k < n; k++) {
        const ari_stored_run run = ari_stored_at(j->a, offset + (ptrdiff_t)k * j->col_stride);
        const ari_stored_run next_run = ari_stored_at(j->a, offset + (ptrdiff_t)(k + TILE) * j->col_stride);
        ari_fetch(next_run.x, run.half ? rows->n / 2 : rows->n);
        ari_fetch((const char *)q + k * ld * width, k < rows->n ? n * width / sizeof(float) : 0);
        for (size_t i = 0; i < rows->n; i++)
            store_integer(tile, k * TILE + i,
                          quantised(ari_stored_value(run, i), scale[k] * rows->factor[i], limit_of(narrow)) &
                              rows->mask[i],
                          narrow);
    }
    if (narrow)
        ari_transpose16(q, ld, (const uint16_t *)(const void *)tile, TILE, n, rows->n);
    else
        ari_transpose32(q, ld, (const uint32_t *)(const void *)tile, TILE, n, rows->n);
}

/* Computes the rows' factors. Returns false if one of them is not narrow. */
static bool narrow_rows(tile_rows *rows, const pack_job *j, size_t first_row, size_t n)
{
    rows->n = n;
    for (size_t i = 0; i < n; i++) {
        const int32_t e = j->e[first_row + i];
        const bool zero = row_is_zero(e);
        if (!zero && !row_is_narrow(j, first_row + i))
            return false;
        rows->mask[i] = zero ? 0 : -1;
        rows->factor[i] = zero ? 0.0f : (float)ari_pow2(ARI_QUANTISED_BITS - e);
    }
    return true;
}

/* Packs terms [term_begin, term_end) of rows [first_row, first_row + n), both multiples of GROUP, in fp32. Returns
 * false and writes nothing if fp32 does not suffice. */
static bool pack_tiles(const pack_job *j, size_t first_row, size_t n, size_t term_begin, size_t term_end)
{
    tile_rows rows;
    if (!j->scale.narrow || !narrow_rows(&rows, j, first_row, n))
        return false;
    for (size_t k = term_begin; k < term_end; k += TILE) {
        const size_t terms = term_end - k < TILE ? term_end - k : TILE;
        const ptrdiff_t begin = j->base_offset + (ptrdiff_t)k * j->col_stride + (ptrdiff_t)first_row;
        quantise_tile(destination(j, first_row, k), j, begin, j->scale.narrow + k, &rows, terms);
    }
    return true;
}

/* --- any view ----------------------------------------------------------------------------------------------------- */

/* Terms [term_begin, term_end) of rows [first_row, first_row + n); a strided view is brought into contiguous runs of
 * fp32. */
static void pack_rows(const pack_job *j, size_t first_row, size_t n, size_t term_begin, size_t term_end)
{
    for (size_t i = first_row; i < first_row + n && term_begin < term_end; i++) {
        const ptrdiff_t row = j->base_offset + (ptrdiff_t)i * j->row_stride;
        const size_t run = j->col_stride == 1 ? term_end - term_begin : ARI_BLOCK;
        float scratch[ARI_BLOCK];
        for (size_t k = term_begin; k < term_end; k += run) {
            const size_t terms = term_end - k < run ? term_end - k : run;
            const ptrdiff_t offset = row + (ptrdiff_t)k * j->col_stride;
            quantise_row(j, i, k, ari_stored_gather(j->a, offset, j->col_stride, terms, scratch), terms);
        }
    }
}

static void pack_block(const pack_job *j, size_t first_row, size_t n, size_t term_begin, size_t term_end)
{
    const size_t rows = n / GROUP * GROUP, group_end = term_begin + (term_end - term_begin) / GROUP * GROUP;
    if (j->row_stride == 1 && j->col_stride != 1 && pack_tiles(j, first_row, rows, term_begin, group_end)) {
        pack_rows(j, first_row, rows, group_end, term_end);
        pack_rows(j, first_row + rows, n - rows, term_begin, term_end);
    } else {
        pack_rows(j, first_row, n, term_begin, term_end);
    }
}

/** Slot pack. Errors: AR_ERR_SHAPE (the part is not inside p), AR_ERR_MEMORY, AR_ERR_OVERFLOW. */
ar_status ari_cpu_pack(ar_device *d, ARI_AT_ONCE, ar_packed *p, size_t row_at, size_t k_at, const ar_tensor *a,
                       ar_cbuf c, int sign, ar_cbuf e)
{
    const ari_matrices m = ari_matrices_of(a);
    if (m.batch != p->batch || row_at > p->rows || m.rows > p->rows - row_at || k_at > p->k || m.cols > p->k - k_at)
        return ar_error_set(AR_ERR_SHAPE, "pack: [%zu, %zu, %zu] at row %zu, column %zu is outside [%zu, %zu, %zu]",
                            m.batch, m.rows, m.cols, row_at, k_at, p->batch, p->rows, p->k);
    ari_shifts scale;
    AR_TRY(shifts_init(&scale, c.ptr, sign, m.batch, m.cols));
    const int32_t *exponents = e.ptr;
    /* contiguous rows are read sequentially from one end to the other */
    const bool is_contiguous = m.col_stride == 1 && m.cols > 0;
    const size_t height = is_contiguous ? TILE / 4 : TILE, length = is_contiguous ? m.cols : CHUNK;
    const size_t down = (m.rows + height - 1) / height, along = (m.cols + length - 1) / length;
    ARI_PARALLEL_FOR (i, m.batch * down * along, d, m.batch * m.rows * m.cols) {
        const size_t matrix_index = i / (down * along), first_row = i / along % down * height,
                     term_begin = i % along * length;
        const pack_job job = {.q = ari_packed_at(p, matrix_index, row_at, k_at),
                              .ld = p->ld,
                              .a = a,
                              .base_offset = ari_matrix_offset(a, matrix_index),
                              .row_stride = m.row_stride,
                              .col_stride = m.col_stride,
                              .scale = {.wide = scale.wide + matrix_index * m.cols,
                                        .narrow = scale.narrow ? scale.narrow + matrix_index * m.cols : NULL,
                                        .min_power = scale.min_power,
                                        .max_power = scale.max_power},
                              .e = exponents + matrix_index * p->rows + row_at,
                              .narrow = p->narrow};
        pack_block(&job, first_row, m.rows - first_row < height ? m.rows - first_row : height, term_begin,
                   m.cols - term_begin < length ? m.cols : term_begin + length);
    }
    shifts_fini(&scale);
    return AR_OK;
}

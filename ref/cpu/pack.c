/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "ref/core/size.h"
#include "ref/cpu/gemm.h"
#include "ref/cpu/kernels.h"
#include "ref/numerics/bits.h"

/** Slot packed_create. `split` asks for nothing here: either operand is kept as int32. Errors: AR_ERR_OVERFLOW,
 *  AR_ERR_MEMORY. */
ar_status ari_cpu_packed_create(ar_device *d, ARI_AT_ONCE, ar_packed **gives, size_t batch, size_t rows, size_t k,
                                bool split)
{
    (void)split;
    ar_status st = AR_OK;
    void *memory = NULL;
    ar_buf integers = {NULL};
    size_t n = 0;
    AR_TRY_TO(done, st, ari_mul_size(&n, batch, rows));
    AR_TRY_TO(done, st, ari_mul_size(&n, n, k));
    AR_TRY_TO(done, st, ari_mul_size(&n, n, sizeof(int32_t)));
    AR_TRY_TO(done, st, ari_alloc(&memory, 1, sizeof(ar_packed), "a packed operand"));
    AR_TRY_TO(done, st, ari_cpu_alloc(d, q, &integers, n));
    ar_packed *p = memory;
    *p = (ar_packed){.batch = batch, .rows = rows, .k = k, .ld = k, .step = rows * k, .q = integers.ptr};
    *gives = p;
    memory = NULL;
done:
    free(memory);
    return st;
}

/** Slot packed_part. Errors: AR_ERR_SHAPE (not inside `whole`), AR_ERR_MEMORY. */
ar_status ari_cpu_packed_part(ar_device *d, ARI_AT_ONCE, ar_packed **gives, const ar_packed *whole, const ar_part *part)
{
    (void)d;
    void *memory = NULL;
    AR_TRY(ar_part_check(part, whole->batch, whole->rows, whole->k, "packed_part"));
    AR_TRY(ari_alloc(&memory, 1, sizeof(ar_packed), "a part of a packed operand"));
    ar_packed *p = memory;
    *p = (ar_packed){.batch = part->matrices,
                     .rows = part->rows,
                     .k = part->cols,
                     .ld = whole->ld,
                     .step = whole->step,
                     .q = ari_packed_at(whole, part->matrix, part->row, part->col),
                     .part = true};
    *gives = p;
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
    return p->part ? 0 : p->batch * p->rows * p->k * sizeof(int32_t);
}

/* q = clamp(rint(x*2^c*2^(25-e))): ari_contract_quantise with its two powers of two taken out of the loop. Both
 * products are exact in binary64: |x| lies in 2^-149..2^128, c in -148..128, e within 148 of c's range, so no exponent
 * leaves -1022..1023. Adding 1.5*2^52 rounds |v| <= 2^51 to an integer, half to even, and leaves it in the low bits.
 * The clamp also stops what is not finite (an exponent that does not belong to these values), so that nothing is
 * undefined. */
ARI_SIMD static void quantise_run(int32_t *restrict q, const float *restrict x, const double *restrict scale,
                                  double row, size_t n)
{
    const double limit = ARI_QUANTISED_MAX;
    for (size_t k = 0; k < n; k++) {
        double v = (double)x[k] * scale[k] * row;
        v = v < limit ? v : limit;
        v = v > -limit ? v : -limit;
        q[k] = (int32_t)(uint32_t)(ari_bits64(v + ARI_ROUND_MAGIC) - ARI_ROUND_MAGIC_BITS);
    }
}

/* A strided view is brought into contiguous runs of COLS elements, ROWS rows at a time, 16 KiB and a little so that the
 * rows do not fall onto the same cache sets. */
#define ROWS ((size_t)16)
#define COLS ((size_t)256)
#define RUN (COLS + 16)

ARI_SIMD static void gather_tile(float *restrict run, const float *restrict x, ptrdiff_t row_stride,
                                 ptrdiff_t col_stride, size_t rows, size_t cols)
{
    if (row_stride == 1 && rows == ROWS) {
        for (size_t k = 0; k < cols; k++)
            for (size_t i = 0; i < ROWS; i++)
                run[i * RUN + k] = x[(ptrdiff_t)k * col_stride + (ptrdiff_t)i];
        return;
    }
    for (size_t i = 0; i < rows; i++)
        for (size_t k = 0; k < cols; k++)
            run[i * RUN + k] = x[(ptrdiff_t)i * row_stride + (ptrdiff_t)k * col_stride];
}

/* What the rows of one matrix have in common. */
typedef struct pack_job {
    int32_t *q; /* first element of the destination */
    size_t ld;  /* its row length */
    const float *x;
    ptrdiff_t row_stride, col_stride;
    size_t cols;
    const double *scale; /* [cols] */
    const int32_t *e;    /* [rows] */
} pack_job;

static bool row_is_zero(int32_t e)
{
    return e == ARI_EXP_ZERO || e == ARI_EXP_NONFINITE;
}

static void quantise_row(const pack_job *j, size_t row, size_t from, const float *x, size_t n)
{
    int32_t *out = j->q + row * j->ld + from;
    if (row_is_zero(j->e[row]))
        memset(out, 0, n * sizeof *out);
    else
        quantise_run(out, x, j->scale + from, ari_scale2(1.0, ARI_QUANTISED_BITS - j->e[row]), n);
}

/* Rows [first, first + n), n <= ROWS. */
static void pack_rows(const pack_job *j, size_t first, size_t n)
{
    const float *x = j->x + (ptrdiff_t)first * j->row_stride;
    if (j->col_stride == 1) {
        for (size_t i = 0; i < n; i++)
            quantise_row(j, first + i, 0, x + (ptrdiff_t)i * j->row_stride, j->cols);
        return;
    }
    float run[ROWS * RUN];
    for (size_t k = 0; k < j->cols; k += COLS) {
        const size_t cols = j->cols - k < COLS ? j->cols - k : COLS;
        gather_tile(run, x + (ptrdiff_t)k * j->col_stride, j->row_stride, j->col_stride, n, cols);
        for (size_t i = 0; i < n; i++)
            quantise_row(j, first + i, k, run + i * RUN, cols);
    }
}

/** Slot pack. Errors: AR_ERR_SHAPE (the part does not lie inside p), AR_ERR_MEMORY, AR_ERR_OVERFLOW. */
ar_status ari_cpu_pack(ar_device *d, ARI_AT_ONCE, ar_packed *p, size_t row_at, size_t k_at, const ar_tensor *a,
                       ar_cbuf c, int sign, ar_cbuf e)
{
    const ari_matrices m = ari_matrices_of(a);
    if (m.batch != p->batch || row_at > p->rows || m.rows > p->rows - row_at || k_at > p->k || m.cols > p->k - k_at)
        return ar_error_set(AR_ERR_SHAPE, "pack: [%zu, %zu, %zu] at row %zu, column %zu is outside [%zu, %zu, %zu]",
                            m.batch, m.rows, m.cols, row_at, k_at, p->batch, p->rows, p->k);
    double *scale = NULL;
    AR_TRY(ari_shift_factors(&scale, c.ptr, sign, m.batch, m.cols));
    const int32_t *exponents = e.ptr;
    const size_t blocks = (m.rows + ROWS - 1) / ROWS;
    ARI_PARALLEL_FOR (i, m.batch * blocks, d, m.batch * m.rows * m.cols) {
        const size_t at = i / blocks, first = i % blocks * ROWS;
        const pack_job job = {.q = ari_packed_at(p, at, row_at, k_at),
                              .ld = p->ld,
                              .x = ari_matrix_at(a, at),
                              .row_stride = m.row_stride,
                              .col_stride = m.col_stride,
                              .cols = m.cols,
                              .scale = scale + at * m.cols,
                              .e = exponents + at * p->rows + row_at};
        pack_rows(&job, first, m.rows - first < ROWS ? m.rows - first : ROWS);
    }
    free(scale);
    return AR_OK;
}

/* SPDX-License-Identifier: Apache-2.0 */

#include "ref/core/tensor_private.h"
#include "ref/cpu/row_sum.h"
#include "ref/cpu/storage.h"
#include "ref/numerics/philox.h"

/* Elementwise kernels. ref/numerics/scalar.h defines the functions. Every loop reads an element of all inputs before it
 * writes that element, so outputs may overwrite inputs (same address and strides). */

/* --- add, mul, fill ----------------------------------------------------------------------------------------------- */
ARI_ROW_KERNEL void add_loop(float *y, const float *a, const float *b, size_t n)
{
#pragma GCC ivdep
    for (size_t j = 0; j < n; j++)
        y[j] = ari_add32(a[j], b[j]);
}

ARI_ROW_KERNEL void mul_loop(float *y, const float *a, const float *b, size_t n)
{
#pragma GCC ivdep
    for (size_t j = 0; j < n; j++)
        y[j] = ari_mul32(a[j], b[j]);
}

/* y = loop(a, b), block by block. */
static ar_status for_blocks(ar_device *d, void (*loop)(float *, const float *, const float *, size_t),
                            const ar_tensor *y, const ar_tensor *a, const ar_tensor *b)
{
    const size_t n = ar_tensor_count(y), blocks = ari_blocks_of(n);
    ARI_PARALLEL_FOR (i, blocks, d, n) {
        const size_t length = ari_block_length(n, i);
        const ptrdiff_t offset = (ptrdiff_t)(i * ARI_BLOCK);
        float scratch[3][ARI_BLOCK], *out = ari_run_at(y, offset, scratch[0]);
        loop(out, ari_run_load(a, offset, length, scratch[1]), ari_run_load(b, offset, length, scratch[2]), length);
        ari_run_store(y, offset, length, out);
    }
    return AR_OK;
}

/** Slot add. y may be a or b. */
ar_status ari_cpu_add(ar_device *d, ARI_AT_ONCE, const ar_tensor *y, const ar_tensor *a, const ar_tensor *b)
{
    return for_blocks(d, add_loop, y, a, b);
}

/** Slot mul. y may be a or b. */
ar_status ari_cpu_mul(ar_device *d, ARI_AT_ONCE, const ar_tensor *y, const ar_tensor *a, const ar_tensor *b)
{
    return for_blocks(d, mul_loop, y, a, b);
}

/* y = f(a, b), block by block, with a factor and a cap. */
static ar_status for_capped(ar_device *d, void (*loop)(float *, const float *, const float *, size_t, float, double),
                            const ar_tensor *y, const ar_tensor *a, const ar_tensor *b, float scale, double cap)
{
    const size_t n = ar_tensor_count(y), blocks = ari_blocks_of(n);
    ARI_PARALLEL_FOR (i, blocks, d, n) {
        const size_t length = ari_block_length(n, i);
        const ptrdiff_t offset = (ptrdiff_t)(i * ARI_BLOCK);
        float scratch[3][ARI_BLOCK], *out = ari_run_at(y, offset, scratch[0]);
        const float *left = ari_run_load(a, offset, length, scratch[1]);
        loop(out, left, b ? ari_run_load(b, offset, length, scratch[2]) : left, length, scale, cap);
        ari_run_store(y, offset, length, out);
    }
    return AR_OK;
}

ARI_ROW_KERNEL void softcap_loop(float *y, const float *x, const float *unused, size_t n, float scale, double cap)
{
    (void)unused;
    for (size_t j = 0; j < n; j++)
        y[j] = ari_softcap32(x[j], scale, cap);
}

ARI_ROW_KERNEL void softcap_backward_loop(float *dx, const float *dy, const float *x, size_t n, float scale, double cap)
{
    for (size_t j = 0; j < n; j++)
        dx[j] = ari_dsoftcap32(dy[j], x[j], scale, cap);
}

/** Slot softcap. y may be x. */
ar_status ari_cpu_softcap(ar_device *d, ARI_AT_ONCE, const ar_tensor *y, const ar_tensor *x, float scale, double cap)
{
    return for_capped(d, softcap_loop, y, x, NULL, scale, cap);
}

/** Slot softcap_backward. dx may be dy or x. */
ar_status ari_cpu_softcap_backward(ar_device *d, ARI_AT_ONCE, const ar_tensor *dx, const ar_tensor *dy,
                                   const ar_tensor *x, float scale, double cap)
{
    return for_capped(d, softcap_backward_loop, dx, dy, x, scale, cap);
}

/** Slot fill. */
ar_status ari_cpu_fill(ar_device *d, ARI_AT_ONCE, const ar_tensor *y, float value)
{
    const size_t n = ar_tensor_count(y), blocks = ari_blocks_of(n);
    const float stored = ari_canonical32(value);
    ARI_PARALLEL_FOR (i, blocks, d, n) {
        const size_t length = ari_block_length(n, i);
        const ptrdiff_t offset = (ptrdiff_t)(i * ARI_BLOCK);
        float scratch[ARI_BLOCK], *out = ari_run_at(y, offset, scratch);
        for (size_t j = 0; j < length; j++)
            out[j] = stored;
        ari_run_store(y, offset, length, out);
    }
    return AR_OK;
}

/* --- activations -------------------------------------------------------------------------------------------------- */

/** Slot bias_act. z may be y (then y's own value is lost). */
ar_status ari_cpu_bias_act(ar_device *d, ARI_AT_ONCE, const ar_tensor *y, ar_cbuf bias, ar_activation act,
                           const ar_tensor *z)
{
    const size_t rows = y->shape[0], cols = y->shape[1], blocks = ari_blocks_of(cols);
    const float *added = bias.ptr;
    ARI_PARALLEL_FOR (i, rows * blocks, d, rows * cols) {
        const size_t first_col = i % blocks * ARI_BLOCK, n = ari_block_length(cols, i % blocks);
        const ptrdiff_t offset = (ptrdiff_t)(i / blocks * cols + first_col);
        float scratch[2][ARI_BLOCK], *sums = ari_run_at(y, offset, scratch[0]);
        const float *input = ari_run_load(y, offset, n, scratch[0]);
        if (added) {
            add_loop(sums, input, added + first_col, n);
            ari_run_store(y, offset, n, sums);
        }
        if (act != AR_ACT_NONE) {
            float *values = ari_run_at(z, offset, scratch[1]);
            const float *stored = added ? ari_run_load(y, offset, n, scratch[0]) : input;
            ari_activations(ari_row_kernels_fastest(), &(ari_act_row){.y = values, .x = stored}, n, act);
            ari_run_store(z, offset, n, values);
        }
    }
    return AR_OK;
}

/* Rows of an activation's backward pass, gated or not; x: the gate, or the activation's input. */
typedef struct act_rows {
    ar_activation act;
    const ar_tensor *dx, *dy, *x;
    const ar_tensor *dup, *up; /* NULL: not gated */
} act_rows;

static void make_act_row(const void *user, size_t row, size_t in_block)
{
    (void)in_block;
    const act_rows *a = user;
    const ptrdiff_t i = (ptrdiff_t)row;
    for (size_t first_col = 0, n; first_col < a->dy->shape[1]; first_col += n) {
        float scratch[5][ARI_BLOCK];
        const ptrdiff_t col = (ptrdiff_t)first_col, dx_offset = i * a->dx->stride[0] + col;
        n = ari_block_length(a->dy->shape[1], first_col / ARI_BLOCK);
        ari_act_row r = {.y = ari_run_at(a->dx, dx_offset, scratch[0]),
                         .x = ari_run_load(a->x, i * a->x->stride[0] + col, n, scratch[1]),
                         .dy = ari_run_load(a->dy, i * a->dy->stride[0] + col, n, scratch[2])};
        if (a->up) {
            r.up = ari_run_load(a->up, i * a->up->stride[0] + col, n, scratch[3]);
            r.dup = ari_run_at(a->dup, i * a->dup->stride[0] + col, scratch[4]);
        }
        ari_activations(ari_row_kernels_fastest(), &r, n, a->act);
        ari_run_store(a->dx, dx_offset, n, r.y);
        if (a->up)
            ari_run_store(a->dup, i * a->dup->stride[0] + col, n, r.dup);
    }
}

/** Slot act_backward. */
ar_status ari_cpu_act_backward(ar_device *d, ARI_AT_ONCE, const ar_tensor *dx, const ar_tensor *dy, const ar_tensor *x,
                               ar_activation act, const ar_row_sum *dbias)
{
    const ar_tensor dx_rows = ari_tensor_rows(dx), slope = ari_tensor_rows(dy), x_rows = ari_tensor_rows(x);
    const act_rows rows = {.act = act, .dx = &dx_rows, .dy = &slope, .x = &x_rows};
    const ari_row_pass p = {.rows = x_rows.shape[0],
                            .cols = x_rows.shape[1],
                            .make_row = make_act_row,
                            .user = &rows,
                            .sums = 1,
                            .sum = {{.target = dbias, .terms = dx_rows}}};
    ari_make_rows(d, &p);
    return AR_OK;
}

/** Slot gated_forward. y may be gate or up. */
ar_status ari_cpu_gated_forward(ar_device *d, ARI_AT_ONCE, const ar_tensor *y, const ar_tensor *gate,
                                const ar_tensor *up, ar_activation act)
{
    const size_t rows = y->shape[0], cols = y->shape[1], blocks = ari_blocks_of(cols);
    ARI_PARALLEL_FOR (i, rows * blocks, d, rows * cols) {
        const ptrdiff_t row = (ptrdiff_t)(i / blocks), col = (ptrdiff_t)(i % blocks * ARI_BLOCK);
        const size_t n = ari_block_length(cols, i % blocks);
        const ptrdiff_t offset = row * y->stride[0] + col;
        float scratch[3][ARI_BLOCK], *out = ari_run_at(y, offset, scratch[0]);
        const ari_act_row r = {.y = out,
                               .x = ari_run_load(gate, row * gate->stride[0] + col, n, scratch[1]),
                               .up = ari_run_load(up, row * up->stride[0] + col, n, scratch[2])};
        ari_activations(ari_row_kernels_fastest(), &r, n, act);
        ari_run_store(y, offset, n, out);
    }
    return AR_OK;
}

/** Slot gated_backward. */
ar_status ari_cpu_gated_backward(ar_device *d, ARI_AT_ONCE, const ar_tensor *dgate, const ar_tensor *dup,
                                 const ar_tensor *dy, const ar_tensor *gate, const ar_tensor *up, ar_activation act,
                                 const ar_row_sum *dgate_bias, const ar_row_sum *dup_bias)
{
    const act_rows rows = {.act = act, .dx = dgate, .dy = dy, .x = gate, .dup = dup, .up = up};
    const ari_row_pass p = {.rows = dy->shape[0],
                            .cols = dy->shape[1],
                            .make_row = make_act_row,
                            .user = &rows,
                            .sums = 2,
                            .sum = {{.target = dgate_bias, .terms = *dgate}, {.target = dup_bias, .terms = *dup}}};
    ari_make_rows(d, &p);
    return AR_OK;
}

/* --- dropout ------------------------------------------------------------------------------------------------------ */

/* Number of elements whose bits are drawn before they are used. */
#define LANES ((size_t)64)

/* Drops n consecutive elements, the first of which is number `first_index` of the full value. y may be x, sum may be
 * residual; y may be NULL, and so may sum with residual. */
ARI_ROW_KERNEL void drop_row(float *y, float *sum, const float *x, const float *residual, size_t n, const ar_dropout *w,
                             uint64_t first_index)
{
    float dropped[LANES];
    uint32_t bits[LANES];
    size_t skip = (size_t)(first_index & 3u); /* a block holds four elements, and the row may begin inside one */
    uint64_t block = first_index >> 2;
    for (size_t offset = 0; offset < n; block += LANES / 4) {
        const size_t count = n - offset < LANES - skip ? n - offset : LANES - skip, blocks = (skip + count + 3) / 4;
#pragma GCC ivdep
        for (size_t i = 0; i < blocks; i++)
            ari_random_block(w->key, (block + i) << 2, w->step, 0, bits + 4 * i);
#pragma GCC ivdep
        for (size_t i = 0; i < count; i++) {
            const float scaled = ari_mul32(x[offset + i], w->scale);
            dropped[i] = bits[skip + i] >= w->threshold ? scaled : 0.0f;
        }
        if (y)
            memcpy(y + offset, dropped, count * sizeof *y);
        for (size_t i = 0; sum && i < count; i++)
            sum[offset + i] = ari_add32(residual[offset + i], dropped[i]);
        offset += count;
        skip = 0;
    }
}

/* The number in the full value of the first element of a row. */
static uint64_t number_of(const ar_tensor *x, const ar_dropout *w, size_t row)
{
    uint64_t number = w->first;
    for (int d = x->ndim - 2; d >= 0; d--) {
        number += (uint64_t)(row % x->shape[d]) * w->stride[d];
        row /= x->shape[d];
    }
    return number;
}

/** Slot dropout. */
ar_status ari_cpu_dropout(ar_device *d, ARI_AT_ONCE, const ar_tensor *y, const ar_tensor *sum, const ar_tensor *x,
                          const ar_tensor *residual, const ar_dropout *which)
{
    const size_t n = ar_tensor_count(x), cols = x->ndim > 0 ? x->shape[x->ndim - 1] : 1, rows = n > 0 ? n / cols : 0;
    const size_t blocks = ari_blocks_of(cols);
    ARI_PARALLEL_FOR (i, rows * blocks, d, n * 8) {
        const size_t row = i / blocks, col = i % blocks * ARI_BLOCK, length = ari_block_length(cols, i % blocks);
        const ptrdiff_t offset = (ptrdiff_t)(row * cols + col);
        float scratch[ARI_BLOCK], sum_room[ARI_BLOCK], *out = y ? ari_run_at(y, offset, scratch) : NULL;
        float *to_sum = residual ? ari_run_at(sum, offset, sum_room) : NULL;
        drop_row(out, to_sum, ari_run_load(x, offset, length, scratch),
                 residual ? ari_run_load(residual, offset, length, sum_room) : NULL, length, which,
                 number_of(x, which, row) + col);
        if (y)
            ari_run_store(y, offset, length, out);
        if (residual)
            ari_run_store(sum, offset, length, to_sum);
    }
    return AR_OK;
}

/* --- numbers of fewer bits ---------------------------------------------------------------------------------------- */
/* Limited by memory bandwidth, so threads would not help. */

ARI_ROW_KERNEL void round_loop(float *y, const float *x, size_t n, int bits)
{
#pragma GCC ivdep
    for (size_t j = 0; j < n; j++)
        y[j] = ari_f32_to_bits(x[j], bits);
}

static void round_strided(float *y, ptrdiff_t y_stride, const float *x, ptrdiff_t x_stride, size_t n, int bits)
{
    if (y_stride == 1 && x_stride == 1) {
        round_loop(y, x, n, bits);
        return;
    }
    for (size_t j = 0; j < n; j++)
        y[(ptrdiff_t)j * y_stride] = ari_f32_to_bits(x[(ptrdiff_t)j * x_stride], bits);
}

/** Implements slot round_bits. Errors: none. */
ar_status ari_cpu_round_bits(ar_device *d, ARI_AT_ONCE, const ar_tensor *y, const ar_tensor *x, int bits)
{
    (void)d;
    const size_t row = x->shape[x->ndim - 1], rows = row > 0 ? ar_tensor_count(x) / row : 0;
    for (size_t r = 0; r < rows; r++) {
        size_t rest = r;
        ptrdiff_t y_offset = 0, x_offset = 0;
        for (int i = x->ndim - 2; i >= 0; i--) {
            const ptrdiff_t index = (ptrdiff_t)(rest % x->shape[i]);
            y_offset += index * y->stride[i];
            x_offset += index * x->stride[i];
            rest /= x->shape[i];
        }
        round_strided((float *)y->data.ptr + y_offset, y->stride[x->ndim - 1], (const float *)x->data.ptr + x_offset,
                      x->stride[x->ndim - 1], row, bits);
    }
    return AR_OK;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Plain loops instead of a library. */
#include <limits.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "gpu/blas.h"
#include "ref/core/size.h"
#include "ref/numerics/bits.h"

namespace ari_emulated
{

/* Planes are limited to the size of the L2 cache. */
ari_tile_machine blas_machine(ar_device *)
{
    return {4, 32, 32, static_cast<size_t>(1) << 20, static_cast<size_t>(1) << 20};
}

/* rows of b that stay in the L2 cache while rows of a stream past them */
const size_t COLS = 32;

/* Widens rows to int16, whose pairwise products are one processor instruction. */
ARI_HOT static void widen(int16_t *dst, const int8_t *src, size_t ld, size_t rows, size_t n)
{
    for (size_t i = 0; i < rows; i++)
        for (size_t k = 0; k < n; k++)
            dst[i * n + k] = src[i * ld + k];
}

static ar_status check_sizes(const blas_shape &s, const blas_matrix &c, const blas_matrix &a, const blas_matrix &b)
{
    const size_t sizes[] = {s.m, s.n, s.k, s.batch, a.ld, b.ld, c.ld};
    for (size_t x : sizes)
        if (x == 0 || x > INT_MAX)
            return ar_error_set(AR_ERR_UNSUPPORTED, "%zu int8 products [%zu, %zu] of %zu terms: beyond int", s.batch,
                                s.m, s.n, s.k);
    return AR_OK;
}

/* Checks gpu/blas.h's requirements on operands, as cuBLAS does. */
static ar_status check_operands(const blas_shape &s, const blas_matrix &c, const blas_matrix &a, const blas_matrix &b)
{
    const size_t by_16 = s.k | a.ld | b.ld | (s.batch > 1 ? a.step | b.step : 0), by_4 = s.n | c.ld;
    const uintptr_t address = reinterpret_cast<uintptr_t>(a.data.ptr) | reinterpret_cast<uintptr_t>(b.data.ptr);
    const char *wrong = address % 16 != 0 ? "an operand's address is not a multiple of 16"
                        : by_16 % 16 != 0 ? "k, or an operand's ld or step, is not a multiple of 16"
                        : by_4 % 4 != 0 || reinterpret_cast<uintptr_t>(c.data.ptr) % 4 != 0
                            ? "n, the result's ld or its address is not a multiple of 4"
                        : a.ld < s.k || b.ld < s.k || c.ld < s.n ? "ld is less than a row"
                                                                 : nullptr;
    return wrong ? ar_error_set(AR_ERR_INTERNAL,
                                "%zu int8 products [%zu, %zu] of %zu terms, ld %zu, %zu and %zu, steps %zu and %zu: %s",
                                s.batch, s.m, s.n, s.k, c.ld, a.ld, b.ld, a.step, b.step, wrong)
                 : AR_OK;
}

/* Computes the largest magnitude in each of n columns of one operand's rows. */
ARI_HOT static void column_tops(int16_t *top, const int16_t *rows, size_t count, size_t n)
{
    memset(top, 0, n * sizeof *top);
    for (size_t i = 0; i < count; i++)
        for (size_t k = 0; k < n; k++) {
            const int16_t x = rows[i * n + k], magnitude = static_cast<int16_t>(x < 0 ? -x : x);
            top[k] = magnitude > top[k] ? magnitude : top[k];
        }
}

/* Checks that the sums fit in int32 in any order of additions for any pair of rows; on a GPU they would wrap or
 * saturate. */
static ar_status check_range(const blas_shape &s, const int16_t *left_tops, const int16_t *right_tops)
{
    int64_t max_sum = 0;
    for (size_t k = 0; k < s.k; k++)
        max_sum += left_tops[k] * right_tops[k];
    return max_sum <= INT32_MAX
               ? AR_OK
               : ar_error_set(AR_ERR_INTERNAL,
                              "an int8 product [%zu, %zu] of %zu terms: sums up to %lld do not fit int32", s.m, s.n,
                              s.k, static_cast<long long>(max_sum));
}

/* Multiplies one row of a by four rows of b. */
ARI_HOT static void dot4(int32_t *sum, const int16_t *a, const int16_t *b, size_t n)
{
    const int16_t *b1 = b + n, *b2 = b1 + n, *b3 = b2 + n;
    int32_t s0 = 0, s1 = 0, s2 = 0, s3 = 0;
    for (size_t k = 0; k < n; k++) {
        s0 += a[k] * b[k];
        s1 += a[k] * b1[k];
        s2 += a[k] * b2[k];
        s3 += a[k] * b3[k];
    }
    sum[0] = s0;
    sum[1] = s1;
    sum[2] = s2;
    sum[3] = s3;
}

/* Arguments of a product as a stream runs it. */
struct int8_call {
    blas_shape s;
    size_t ld, step; /* of the result */
    int32_t *dst;
    blas_matrix a, b;
    const int8_t *left, *right;

    ar_status all_matrices(int16_t *rows, int16_t *cols, int16_t *tops) const
    {
        for (size_t g = 0; g < s.batch; g++) {
            widen(rows, left + g * a.step, a.ld, s.m, s.k);
            widen(cols, right + g * b.step, b.ld, s.n, s.k);
            column_tops(tops, rows, s.m, s.k);
            column_tops(tops + s.k, cols, s.n, s.k);
            AR_TRY(check_range(s, tops, tops + s.k));
            for (size_t first_col = 0; first_col < s.n; first_col += COLS)
                for (size_t i = 0; i < s.m; i++)
                    for (size_t j = first_col; j < s.n && j < first_col + COLS; j += 4)
                        dot4(dst + g * step + i * ld + j, rows + i * s.k, cols + j * s.k, s.k);
        }
        return AR_OK;
    }
    static ar_status run(const void *arg)
    {
        const int8_call &p = *static_cast<const int8_call *>(arg);
        size_t words = 0;
        void *memory = nullptr;
        AR_TRY(ari_add_size(&words, p.s.m, p.s.n + 2));
        AR_TRY(ari_mul_size(&words, words, p.s.k));
        AR_TRY(ari_alloc(&memory, words, sizeof(int16_t), "the operands of a product"));
        int16_t *rows = static_cast<int16_t *>(memory), *cols = rows + p.s.m * p.s.k;
        const ar_status st = p.all_matrices(rows, cols, cols + p.s.n * p.s.k);
        ::free(memory);
        return st;
    }
};

ar_status blas_int8(ar_device *d, ar_queue *q, const blas_shape &s, const blas_matrix &c, const blas_matrix &a,
                    const blas_matrix &b)
{
    order o;
    int32_t *dst = dev<int32_t>(c.data);
    const int8_t *left = dev<int8_t>(a.data), *right = dev<int8_t>(b.data);
    AR_TRY(enter(d, q, &o));
    AR_TRY(check_sizes(s, c, a, b));
    AR_TRY(check_operands(s, c, a, b));
    return submit(q, int8_call{s, c.ld, c.step, dst, a, b, left, right});
}

/* Element (row, col) of matrix `batch_index`, as fp32. */
static float element(const blas_matrix &m, const void *x, size_t batch_index, size_t row, size_t col,
                     ar_precision operands)
{
    const size_t i = batch_index * m.step + (m.transposed ? col * m.ld + row : row * m.ld + col);
    if (operands == AR_PRECISION_BF16)
        return ari_float32(static_cast<uint32_t>(static_cast<const uint16_t *>(x)[i]) << 16);
    return static_cast<const float *>(x)[i];
}

ARI_HOT static void add_scaled(float *y, const float *x, float factor, size_t n)
{
    for (size_t j = 0; j < n; j++)
        y[j] += factor * x[j];
}

/* Return and set element i of c. */
static float result_at(const void *c, size_t i, ar_dtype t)
{
    return t == AR_BF16 ? ari_f32_of_bf16(static_cast<const uint16_t *>(c)[i]) : static_cast<const float *>(c)[i];
}
static void set_result(void *c, size_t i, ar_dtype t, float value)
{
    if (t == AR_BF16)
        static_cast<uint16_t *>(c)[i] = ari_bf16_of_f32(value);
    else
        static_cast<float *>(c)[i] = value;
}

/* Computes one matrix of the result, at element `offset` of c; right: [k, n], sum: [n]. An element's terms are added in
 * the order of k. */
static void product(void *dst, ar_dtype result, size_t offset, const blas_shape &s, const blas_matrix &c,
                    const blas_matrix &a, const void *left, size_t batch_index, const float *right, float *sum,
                    bool add, ar_precision operands)
{
    for (size_t i = 0; i < s.m; i++) {
        memset(sum, 0, s.n * sizeof *sum);
        for (size_t k = 0; k < s.k; k++)
            add_scaled(sum, right + k * s.n, element(a, left, batch_index, i, k, operands), s.n);
        for (size_t j = 0; j < s.n; j++)
            set_result(dst, offset + i * c.ld + j, result,
                       add ? result_at(dst, offset + i * c.ld + j, result) + sum[j] : sum[j]);
    }
}

/* The same for floats. */
struct float_call {
    blas_shape s;
    blas_matrix c, a, b;
    void *dst;
    const void *left, *right;
    bool add;
    ar_precision operands;
    ar_dtype result;

    static ar_status run(const void *arg)
    {
        const float_call &p = *static_cast<const float_call *>(arg);
        const blas_shape &s = p.s;
        size_t words = 0;
        void *memory = nullptr;
        AR_TRY(ari_add_size(&words, s.k, 1));
        AR_TRY(ari_mul_size(&words, words, s.n));
        AR_TRY(ari_alloc(&memory, words, sizeof(float), "an operand of a product"));
        float *columns = static_cast<float *>(memory), *sum = columns + s.k * s.n;
        for (size_t g = 0; g < s.batch; g++) {
            for (size_t j = 0; j < s.n; j++)
                for (size_t k = 0; k < s.k; k++)
                    columns[k * s.n + j] = element(p.b, p.right, g, j, k, p.operands);
            product(p.dst, p.result, g * p.c.step, s, p.c, p.a, p.left, g, columns, sum, p.add, p.operands);
        }
        ::free(memory);
        return AR_OK;
    }
};

ar_status blas_float(ar_device *d, ar_queue *q, const blas_shape &s, const blas_matrix &c, const blas_matrix &a,
                     const blas_matrix &b, bool add, ar_precision operands, ar_dtype result)
{
    order o;
    void *dst = dev<char>(c.data);
    const void *left = dev<char>(a.data), *right = dev<char>(b.data);
    AR_TRY(enter(d, q, &o));
    return submit(q, float_call{s, c, a, b, dst, left, right, add, operands, result});
}

} // namespace ari_emulated

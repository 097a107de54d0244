/* SPDX-License-Identifier: Apache-2.0 */
/* Exponents of rows and columns (numerics.md, "Contraction", steps 0 and 1). A group is a row or column of a matrix.
 * Different blocks process parts of it, and combine their maxima by an integer maximum. */
#include "gpu/vectors.h"
#include "ref/core/tensor_private.h"
#include "ref/numerics/integer_sum.h"

namespace ARI_GPU
{
namespace
{

const size_t PART = 8192;   /* elements of a group that a block reads if they are contiguous */
const size_t GROUPS = 32;   /* groups that a block reads if they are contiguous: 128 bytes */
const size_t SPLIT = 8;     /* number of runs of elements in such a group */
const size_t STRETCH = 256; /* number of elements in such a group */

/* Groups are the rows of x; e [matrices, rows]. */
template <class T> struct groups {
    view<const T> x;
    const int32_t *c; /* [matrices, cols] or NULL */
    int32_t sign;
    bool narrow;
    int32_t *e;

    /* Element k of a line of matrix `matrix`. */
    ARI_ON_GPU int32_t exponent(const T *line, size_t matrix, size_t k) const
    {
        const int32_t shift = c ? ari_contract_shift(c[matrix * x.shape[3] + k], sign) : 0;
        return exponent_of(load(line[static_cast<ptrdiff_t>(k) * x.stride[3]]), shift);
    }
    /* The largest of elements [k, k + N), which lie side by side. */
    template <size_t N> ARI_ON_GPU int32_t largest(const T *line, size_t matrix, size_t k) const
    {
        const vector<T, N> v = read_vector<N>(line + k);
        vector<int32_t, N> shift = {};
        if (c)
            shift = read_vector<N>(c + matrix * x.shape[3] + k);
        int32_t max_exponent = ARI_EXP_ZERO;
#pragma unroll
        for (size_t i = 0; i < N; i++) {
            const int32_t column_shift = c ? ari_contract_shift(shift.lane[i], sign) : 0;
            max_exponent = larger(max_exponent, exponent_of(load(v.lane[i]), column_shift));
        }
        return max_exponent;
    }
    ARI_ON_GPU int32_t exponent_of(float value, int32_t shift) const
    {
        return narrow ? ari_contract_exponent_narrow(value, shift) : ari_contract_exponent(value, shift);
    }
    /* True if every line and its shifts are aligned to 16 bytes. */
    bool wide() const
    {
        bool is_aligned = x.shape[3] % ROW_LANES == 0 && aligned<ROW_LANES>(x.data) && aligned<ROW_LANES>(c);
        for (int k = 0; k < 3; k++)
            is_aligned = is_aligned && (x.shape[k] == 1 || x.stride[k] % static_cast<ptrdiff_t>(ROW_LANES) == 0);
        return is_aligned;
    }
};

/* A block processes part of one group, whose elements are contiguous. */
template <class T> ar_status along_lines(ar_device *d, ar_queue *q, const groups<T> &g)
{
    const size_t rows = g.x.shape[2], cols = g.x.shape[3], parts = ceil_div(cols, PART);
    const size_t width = cols < PART ? cols : PART;
    const ari_divisor by_parts = ari_divisor_of(parts);
    const bool side_by_side = g.x.stride[3] == 1, wide = side_by_side && g.wide();
    return launch_blocks(d, q, g.x.matrices() * rows * parts, width, [=] ARI_ON_GPU(const block &b) {
        size_t part = b.index;
        const size_t line = ari_divide(&by_parts, &part), begin = part * PART,
                     matrix = ari_quotient(&g.x.divisor[2], line);
        const size_t n = cols - begin < PART ? cols - begin : PART;
        const T *x = g.x.row(line);
        const int32_t found =
            side_by_side
                ? max_vectors<ROW_LANES>(
                      b, n, wide, [&](auto lanes, size_t i) { return g.template largest<lanes>(x, matrix, begin + i); })
                : b.max(n, [&](size_t i) { return g.exponent(x, matrix, begin + i); });
        b.each(1, [&](size_t) { atomic_max(g.e + line, found); });
    });
}

/* A block processes a stretch of GROUPS groups; elements of different groups are adjacent. */
template <class T> ar_status across_lines(ar_device *d, ar_queue *q, const groups<T> &g)
{
    const size_t rows = g.x.shape[2], cols = g.x.shape[3];
    const size_t bundles = ceil_div(rows, GROUPS), stretches = ceil_div(cols, STRETCH);
    const size_t blocks = g.x.matrices() * bundles * stretches;
    const ari_divisor by_stretches = ari_divisor_of(stretches), by_bundles = ari_divisor_of(bundles);
    return launch_blocks(d, q, blocks, GROUPS * SPLIT * 4, [=] ARI_ON_GPU(const block &b) {
        ARI_SHARED(int32_t, found, [GROUPS * SPLIT]);
        size_t stretch = b.index, bundle = ari_divide(&by_stretches, &stretch);
        const size_t matrix = ari_divide(&by_bundles, &bundle), first_row = bundle * GROUPS, begin = stretch * STRETCH;
        const size_t end = cols - begin < STRETCH ? cols : begin + STRETCH;
        const T *x = g.x.matrix(matrix);
        b.each(GROUPS * SPLIT, [&](size_t i) {
            const size_t row = first_row + i % GROUPS;
            int32_t e = ARI_EXP_ZERO;
            for (size_t k = begin + i / GROUPS; row < rows && k < end; k += SPLIT) {
                const int32_t candidate = g.exponent(x + static_cast<ptrdiff_t>(row) * g.x.stride[2], matrix, k);
                e = candidate > e ? candidate : e;
            }
            found[i] = e;
        });
        b.each(rows - first_row < GROUPS ? rows - first_row : GROUPS, [&](size_t i) {
            int32_t e = found[i];
            for (size_t s = 1; s < SPLIT; s++)
                e = found[s * GROUPS + i] > e ? found[s * GROUPS + i] : e;
            atomic_max(g.e + matrix * rows + first_row + i, e);
        });
    });
}

template <class T>
ar_status exponents(ar_device *d, ar_queue *q, const ar_tensor *a, ar_cbuf c, int32_t sign, ar_buf e, bool max_into,
                    bool narrow)
{
    const groups<T> g = {view_of<const T>(a), dev<int32_t>(c), sign, narrow, dev<int32_t>(e)};
    if (!max_into)
        AR_TRY(launch_each(d, q, g.x.rows(), [e = g.e] ARI_ON_GPU(size_t i) { e[i] = ARI_EXP_ZERO; }));
    return g.x.stride[3] == 1 || g.x.shape[2] == 1 ? along_lines(d, q, g) : across_lines(d, q, g);
}

} // namespace

ar_status col_exponents(ar_device *d, ar_queue *q, ar_buf c, const ar_tensor *b, bool max_into)
{
    const ar_tensor columns = ari_tensor_transposed(b);
    return ARI_BY_DTYPE(b, exponents)(d, q, &columns, {nullptr}, 1, c, max_into, false);
}

ar_status row_exponents(ar_device *d, ar_queue *q, ar_buf e, const ar_tensor *a, ar_cbuf c, int sign, bool max_into,
                        bool narrow)
{
    return ARI_BY_DTYPE(a, exponents)(d, q, a, c, sign, e, max_into, narrow);
}

} // namespace ARI_GPU

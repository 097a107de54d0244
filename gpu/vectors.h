/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Processes several adjacent elements per thread, since a GPU reaches its memory bandwidth with loads and stores of 16
 * bytes. A kernel is written once for N elements, where N is a constant derived from the type of its first argument:
 *
 *    launch_vectors<W>(d, q, n, aligned<W>(a, b), [=] ARI_ON_GPU(auto lanes, size_t i) {
 *        constexpr size_t N = lanes;                    W, or 1
 *        const vector<T, N> x = read_vector<N>(a + i);  before anything is written: b may be a
 *        ...
 *        write_vector(b + i, y);
 *    })
 *
 * The host decides for a whole launch whether the alignment allows vectors; remaining elements are processed one by
 * one. */
#include "gpu/kernels.h"

namespace ARI_GPU
{

/* Elements of any dtype that a thread processes at once if it computes in binary64 or int64. */
constexpr size_t ROW_LANES = 4;

template <size_t N> struct lane_count {
    ARI_ON_GPU constexpr operator size_t() const
    {
        return N;
    }
};

template <class T, size_t N> struct vector {
    T lane[N];
};
/* Number of elements that one instruction moves. */
template <class T, size_t N> constexpr size_t moved_at_once = N * sizeof(T) > 16 ? 16 / sizeof(T) : N;

template <size_t N, class T> ARI_ON_GPU vector<T, N> read_vector(const T *src)
{
    constexpr size_t M = moved_at_once<T, N>;
    vector<T, N> v;
#pragma unroll
    for (size_t i = 0; i < N; i += M) {
        const ari_lanes<T, M> part = load_whole<M>(src + i);
#pragma unroll
        for (size_t k = 0; k < M; k++)
            v.lane[i + k] = part.lane[k];
    }
    return v;
}

template <class T, size_t N> ARI_ON_GPU void write_vector(T *dst, const vector<T, N> &v)
{
    constexpr size_t M = moved_at_once<T, N>;
#pragma unroll
    for (size_t i = 0; i < N; i += M) {
        ari_lanes<T, M> part;
#pragma unroll
        for (size_t k = 0; k < M; k++)
            part.lane[k] = v.lane[i + k];
        store_whole(dst + i, part);
    }
}

/* {f(0), .., f(N - 1)}. */
template <size_t N, class F> ARI_ON_GPU auto vector_of(F f)
{
    vector<decltype(f(size_t(0))), N> v;
#pragma unroll
    for (size_t k = 0; k < N; k++)
        v.lane[k] = f(k);
    return v;
}
template <class T> ARI_ON_GPU T stored(float x)
{
    T element;
    store(&element, x);
    return element;
}

/* {f(0), .., f(N - 1)} as elements of that type. */
template <size_t N, class T, class F> ARI_ON_GPU void write_stored(T *dst, F f)
{
    write_vector(dst, vector_of<N>([&](size_t k) { return stored<T>(f(k)); }));
}

ARI_ON_GPU inline int32_t larger(int32_t a, int32_t b)
{
    return a > b ? a : b;
}

/* Returns true if vectors of W elements may begin at each of these addresses; NULL: unused. */
template <size_t W, class... T> bool aligned(const T *...address)
{
    return (... && (reinterpret_cast<uintptr_t>(address) % (moved_at_once<T, W> * sizeof(T)) == 0));
}

/* --- a row, by the threads of a block ----------------------------------------------------------------------------- */

/* Runs step i of a loop over n elements, whose first `vectors` steps process W elements each. */
template <size_t W, class F> ARI_ON_GPU auto vector_step(size_t i, size_t vectors, F f)
{
    return i < vectors ? f(lane_count<W>(), i * W) : f(lane_count<1>(), i + vectors * (W - 1));
}
ARI_ON_GPU inline size_t vector_steps(size_t n, size_t vectors, size_t w)
{
    return n - vectors * (w - 1);
}

/* Calls f(N, i) for elements [i, i + N) until all n are done; wide: the first element is aligned. */
template <size_t W, class F> ARI_ON_GPU void each_vector(const block &b, size_t n, bool wide, F f)
{
    const size_t vectors = wide ? n / W : 0;
    b.each(vector_steps(n, vectors, W), [&](size_t i) { vector_step<W>(i, vectors, f); });
}
/* Return the sum, or the largest, of the values of f. */
template <size_t W, class F> ARI_ON_GPU uint64_t sum_vectors(const block &b, size_t n, bool wide, F f)
{
    const size_t vectors = wide ? n / W : 0;
    return b.sum(vector_steps(n, vectors, W), [&](size_t i) { return vector_step<W>(i, vectors, f); });
}
template <size_t W, class F> ARI_ON_GPU int32_t max_vectors(const block &b, size_t n, bool wide, F f)
{
    const size_t vectors = wide ? n / W : 0;
    return b.max(vector_steps(n, vectors, W), [&](size_t i) { return vector_step<W>(i, vectors, f); });
}

/* Sums along a row (numerics.md, "Sums along a row"): an integer maximum, then an integer sum. terms(N, j) returns the
 * exact values j to j + N in binary64, and is called once in each of the two. */

/* The integer sum over n terms below 2^e. */
template <size_t W, class F>
ARI_ON_GPU int64_t row_integer(const block &b, size_t n, bool wide, int32_t e, int32_t p, F terms)
{
    return static_cast<int64_t>(sum_vectors<W>(b, n, wide, [&](auto lanes, size_t j) {
        constexpr size_t N = lanes;
        const vector<double, N> v = terms(lanes, j);
        uint64_t sum = 0;
#pragma unroll
        for (size_t k = 0; k < N; k++)
            sum += static_cast<uint64_t>(ari_rowsum_quantise(v.lane[k], e, p));
        return sum;
    }));
}

/* The sum of n terms. */
template <size_t W, class F> ARI_ON_GPU double row_sum(const block &b, size_t n, bool wide, int32_t p, F terms)
{
    const int32_t e = max_vectors<W>(b, n, wide, [&](auto lanes, size_t j) {
        constexpr size_t N = lanes;
        const vector<double, N> v = terms(lanes, j);
        int32_t max_exponent = ari_exponent64(v.lane[0]);
#pragma unroll
        for (size_t k = 1; k < N; k++)
            max_exponent = larger(max_exponent, ari_exponent64(v.lane[k]));
        return max_exponent;
    });
    return ari_rowsum_value(row_integer<W>(b, n, wide, e, p, terms), e, p);
}

/* --- all elements of tensors -------------------------------------------------------------------------------------- */

/* Calls f(N, i) for elements [i, i + N) until all n have been processed. */
template <size_t W, class F> ar_status launch_vectors(ar_device *d, ar_queue *q, size_t n, bool wide, const F &f)
{
    const size_t vectors = wide ? n / W : 0;
    return launch_each(d, q, n - vectors * (W - 1), [=] ARI_ON_GPU(size_t i) { vector_step<W>(i, vectors, f); });
}

/* Calls f(N, row, col) for elements [col, col + N) of each row; wide: W divides cols, and all rows are aligned. */
template <size_t W, class F>
ar_status launch_row_vectors(ar_device *d, ar_queue *q, size_t rows, size_t cols, bool wide, const F &f)
{
    const size_t row_steps = wide ? cols / W : cols;
    const ari_divisor by_each = ari_divisor_of(row_steps);
    return launch_each(d, q, rows * row_steps, [=] ARI_ON_GPU(size_t i) {
        const size_t row = ari_divide(&by_each, &i);
        if (wide)
            f(lane_count<W>(), row, i * W);
        else
            f(lane_count<1>(), row, i);
    });
}

/* Computes *y = f(a, b) element by element; y may be a or b. If b is NULL, f must not use its second argument. */
template <class T, class F> ar_status map(ar_device *d, ar_queue *q, size_t n, T *y, const T *a, const T *b, const F &f)
{
    constexpr size_t W = 16 / sizeof(T);
    return launch_vectors<W>(d, q, n, aligned<W>(y, a, b), [=] ARI_ON_GPU(auto lanes, size_t i) {
        constexpr size_t N = lanes;
        const vector<T, N> left = read_vector<N>(a + i), right = b ? read_vector<N>(b + i) : left;
        write_stored<N>(y + i, [&](size_t k) { return f(load(left.lane[k]), load(right.lane[k])); });
    });
}

} // namespace ARI_GPU

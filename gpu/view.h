/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_GPU_VIEW_H
#define ARI_GPU_VIEW_H

/* ar_tensor as a kernel sees it: its memory made reachable, dimensions of extent 1 in front until there are four. T is
 * const where the kernel only reads. */
#include "gpu/kernel.h"

namespace ARI_GPU
{

/* The index of one element in each dimension. */
struct place {
    ptrdiff_t at[AR_MAX_DIMS];
};

template <class T> struct view {
    T *data;
    size_t shape[AR_MAX_DIMS];
    ptrdiff_t stride[AR_MAX_DIMS]; /* elements */

    /* Number of elements, of rows (every dimension but the last), of matrices (every one but the last two). */
    size_t count() const
    {
        return rows() * shape[3];
    }
    size_t rows() const
    {
        return matrices() * shape[2];
    }
    size_t matrices() const
    {
        return shape[0] * shape[1];
    }
    /* Where element i lies, in row-major order of the shape. */
    ARI_KERNEL T *at(size_t i) const
    {
        return at(where(i));
    }
    /* The same in two steps, for views of one shape: the divisions are made once. */
    ARI_KERNEL place where(size_t i) const
    {
        place p;
        for (int k = AR_MAX_DIMS - 1; k >= 0; k--) {
            p.at[k] = static_cast<ptrdiff_t>(i % shape[k]);
            i /= shape[k];
        }
        return p;
    }
    ARI_KERNEL T *at(const place &p) const
    {
        return data + p.at[0] * stride[0] + p.at[1] * stride[1] + p.at[2] * stride[2] + p.at[3] * stride[3];
    }
    /* The first element of row r, and of matrix m. */
    ARI_KERNEL T *row(size_t r) const
    {
        return matrix(r / shape[2]) + static_cast<ptrdiff_t>(r % shape[2]) * stride[2];
    }
    ARI_KERNEL T *matrix(size_t m) const
    {
        return data + static_cast<ptrdiff_t>(m / shape[1]) * stride[0] +
               static_cast<ptrdiff_t>(m % shape[1]) * stride[1];
    }
};

/* The view of a tensor whose elements are T (const T). */
template <class T> view<T> view_of(const ar_tensor *t)
{
    const int missing = AR_MAX_DIMS - t->ndim;
    view<T> v = {dev<T>(t->data), {1, 1, 1, 1}, {0, 0, 0, 0}};
    for (int i = 0; i < t->ndim; i++) {
        v.shape[missing + i] = t->shape[i];
        v.stride[missing + i] = t->stride[i];
    }
    return v;
}

} // namespace ARI_GPU

#endif

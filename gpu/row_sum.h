/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_GPU_ROW_SUM_H
#define ARI_GPU_ROW_SUM_H

/* Sums along a row by the threads of a block (docs/numerics.md, "Sums along a row"): an integer maximum, then an
 * integer sum. term(j) is the row's value j in binary64, exact; it is asked for once in each of them. */
#include "gpu/kernel.h"
#include "ref/numerics/scalar.h"

namespace ARI_GPU
{

/* The integer sum over n terms below 2^e. */
template <class F> ARI_KERNEL int64_t row_integer(const block &b, size_t n, int32_t e, int32_t p, F term)
{
    return static_cast<int64_t>(
        b.sum(n, [&](size_t j) { return static_cast<uint64_t>(ari_rowsum_quantise(term(j), e, p)); }));
}

/* The sum of n terms. */
template <class F> ARI_KERNEL double row_sum(const block &b, size_t n, int32_t p, F term)
{
    const int32_t e = b.max(n, [&](size_t j) { return ari_exponent64(term(j)); });
    return ari_rowsum_value(row_integer(b, n, e, p, term), e, p);
}

} // namespace ARI_GPU

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* One thread an element; the definitions are those of ref/numerics. */
#include "gpu/kernels.h"
#include "ref/numerics/scalar.h"

namespace ARI_GPU
{

struct add_each {
    float *y;
    const float *a, *b;
    ARI_KERNEL void operator()(size_t i) const
    {
        y[i] = ari_add32(a[i], b[i]);
    }
};

ar_status add(ar_device *d, ar_queue *q, ar_buf y, ar_cbuf a, ar_cbuf b, size_t n)
{
    return launch_each(d, q, n, add_each{dev<float>(y), dev<float>(a), dev<float>(b)});
}

} // namespace ARI_GPU

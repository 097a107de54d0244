/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "ref/core/reduce.h"
#include "ref/cpu/row_kernels.h"

/** Slot combine. Errors: AR_ERR_ARG (no input). */
ar_status ari_cpu_combine(ar_device *d, ar_queue *q, ar_buf out, const ar_cbuf *in, int n, size_t count, ar_dtype t,
                          ar_op op)
{
    (void)d;
    (void)q;
    if (n < 1)
        return ar_error_set(AR_ERR_ARG, "combine: %d inputs, expected at least 1", n);
    const ari_reduce kernel = ari_reduce_kernel(t, op);
    const size_t element = ar_dtype_bytes(t);
    uint64_t sum[512]; /* piece by piece, so that an input may be `out` */
    const size_t piece = sizeof sum / element;
    for (size_t from = 0; from < count; from += piece) {
        const size_t size = count - from < piece ? count - from : piece;
        memcpy(sum, (const char *)in[0].ptr + from * element, size * element);
        for (int i = 1; i < n; i++)
            kernel.two(sum, sum, (const char *)in[i].ptr + from * element, size);
        if (kernel.finish)
            kernel.finish(sum, size, n);
        memcpy((char *)out.ptr + from * element, sum, size * element);
    }
    return AR_OK;
}

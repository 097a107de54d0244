/* SPDX-License-Identifier: Apache-2.0 */
/* Slots whose kernels do not exist yet. */
#include "gpu/kernels.h"

namespace ARI_GPU
{

ar_status gemm_f32(ar_device *, ar_queue *, const ar_tensor *, const ar_tensor *, const ar_tensor *, bool, ar_precision)
{
    return ar_error_set(AR_ERR_UNSUPPORTED, "gemm_f32: not in this build");
}

ar_status acc_add(ar_device *, ar_queue *, ar_buf, ar_buf, size_t, const ar_tensor *, ar_cbuf)
{
    return ar_error_set(AR_ERR_UNSUPPORTED, "acc_add: not in this build");
}

ar_status acc_raise(ar_device *, ar_queue *, ar_buf, ar_buf, ar_cbuf, size_t)
{
    return ar_error_set(AR_ERR_UNSUPPORTED, "acc_raise: not in this build");
}

ar_status acc_value(ar_device *, ar_queue *, const ar_tensor *, ar_cbuf, ar_cbuf, size_t)
{
    return ar_error_set(AR_ERR_UNSUPPORTED, "acc_value: not in this build");
}

ar_status sum_rows_f32(ar_device *, ar_queue *, ar_buf, size_t, const ar_tensor *, ar_cbuf)
{
    return ar_error_set(AR_ERR_UNSUPPORTED, "sum_rows_f32: not in this build");
}

} // namespace ARI_GPU

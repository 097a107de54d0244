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

ar_status rows_in_range(ar_device *, ar_queue *, ar_buf, ar_cbuf, size_t, int64_t, int64_t)
{
    return ar_error_set(AR_ERR_UNSUPPORTED, "rows_in_range: not in this build");
}

ar_status gather_rows(ar_device *, ar_queue *, ar_buf, const ar_tensor *, ar_cbuf, size_t)
{
    return ar_error_set(AR_ERR_UNSUPPORTED, "gather_rows: not in this build");
}

ar_status ce_max(ar_device *, ar_queue *, ar_buf, ar_cbuf, size_t, size_t)
{
    return ar_error_set(AR_ERR_UNSUPPORTED, "ce_max: not in this build");
}

ar_status ce_sum(ar_device *, ar_queue *, ar_buf, ar_cbuf, ar_cbuf, size_t, size_t, size_t)
{
    return ar_error_set(AR_ERR_UNSUPPORTED, "ce_sum: not in this build");
}

ar_status ce_target(ar_device *, ar_queue *, ar_buf, ar_cbuf, ar_cbuf, size_t, size_t)
{
    return ar_error_set(AR_ERR_UNSUPPORTED, "ce_target: not in this build");
}

ar_status ce_terms(ar_device *, ar_queue *, ar_buf, ar_cbuf, ar_cbuf, ar_cbuf, ar_cbuf, size_t, size_t)
{
    return ar_error_set(AR_ERR_UNSUPPORTED, "ce_terms: not in this build");
}

ar_status ce_backward(ar_device *, ar_queue *, ar_buf, ar_cbuf, ar_cbuf, ar_cbuf, ar_cbuf, ar_cbuf, double, size_t,
                      size_t, size_t)
{
    return ar_error_set(AR_ERR_UNSUPPORTED, "ce_backward: not in this build");
}

} // namespace ARI_GPU

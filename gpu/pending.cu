/* SPDX-License-Identifier: Apache-2.0 */
/* Slots whose kernels do not exist yet. */
#include "gpu/kernels.h"

namespace ARI_GPU
{

ar_status gemm_f32(ar_device *, ar_queue *, const ar_tensor *, const ar_tensor *, const ar_tensor *, bool, ar_precision)
{
    return ar_error_set(AR_ERR_UNSUPPORTED, "gemm_f32: not in this build");
}

} // namespace ARI_GPU

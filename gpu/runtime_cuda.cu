/* SPDX-License-Identifier: Apache-2.0 */
/* The CUDA device's memory and queues. */
#include "gpu/runtime.h"
#include "gpu/table.h"

namespace ari_cuda
{

ar_status launched(const char *what)
{
    const cudaError_t e = cudaGetLastError();
    return e == cudaSuccess ? AR_OK : ar_error_set(AR_ERR_DEVICE, "%s: %s", what, cudaGetErrorString(e));
}

} // namespace ari_cuda

/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_GPU_DRIVER_CUDA_H
#define ARI_GPU_DRIVER_CUDA_H

#include "anyrank/status.h"

namespace ari_cuda
{

/* Whether the library can compute on this GPU. Errors: AR_ERR_UNSUPPORTED, saying what is missing. */
ar_status check_gpu(int index);

} // namespace ari_cuda

#endif

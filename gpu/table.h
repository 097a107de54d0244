/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_GPU_TABLE_H
#define ARI_GPU_TABLE_H

#include "gpu/kernel.h"

namespace ARI_GPU
{

/* Every slot filled. */
ar_device_ops table_of(const char *name);

} // namespace ARI_GPU

#endif

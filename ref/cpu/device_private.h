/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/device.h"

/* Private functions of anyrank/device.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** Chooses BLIS's kernels by CPUID before its first call (its own choice is slow or wrong on new processors), unless
 *  BLIS_ARCH_TYPE is set; a build with another library leaves it the choice. Call it once, before any thread is started
 *  and before any product; a library user who does not call it gets BLIS's own choice. Modifies the environment of this
 *  process. */
void ari_cpu_select_kernels(void);
void ari_cpu_info_get(ar_cpu_info *out);

AR_END_DECLS

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/device.h"

/* Private functions of anyrank/device.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** Chooses BLIS's kernels by CPUID before its first call, unless BLIS_ARCH_TYPE is set, because BLIS's choice is slow
 *  or wrong on new processors. With another library this does nothing. Call it once, before starting any thread and
 *  before any product; a library user who does not call it gets BLIS's choice. Modifies the process's environment. */
void ari_cpu_select_kernels(void);
void ari_cpu_info_get(ar_cpu_info *out);

AR_END_DECLS

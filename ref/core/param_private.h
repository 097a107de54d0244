/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/param.h"

/* Private functions of anyrank/param.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** The layer's matrix [out, in] (or vector [n]) as a view of the value. */
ar_tensor ari_param_matrix(const ar_param *p);

AR_END_DECLS

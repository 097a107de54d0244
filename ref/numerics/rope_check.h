/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_NUMERICS_ROPE_CHECK_H
#define ARI_NUMERICS_ROPE_CHECK_H

#include <stddef.h>

#include "anyrank/config.h"
#include "anyrank/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Whether the slot rope_tables can make these tables. Errors: AR_ERR_ARG (head_dim odd, a factor not positive, or a
 *  last position whose angle is 2^20 or more: sine and cosine are defined below that). */
AR_NODISCARD ar_status ari_rope_check(size_t positions, size_t head_dim, double theta, double factor,
                                      const ar_rope_llama3 *llama3);

#ifdef __cplusplus
}
#endif
#endif

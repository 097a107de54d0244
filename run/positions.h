/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_RUN_POSITIONS_H
#define ARI_RUN_POSITIONS_H

#include <stddef.h>

#include "anyrank/config.h"
#include "anyrank/status.h"

/** Refuses rotary angles of 2^20 and more, for which sine and cosine are not defined (docs/numerics.md): the baseline
 *  would compute NaN and every rank stop. Only a rope_theta below 1 or a very long sequence has them. Errors:
 *  AR_ERR_CONFIG. */
AR_NODISCARD ar_status ari_check_angles(const ar_config *c, size_t seq);

#endif

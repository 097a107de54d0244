/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/train.h"

/* Private functions of anyrank/train.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** Steps taken. */
uint64_t ari_optimizer_steps(const ar_optimizer *o);
/** Returns the size of the optimizer's state in bytes. */
size_t ari_optimizer_bytes(const ar_optimizer *o);
/** Checks loss scaling's options. Errors: AR_ERR_ARG, naming the option: 1 <= scale <= 2^126; dynamic: growth > 1, 0 <
 *  backoff < 1, interval >= 1. */
AR_NODISCARD ar_status ari_loss_scaling_check(const ar_loss_scaling *s);

AR_END_DECLS

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/optimizer.h"

/* Private functions of anyrank/optimizer.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** Checks the options. Errors: AR_ERR_ARG, naming the option and its range: lr >= 0, 0 <= momentum < 1 and finite, 0 <=
 *  beta < 1, eps > 0, weight_decay >= 0, nesterov with momentum > 0; cosine: total_steps >= 1, warmup_steps <=
 *  total_steps, 0 <= min_lr <= lr; constant: min_lr 0; groups <= AR_PARAM_GROUPS, each with a nonempty, terminated
 *  glob, lr_scale >= 0, and weight_decay >= 0 or NaN. */
AR_NODISCARD ar_status ari_optimizer_check(const ar_optimizer_options *o);
/** Returns the learning rate of step 1, 2, .. before a group's scale. The options must pass ari_optimizer_check. */
double ari_optimizer_lr(const ar_optimizer_options *o, uint64_t step);

AR_END_DECLS

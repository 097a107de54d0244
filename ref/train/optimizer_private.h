/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/optimizer.h"

/* Private functions of anyrank/optimizer.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** Errors: AR_ERR_ARG, naming the option and its range: lr >= 0, 0 <= momentum < 1 .. finite, 0 <= beta < 1, eps > 0,
 *  weight_decay >= 0, nesterov with momentum 0; cosine: total_steps >= 1, warmup_steps <= total_steps, 0 <= min_lr <=
 *  lr; constant: min_lr 0; groups <= AR_PARAM_GROUPS, each with a glob that is neither empty nor without its final 0,
 *  lr_scale >= 0, weight_decay >= 0 or NaN. */
AR_NODISCARD ar_status ari_optimizer_check(const ar_optimizer_options *o);
/** The learning rate of step 1, 2, .., before a group's scale. The options are those that ari_optimizer_check takes. */
double ari_optimizer_lr(const ar_optimizer_options *o, uint64_t step);

AR_END_DECLS

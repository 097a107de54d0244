/* SPDX-License-Identifier: Apache-2.0 */
/* Counting the uses of parameters, for layers that a caller runs without ar_module_forward and ar_module_backward. */
#ifndef ARI_LAYERS_USES_H
#define ARI_LAYERS_USES_H

#include "anyrank/module.h"

/** ar_param_use of the module's own parameters, where a backward pass will follow (saved is not NULL). */
AR_NODISCARD ar_status ari_module_use(ar_module *m, ar_ctx *ctx, const ar_saved *saved);
/** ar_param_done of them: their gradients have been added. */
AR_NODISCARD ar_status ari_module_done(ar_module *m, ar_ctx *ctx);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/train.h"

ar_status ar_optimizer_create(ar_optimizer **gives, ar_ctx *ctx, ar_param *const *params, size_t n,
                              const ar_optimizer_options *o)
{
    (void)gives, (void)ctx, (void)params, (void)n, (void)o;
    return ar_error_set(AR_ERR_UNSUPPORTED, "optimizers are not in this version");
}

void ar_optimizer_destroy(ar_optimizer *o)
{
    (void)o;
}

size_t ar_optimizer_bytes(const ar_optimizer *o)
{
    (void)o;
    return 0;
}

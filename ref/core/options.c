/* SPDX-License-Identifier: Apache-2.0 */
/* Meaning of a context's options, for all readers. */
#include <math.h>

#include "anyrank/context.h"
#include "ref/core/context_private.h"

ar_dtype ari_activations_of(ar_precision p)
{
    return p == AR_PRECISION_BF16 ? AR_BF16 : AR_F32;
}

ar_dtype ari_matrix_dtype(ar_precision p, ar_dtype storage)
{
    return p == AR_PRECISION_BF16 || storage == AR_BF16 ? AR_BF16 : AR_F32;
}

ar_status ari_loss_options_check(const ar_loss_options *o, const char *label)
{
    if (!(o->label_smoothing >= 0.0 && o->label_smoothing < 1.0))
        return ar_error_set(AR_ERR_ARG, "%s: a label smoothing of %g: a number from 0 to below 1", label,
                            o->label_smoothing);
    if (!(o->z_loss >= 0.0) || isinf(o->z_loss))
        return ar_error_set(AR_ERR_ARG, "%s: a z-loss of weight %g: a finite number from 0", label, o->z_loss);
    const ar_router_losses *r = &o->router;
    if ((unsigned)r->balance >= AR_BALANCES || !(r->balance_weight >= 0.0) || isinf(r->balance_weight) ||
        !(r->z_loss >= 0.0) || isinf(r->z_loss) || !(r->bias_update >= 0.0) || isinf((float)r->bias_update))
        return ar_error_set(
            AR_ERR_ARG,
            "%s: a balance %d of routers of weight %g, a z-loss of weight %g and an update of their bias by "
            "%g: for each a finite number from 0",
            label, (int)r->balance, r->balance_weight, r->z_loss, r->bias_update);
    return AR_OK;
}

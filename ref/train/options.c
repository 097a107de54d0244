/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

#include "anyrank/optimizer.h"

ar_optimizer_options ar_optimizer_defaults(ar_optimizer_kind kind)
{
    return (ar_optimizer_options){.kind = kind,
                                  .lr = 1e-3,
                                  .beta1 = 0.9,
                                  .beta2 = 0.999,
                                  .eps = 1e-8,
                                  .weight_decay = kind == AR_OPTIMIZER_ADAMW ? 0.01 : 0.0};
}

static ar_status refuse(const ar_optimizer_options *o, const char *option, double value, const char *range)
{
    return ar_error_set(AR_ERR_ARG, "optimizer %s: %s is %g, expected %s", ar_optimizer_name(o->kind), option, value,
                        range);
}

/* A NaN is in no range. */
static ar_status check_fraction(const ar_optimizer_options *o, const char *option, double value)
{
    return value >= 0.0 && value < 1.0 ? AR_OK : refuse(o, option, value, "at least 0 and below 1");
}

static ar_status check_amount(const ar_optimizer_options *o, const char *option, double value)
{
    return value >= 0.0 && isfinite(value) ? AR_OK : refuse(o, option, value, "a finite number, at least 0");
}

ar_status ar_optimizer_check(const ar_optimizer_options *o)
{
    if (o->kind != AR_OPTIMIZER_SGD && o->kind != AR_OPTIMIZER_ADAM && o->kind != AR_OPTIMIZER_ADAMW)
        return ar_error_set(AR_ERR_ARG, "optimizer kind %d, expected sgd, adam or adamw", (int)o->kind);
    AR_TRY(check_amount(o, "lr", o->lr));
    AR_TRY(check_amount(o, "weight_decay", o->weight_decay));
    if (o->kind == AR_OPTIMIZER_SGD) {
        AR_TRY(check_fraction(o, "momentum", o->momentum));
        if (o->nesterov && o->momentum == 0.0)
            return refuse(o, "momentum", o->momentum, "above 0 with nesterov");
        return AR_OK;
    }
    AR_TRY(check_fraction(o, "beta1", o->beta1));
    AR_TRY(check_fraction(o, "beta2", o->beta2));
    /* In fp32: 0 would divide the moments of a weight without gradients by 0. */
    const float eps = (float)o->eps;
    return eps > 0.0f && isfinite(eps) ? AR_OK : refuse(o, "eps", o->eps, "a finite number above 0 in fp32");
}

const char *ar_optimizer_name(ar_optimizer_kind kind)
{
    static const char *const names[] = {
        [AR_OPTIMIZER_SGD] = "sgd", [AR_OPTIMIZER_ADAM] = "adam", [AR_OPTIMIZER_ADAMW] = "adamw"};
    return kind >= AR_OPTIMIZER_SGD && kind <= AR_OPTIMIZER_ADAMW ? names[kind] : "?";
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/step_options.h"

#include <math.h>

ar_status ari_dropout_check(double dropout)
{
    if (dropout >= 1.0)
        return ar_error_set(AR_ERR_ARG, "--dropout %g drops everything: give a probability from 0 to below 1", dropout);
    return AR_OK;
}

double ari_or_else(double given, double otherwise)
{
    return isnan(given) ? otherwise : given;
}

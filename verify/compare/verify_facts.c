/* SPDX-License-Identifier: Apache-2.0 */
/* Facts that follow from a single row of a report. */
#include <math.h>
#include <string.h>

#include "verify/compare/report.h"
#include "verify/compare/verify_impl.h"

bool ari_is_loss(const ar_verify_row *r)
{
    const size_t n = ari_order_of(r->name, NULL).stem;
    return r->pass == 'f' && r->elements == 1 && n == 4 && memcmp(r->name, "loss", n) == 0;
}

/* --- rounding ----------------------------------------------------------------------------------------------------- */

double ari_roundoff_of(ar_dtype t)
{
    const ari_format f = ari_format_of(t);
    return f.is_float && f.bits >= 16 ? ldexp(0.5, -f.mantissa) : 0.0;
}

double ari_roundoff_allowed(const char *allows)
{
    static const struct {
        const char *begin;
        double roundoff;
    } arithmetics[] = {{"bf16", 0x1p-8}, {"f16", 0x1p-11}, {"tf32", 0x1p-11}};
    for (size_t i = 0; i < sizeof arithmetics / sizeof *arithmetics; i++) {
        if (strncmp(allows, arithmetics[i].begin, strlen(arithmetics[i].begin)) == 0)
            return arithmetics[i].roundoff;
    }
    return 0.0;
}

bool ari_is_by_rounding(const ar_verify_row *row)
{
    const double u = ari_roundoff_of(row->dtype);
    if (row->off_by_factor)
        return false;
    return row->nan[0] == row->nan[1] && row->inf[0] == row->inf[1] && isfinite(row->worst.value[0]) &&
           isfinite(row->worst.value[1]) && row->rms <= fmin(16.0 * u, 0.01) * row->rms_reference &&
           row->max_abs <= fmin(256.0 * u, 0.05) * row->max_reference;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/verify_report.h"

#include <math.h>
#include <stdio.h>

#include "ref/core/size.h"
#include "ref/io/safetensors.h"

const char *ari_verify_shape_text(char *out, int ndim, const size_t *shape)
{
    ari_st_shape_text(out, ARI_VERIFY_TEXT, ndim, shape);
    return out;
}

const char *ari_verify_index_text(char *out, const ar_verify_row *r, size_t element)
{
    size_t at[AR_ST_MAX_DIMS] = {0};
    ari_coordinates(at, element, r->ndim, r->shape);
    return ari_verify_shape_text(out, r->ndim, at);
}

const char *ari_verify_value_text(char *out, ar_dtype t, double x)
{
    const bool wide = t == AR_F64 || t == AR_I64 || t == AR_U64 || t == AR_I32 || t == AR_U32;
    snprintf(out, ARI_VERIFY_TEXT, "%.*g", wide ? 17 : 9, x);
    return out;
}

const char *ari_verify_size_text(char *out, const ar_verify_row *r)
{
    const double a = r->worst_value[0], b = r->worst_value[1];
    if (isnan(a) != isnan(b))
        snprintf(out, ARI_VERIFY_TEXT, "NaN");
    else if (!isnan(a) && isinf(a - b))
        snprintf(out, ARI_VERIFY_TEXT, "inf");
    else
        snprintf(out, ARI_VERIFY_TEXT, "%.2e", r->max_abs);
    return out;
}

const char *ari_verify_cosine_text(char *out, const ar_verify_row *r, int digits)
{
    if (isnan(r->cosine))
        snprintf(out, ARI_VERIFY_TEXT, "-");
    else
        snprintf(out, ARI_VERIFY_TEXT, "%.*f", digits, r->cosine);
    return out;
}

const char *ari_verify_rule_text(char *out, const ar_verify_report *r)
{
    switch (r->rule) {
    case AR_VERIFY_ULP:
        snprintf(out, ARI_VERIFY_TEXT, "within %llu ulp", (unsigned long long)r->ulp);
        break;
    case AR_VERIFY_TOLERANCE:
        snprintf(out, ARI_VERIFY_TEXT, "within rtol %g and atol %g", r->rtol, r->atol);
        break;
    case AR_VERIFY_SENSITIVITY:
        snprintf(out, ARI_VERIFY_TEXT, "within what rounding%s%s explains", r->allows[0] ? " of " : "", r->allows);
        break;
    case AR_VERIFY_BITS:
        snprintf(out, ARI_VERIFY_TEXT, "the same bits");
        break;
    }
    return out;
}

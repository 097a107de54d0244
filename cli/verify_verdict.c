/* SPDX-License-Identifier: Apache-2.0 */
/* The last line of a comparison: the key fact, and what would allow a difference that is mere rounding. */
#include <math.h>

#include "cli/report/table.h"
#include "cli/verify_report.h"
#include "ref/core/out.h"

static double roundoff_of(ar_dtype t)
{
    switch (t) {
    case AR_F64:
        return 0x1p-53;
    case AR_F32:
        return 0x1p-24;
    case AR_F16:
        return 0x1p-11;
    case AR_BF16:
        return 0x1p-8;
    default:
        return 0.0;
    }
}

/* Whether a tensor differs by so little that sums in another order do it. A tensor's rms difference then is some
 * round-offs, its worst some hundred; of short formats less is taken, where so many would be a large part. */
static bool by_rounding(const ar_verify_row *row)
{
    const double u = roundoff_of(row->dtype);
    return row->nan[0] == row->nan[1] && row->inf[0] == row->inf[1] && isfinite(row->worst_value[0]) &&
           isfinite(row->worst_value[1]) && row->rms <= fmin(16.0 * u, 0.01) * row->rms_reference &&
           row->max_abs <= fmin(256.0 * u, 0.05) * row->max_reference;
}

/* The smallest number of one digit that is not below x. */
static double one_digit_up(double x)
{
    const double unit = pow(10.0, floor(log10(x)));
    return ceil(x / unit * (1.0 - 1e-12)) * unit * (1.0 + 1e-9);
}

static void print_rounding(FILE *to, const ar_verify_report *r)
{
    enum { MOST_ULP = 1000 };
    uint64_t ulp = 0;
    double most = 0.0;
    for (size_t i = 0; i < r->rows; i++) {
        const ar_verify_row *row = &r->row[i];
        if (row->state == AR_VERIFY_SAME)
            continue;
        if (row->state != AR_VERIFY_DIFFERENT || !by_rounding(row))
            return;
        ulp = row->max_ulp > ulp ? row->max_ulp : ulp;
        most = fmax(most, row->max_abs);
    }
    fprintf(to, "; no more than rounding in another order leaves: ");
    if (ulp <= MOST_ULP)
        fprintf(to, "--ulp %llu allows it", (unsigned long long)ulp);
    else
        fprintf(to, "--atol %.2g allows it", one_digit_up(most));
}

static void print_same(FILE *to, const ar_verify_report *r)
{
    const ar_verify_row *worst = NULL;
    size_t exact = 0;
    for (size_t i = 0; i < r->rows; i++) {
        const ar_verify_row *row = &r->row[i];
        exact += row->bits_different == 0;
        if (row->ratio > (worst ? worst->ratio : 0.0))
            worst = row;
    }
    fprintf(to, "verify: %s%s: %zu tensor%s, %s element%s", ari_has_ratio(r) ? "the same " : "", ARI_RULE(r),
            r->compared, ari_plural(r->compared), ARI_COUNT(r->elements), ari_plural(r->elements));
    if (ari_has_ratio(r))
        fprintf(to, ", %zu tensor%s bit for bit", exact, ari_plural(exact));
    if (worst)
        fprintf(to, "; the worst difference is %.3g of what is allowed, in %s", worst->ratio, ARI_SHOW(worst->name));
    fprintf(to, "\n");
}

void ari_verify_print_verdict(FILE *to, const ar_verify_report *r)
{
    if (r->same) {
        print_same(to, r);
        return;
    }
    if (r->compared > 0)
        fprintf(to, "verify: DIFFERENT: %zu of %zu tensor%s not %s", r->different, r->compared, ari_plural(r->compared),
                ari_has_ratio(r) ? ARI_RULE(r) : "the same in every bit");
    else
        fprintf(to, "verify: DIFFERENT: no tensor stands in both");
    if (r->missing + r->unexpected > 0)
        fprintf(to, ", %zu missing, %zu unexpected", r->missing, r->unexpected);
    if (ari_verify_copies(r) > 0)
        fprintf(to, "; ranks hold different copies of %zu tensor%s", ari_verify_copies(r),
                ari_plural(ari_verify_copies(r)));
    if (r->worst != SIZE_MAX && r->row[r->worst].state == AR_VERIFY_DIFFERENT) {
        const ar_verify_row *w = &r->row[r->worst];
        fprintf(to, "; worst %s: ", ARI_SHOW(w->name));
        if (ari_has_ratio(r))
            fprintf(to, "%.3g times what is allowed", w->ratio);
        else
            fprintf(to, "max|d| %s at %s", ARI_SIZE(w), ARI_INDEX(w, w->worst));
    }
    if (r->compared > 0 && r->different == 0)
        fprintf(to, "; what both have is the same: --common leaves the others out");
    if (r->rule == AR_VERIFY_BITS && r->different > 0)
        print_rounding(to, r);
    fprintf(to, "\n");
}

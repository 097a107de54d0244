/* SPDX-License-Identifier: Apache-2.0 */
/* What the elements of a tensor show together and none of them alone: a factor on all of them, and an allowance that is
 * as large as the tensor. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "verify/dumps/verify_impl.h"

double ari_verify_roundoff(const ari_verifying *v)
{
    static const struct {
        const char *allows; /* as it begins */
        double roundoff;
    } arithmetics[] = {{"bf16", 0x1p-8}, {"f16", 0x1p-11}, {"tf32", 0x1p-11}};
    double most = 0.0;
    for (size_t i = 0; i < 2 * v->pairs; i++)
        most = fmax(most, ari_roundoff_of(v->pair[i / 2].format[i % 2].dtype));
    for (size_t i = 0; i < sizeof arithmetics / sizeof *arithmetics; i++) {
        if (strncmp(v->report->allows, arithmetics[i].allows, strlen(arithmetics[i].allows)) == 0)
            most = fmax(most, arithmetics[i].roundoff);
    }
    return most;
}

/* --- a factor ----------------------------------------------------------------------------------------------------- */

/* The best factor s = <a,b>/<a,a> of b = a + d is off by <a,d>/<a,a>. Independent errors d of the relative size r make
 * that r/sqrt(n), with n = (sum a^2)^2 / sum a^4 elements that count, at least sum a^2 / max a^2. r is what the
 * factor leaves. In 24,000 tensors of right runs (tests/pytorch/trial.py) the factor was off by at most 5.3 of these
 * deviations, where it was off by more than SYSTEMATIC. */
static const double DEVIATIONS = 8.0;
/* Errors that all elements share: a rounding of the run's format, and what sums of fp32 leave. In right runs the factor
 * was off by 24 roundings of fp32 at most where its own deviations do not explain it. */
static const double SYSTEMATIC = 64.0 * 0x1p-24;
/* A tensor that is off by a quarter beside its factor has none; and few elements say little of their errors. */
static const double REST = 0.25;
enum { LEAST_ELEMENTS = 16 };

/* A factor on weights is their decay, which is judged by the elements. */
static bool has_factor(const ari_pair *pair)
{
    const ar_verify_row *r = pair->row;
    return pair->sums && strchr("fbgmv", r->pass) && pair->format[0].is_float && r->elements >= LEAST_ELEMENTS &&
           r->rms_reference > 0.0 && r->max_reference > 0.0 && isfinite(r->scale);
}

void ari_verify_judge_factor(const ari_verifying *v, const ari_pair *pair)
{
    ar_verify_row *r = pair->row;
    const bool by_amount = v->o->rule == AR_VERIFY_TOLERANCE || v->o->rule == AR_VERIFY_SENSITIVITY;
    if (!by_amount || pair->rule.rule == AR_VERIFY_BITS || r->state != AR_VERIFY_SAME || !has_factor(pair))
        return;
    const double off = fabs(r->scale - 1.0), all = r->rms / r->rms_reference;
    const double rest = sqrt(fmax(all * all - off * off, 0.0));
    const double part = r->rms_reference / r->max_reference, count = (double)r->elements * part * part;
    const double errors = DEVIATIONS * rest / sqrt(count);
    r->factor_allowed = fmax(fmax(errors, v->roundoff + SYSTEMATIC), pair->rule.rtol);
    if (rest > REST || !(off > r->factor_allowed))
        return;
    r->state = AR_VERIFY_DIFFERENT;
    r->off_by_factor = true;
    r->elements_different = r->elements;
    r->ratio = off / r->factor_allowed;
    snprintf(r->pattern, sizeof r->pattern,
             "all %zu elements together; each is within the rule, and rounding leaves a factor within %.1e of 1",
             r->elements, r->factor_allowed);
    snprintf(
        r->hint, sizeof r->hint,
        "as a whole the reference times %.6g: one wrong scalar that the errors of single elements hide (a divisor, "
        "a scale, a number of tokens or ranks)",
        r->scale);
}

/* --- an allowance that says nothing ------------------------------------------------------------------------------- */

/* Allowances are 8 times what rounding did (rounding.py). In fp32 those of right steps are at most 7e-5 of a tensor's
 * largest element (bench/rounding_allowances.py); where rounding moves an element by a 64th of it, something amplifies
 * it: a quantiser, whose steps are that large, or a choice by values. With fewer bits deep gradients of right steps reach
 * 5.5 times the largest element, and experts that other tokens choose 14; 8 is an element that became another one. */
static const double MOST_OF_F32 = 0.125, MOST_OF_FEWER = 8.0;
/* A tensor that is zero but for rounding is no sign of it: its allowance is nothing beside the largest of its kind. */
static const double OF_KIND = 0x1p-7;

/* Adam amplifies rounding as it should, in new weights and what later steps make of them. */
static bool is_before_update(const ar_verify_row *r)
{
    return r->step <= 1 && r->elements > 1 && strchr("fbg", r->pass);
}

/* An allowance that is no measure of rounding, in a file that does not say of what, is the user's own number. */
void ari_verify_find_unjudged(const ari_verifying *v)
{
    if (!v->report->allows[0])
        return;
    const double most = v->roundoff > 0x1p-24 ? MOST_OF_FEWER : MOST_OF_F32;
    double largest[128] = {0.0}; /* of a pass */
    for (const ari_pair *p = v->pair; p < v->pair + v->pairs; p++)
        largest[p->row->pass & 127] = fmax(largest[p->row->pass & 127], p->row->max_reference);
    for (const ari_pair *p = v->pair; p < v->pair + v->pairs; p++) {
        ar_verify_row *r = p->row;
        r->unjudged = p->sums && is_before_update(r) && r->state == AR_VERIFY_SAME && r->max_reference > 0.0 &&
                      p->rule.atol > most * r->max_reference && p->rule.atol > OF_KIND * most * largest[r->pass & 127];
        v->report->unjudged += r->unjudged;
    }
}

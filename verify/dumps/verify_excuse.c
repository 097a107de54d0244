/* SPDX-License-Identifier: Apache-2.0 */
/* Which gradients excuse new weights: those that are compared, and whose difference is rounding. */
#include <math.h>

#include "verify/diagnose/hypothesis.h"
#include "verify/dumps/report.h"
#include "verify/dumps/verify_impl.h"

/* A gradient is right if its difference has at most this part of its own root mean square: then only its smallest
 * elements are rounding. Right runs have 1e-6 in fp32 and some hundredths in bf16, a missing all-reduce about 1. */
static const double RIGHT_PART = 0.125;
/* A gradient that is zero but for rounding, as that of a bias before a norm, differs by all of itself. What is left of
 * a sum of 2^16 terms that cancel is 256 roundings of their size, that of the step's largest gradient. */
static const double ROUNDINGS = 256.0;
/* Right runs excuse at most 1 % of their new weights (tests/pytorch/trial.py), those of a missing all-reduce whose
 * gradients are within a tolerance, more than half: then nothing of the update was compared. */
static const double EXCUSED_PART = 0.125;
static const double FEW_EXCUSED = 64.0; /* which may be all of a small module, and show no part */

const ari_pair *ari_pair_of(const ari_verifying *v, const ar_dump_tensor *reference)
{
    for (size_t i = 0; reference && i < v->pairs; i++) {
        if (v->pair[i].side[0] == reference)
            return &v->pair[i];
    }
    return NULL;
}

/* A gradient that is outside the rule is a finding of its own, of which the weights are the consequence. What a
 * sensitivity allows was measured as rounding; a tolerance is any number. */
static ar_status is_rounding(bool *rounding, const ari_verifying *v, const ari_pair *gradient, ari_step_size *size)
{
    const ar_verify_row *r = gradient->row;
    const bool same = r->state == AR_VERIFY_SAME || (r->state == AR_VERIFY_DIFFERENT && ari_is_by_rounding(r));
    *rounding = same && (v->o->rule == AR_VERIFY_SENSITIVITY || r->rms <= RIGHT_PART * r->rms_reference);
    if (*rounding || !same)
        return AR_OK;
    if (size->gradient < 0.0)
        AR_TRY(ari_doubt_gradient(&size->gradient, v->dump[0], r->step));
    *rounding = r->rms <= ROUNDINGS * v->roundoff * size->gradient;
    return AR_OK;
}

ar_status ari_excuse_weight(ari_pair *pair, ari_verifying *v, ari_step_size *sizes)
{
    const ar_verify_row *r = pair->row;
    const size_t stem = ari_order_of(r->name, NULL).stem;
    ari_doubt d = {.steps = 0};
    for (int step = 1; step <= r->step; step++) {
        const ari_pair *g = ari_pair_of(v, ari_tensor_of_step(v->dump[0], r->name, stem, "grad", step));
        ari_step_size *size = &sizes[step - 1];
        bool rounding = false;
        if (g && g->sums && g->side[0]->count == pair->side[0]->count)
            AR_TRY(is_rounding(&rounding, v, g, size));
        if (!rounding)
            continue;
        if (size->reach < 0.0)
            AR_TRY(ari_doubt_reach(&size->reach, v->dump[0], step));
        for (int k = 0; k < 2; k++)
            d.grad[d.steps][k] = g->side[k];
        d.reach[d.steps++] = size->reach;
    }
    const double part = ari_orthogonal_part(v, r->name, stem);
    for (int k = 0; k < d.steps; k++)
        d.all += part * d.reach[k];
    if (d.steps == 0)
        return AR_OK;
    AR_TRY(ARI_TAKE(&pair->doubt, &v->arena, 1, r->name));
    *pair->doubt = d;
    return AR_OK;
}

bool ari_verify_excuses_too_many(const ari_verifying *v)
{
    double excused = 0.0, all = 0.0;
    for (const ari_pair *p = v->pair; p < v->pair + v->pairs; p++) {
        if (p->doubt && p->doubt->all > 0.0)
            continue;
        all += p->row->pass == 'n' ? (double)p->numbers : 0.0;
        excused += p->row->pass == 'n' ? (double)p->tally.doubted : 0.0;
    }
    /* Where gradients are reduced in 16 bits, every weight moves by their rounding. */
    return v->reduced == 0.0 && excused > FEW_EXCUSED && excused > EXCUSED_PART * all;
}

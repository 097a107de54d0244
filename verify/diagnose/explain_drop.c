/* SPDX-License-Identifier: Apache-2.0 */
/* Zeros or one value where the reference has others: dropout, tokens left out, memory that was filled. */
#include <stdio.h>

#include "verify/diagnose/explain_impl.h"

/* --- dropout ------------------------------------------------------------------------------------------------------ */

static bool is_dropped(const ari_whole *w, size_t i)
{
    return ari_off(w, i) && fabs((double)w->val[i]) <= w->view.grid.d->noise;
}

/* The one factor of all elements that are not dropped; 0: they have none. */
static double factor_of_rest(const ari_whole *w)
{
    ari_factor_sums s = {0};
    double worst = 0.0;
    for (size_t i = 0; i < w->count; i++) {
        if (is_dropped(w, i))
            continue;
        s.vr += (double)w->val[i] * (double)w->ref[i];
        s.rr += (double)w->ref[i] * (double)w->ref[i];
    }
    const double factor = s.rr > 0.0 ? ari_factor_of(&s) : 0.0;
    for (size_t i = 0; i < w->count; i++) {
        const double expected = factor * (double)w->ref[i], left = fabs((double)w->val[i] - expected);
        if (is_dropped(w, i))
            continue;
        if (!ari_holds(w, w->val[i], expected))
            return 0.0;
        worst = fmax(worst, left);
    }
    return ari_explains(w, worst) ? factor : 0.0;
}

/* Whether the dropped elements lie anywhere: along no dimension are they more than chance would have it. */
static bool lie_anywhere(const ari_whole *w, size_t dropped)
{
    const ari_grid *g = &w->view.grid;
    const double rate = (double)dropped / (double)w->count;
    for (int dim = 0; dim < g->nd; dim++) {
        size_t inner = 1, most = 0;
        const double size = (double)w->count / (double)g->shape[dim];
        for (int i = dim + 1; i < g->nd; i++)
            inner *= g->shape[i];
        for (size_t k = 0; k < g->shape[dim]; k++) {
            size_t own = 0;
            for (size_t start = k * inner; start < w->count; start += inner * g->shape[dim]) {
                for (size_t i = start; i < start + inner; i++)
                    own += is_dropped(w, i);
            }
            most = own > most ? own : most;
        }
        if ((double)most > size * rate + 6.0 * sqrt(size * rate) + 4.0)
            return false;
    }
    return true;
}

static void seek_dropout(ari_clue *f, const ari_whole *w)
{
    size_t dropped = 0;
    for (size_t i = 0; i < w->count; i++)
        dropped += is_dropped(w, i);
    const double rate = (double)dropped / (double)w->count;
    if (dropped < 16 || rate > 0.95)
        return;
    const double factor = factor_of_rest(w), spread = sqrt(rate * (1.0 - rate) / (double)w->count);
    const bool scaled = fabs(factor * (1.0 - rate) - 1.0) <= 5.0 * factor * spread, right = fabs(factor - 1.0) < 1e-3;
    if ((!scaled && !right) || !lie_anywhere(w, dropped))
        return;
    ari_text t = ari_find(f, right ? ARI_TRACE + 2 : ARI_IDENTITY + 2);
    snprintf(f->value, sizeof f->value,
             right ? "each zero where the reference is not" : "zero or %.6g times the reference", factor);
    ari_say(&t, "%zu elements (%.2g%%) are zero, anywhere in the tensor, and all others are ", dropped, 100.0 * rate);
    if (right)
        ari_say(&t,
                "right: a dropout mask without its scale 1/(1-p), another mask on this side, or writes that were lost");
    else
        ari_say(&t,
                "%.6g times the reference: dropout with p = %.3g, which the reference does not have (eval against "
                "train, or a rank that drops where it should not)",
                factor, 1.0 - 1.0 / factor);
}

/* --- whole tokens ------------------------------------------------------------------------------------------------- */

/* Rows that are zero as a whole; false if any row is so in part alone. */
static bool count_rows(const ari_whole *w, size_t *none)
{
    const ari_grid *g = &w->view.grid;
    *none = 0;
    for (size_t row = 0; row < g->rows; row++) {
        size_t dropped = 0, right = 0;
        for (size_t i = row * g->cols; i < (row + 1) * g->cols; i++) {
            dropped += is_dropped(w, i);
            right += !ari_off(w, i) && fabs((double)w->ref[i]) > 2.0 * g->d->noise;
        }
        if (dropped > 0 && right > 0)
            return false;
        *none += dropped > 0;
    }
    return *none > 1;
}

static void seek_tokens(ari_clue *f, const ari_whole *w)
{
    const ari_grid *g = &w->view.grid;
    size_t none = 0;
    if (g->nd < 2 || w->view.survey.total.zero < w->view.survey.different || !count_rows(w, &none) || none == g->rows)
        return;
    ari_text t = ari_find(f, ARI_TRACE + 1);
    snprintf(f->value, sizeof f->value, "each zero where the reference is not");
    ari_say(&t, "%zu of %zu %s are zero as a whole, all others are right", none, g->rows,
            ari_axis_name(w, g->nd - 2, true));
    if (g->d->pass == 'f' && ari_is_embedding(g->d))
        ari_say(&t, "; ids whose rows another rank holds: a missing all-reduce over the shards of the vocabulary, or a "
                    "range of ids that leaves some out");
    else if (g->d->pass == 'f')
        ari_say(&t, "; left out by a mask or a loop, or not gathered");
    else if (g->d->pass == 'b')
        ari_say(&t, "; left out of the loss on this side alone (labels that are ignored, padding), or not gathered");
    else
        ari_say(&t, "; their part was not computed, not sent or not added");
}

/* --- one value ---------------------------------------------------------------------------------------------------- */

static void seek_filled(ari_clue *f, const ari_whole *w)
{
    const ari_survey *s = &w->view.survey;
    float value = 0.0f;
    size_t n = 0;
    for (size_t i = 0; i < w->count; i++) {
        if (!ari_off(w, i))
            continue;
        if (n++ == 0)
            value = w->val[i];
        else if (w->val[i] != value && !ari_holds(w, w->val[i], (double)value))
            return;
    }
    if (n < 8 || s->different == w->count || isnan(value) || fabs((double)value) <= 8.0 * w->absolute)
        return;
    if (fabs((double)value) <= w->max_ref) /* a clamp lies at a bound of the values */
        return;
    ari_text t = ari_find(f, ARI_IDENTITY + 3);
    snprintf(f->value, sizeof f->value, "each %.6g", (double)value);
    ari_say(&t,
            "all %zu different elements have the one value %.6g, larger than any of the reference: filled and never "
            "written, or the fill of a mask or of padding that should not be seen",
            n, (double)value);
}

ar_status ari_seek_dropped(ari_clue *f, const ari_whole *w)
{
    if (w->view.survey.total.nan > 0 || w->count < 64)
        return AR_OK;
    seek_filled(f, w);
    if (f->confidence == ARI_SILENT)
        seek_tokens(f, w);
    if (f->confidence == ARI_SILENT)
        seek_dropout(f, w);
    return AR_OK;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/diagnose/pattern_impl.h"

static const ari_detector detectors[] = {
    ari_detect_gather,   ari_detect_repeat,     ari_detect_order,      ari_detect_tokens,   ari_detect_sum,
    ari_detect_means,    ari_detect_clip,       ari_detect_loss,       ari_detect_factor,   ari_detect_statistic,
    ari_detect_tail,     ari_detect_vector,     ari_detect_world_rank, ari_detect_zero,     ari_detect_rows,
    ari_detect_tied,     ari_detect_truncation, ari_detect_mask,       ari_detect_rounding, ari_detect_row_factor,
    ari_detect_bias,     ari_detect_drift,      ari_detect_nan,        ari_detect_gradient, ari_detect_place,
    ari_detect_scatter,  ari_detect_last,       ari_detect_update,     ari_detect_decay,    ari_detect_share,
    ari_detect_anything,
};

ari_text ari_find(ari_clue *f, int confidence)
{
    f->confidence = confidence;
    f->value[0] = '\0';
    return ari_text_in(f->hint, sizeof f->hint);
}

/* The most confident finding; of equals the first in the table. */
static ar_status best_finding(ari_clue *best, const ari_case *c)
{
    *best = (ari_clue){0};
    for (size_t i = 0; i < sizeof detectors / sizeof *detectors; i++) {
        ari_clue f = {0};
        AR_TRY(detectors[i](&f, c));
        if (f.confidence > best->confidence)
            *best = f;
    }
    return AR_OK;
}

/* Traces that a tensor-parallel group leaves are sought in one group alone too, where the other groups would hide
 * them. */
static ar_status look_in_one_group(ari_clue *best, const ari_case *c)
{
    ari_difference d;
    ari_group_view view;
    ari_case own;
    ari_clue clue = {0};
    int rank = 0;
    while (rank < c->grid.d->ranks && c->survey.rank[rank].different == 0)
        rank++;
    AR_TRY(ari_one_group(&d, &view, c->grid.d, rank));
    if (!view.copy)
        return AR_OK;
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, ari_grid_init(&own.grid, &d));
    AR_TRY_TO(done, st, ari_survey_init(&own.survey, &own.grid));
    st = own.survey.different > 0 ? best_finding(&clue, &own) : AR_OK;
    ari_survey_fini(&own.survey);
    if (st == AR_OK && clue.confidence > best->confidence) {
        *best = clue;
        ari_text t = {.at = best->hint, .cap = sizeof best->hint, .used = strlen(best->hint)};
        if (rank >= d.tp)
            ari_say(&t, "; ranks are counted from %d, the first of this tensor-parallel group", rank / d.tp * d.tp);
    }
done:
    ari_group_view_fini(&view);
    return st;
}

/* The layouts' view of the tensor, where it is another one of the same count; what is wrong with it ari_grid_init
 * says. */
static ari_difference in_layout_shape(const ari_difference *d)
{
    ari_difference view = *d;
    const ar_layout *o = d->ranks > 0 && d->copy ? d->copy[0].layout : NULL;
    size_t count = 1, viewed = 1;
    if (!o || !d->shape || o->ndim == d->ndim || o->ndim < 1 || o->ndim > AR_MAX_DIMS || d->ndim > AR_MAX_DIMS)
        return view;
    for (int i = 0; i < d->ndim; i++)
        count *= d->shape[i];
    for (int i = 0; i < o->ndim; i++)
        viewed *= o->shape[i];
    if (count == viewed) {
        view.ndim = o->ndim;
        view.shape = o->shape;
    }
    return view;
}

ar_status ari_best_finding(ari_clue *best, const ari_case *c)
{
    AR_TRY(best_finding(best, c));
    return look_in_one_group(best, c);
}

ar_status ari_pattern_find(ari_pattern *out, const ari_difference *given)
{
    const ari_difference view = in_layout_shape(given), *d = &view;
    ari_case c;
    ari_clue best;
    ari_pattern found = {{0}, {0}};
    AR_TRY(ari_grid_init(&c.grid, d));
    AR_TRY(ari_survey_init(&c.survey, &c.grid));
    ari_text where = ari_text_in(found.pattern, sizeof found.pattern), why = ari_text_in(found.hint, sizeof found.hint);
    ar_status st = AR_OK;
    if (c.survey.different == 0) {
        ari_say(&where, "no element differs");
        ari_say(&why, "nothing to explain");
    } else {
        AR_TRY_TO(done, st, ari_best_finding(&best, &c));
        ari_say_where(&where, &c.grid, &c.survey, best.value);
        ari_say(&why, "%s", best.hint);
    }
    *out = found;
done:
    ari_survey_fini(&c.survey);
    return st;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/pattern_impl.h"

static const ari_detector detectors[] = {
    ari_detect_gather, ari_detect_repeat,   ari_detect_order,      ari_detect_sum,      ari_detect_loss,
    ari_detect_factor, ari_detect_tail,     ari_detect_vector,     ari_detect_zero,     ari_detect_rows,
    ari_detect_mask,   ari_detect_rounding, ari_detect_row_factor, ari_detect_bias,     ari_detect_drift,
    ari_detect_nan,    ari_detect_gradient, ari_detect_place,      ari_detect_anything,
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

/* The layouts' view of the tensor, where it is another one of the same count; what is wrong with it ari_grid_init says.
 */
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
        AR_TRY_TO(done, st, best_finding(&best, &c));
        ari_say_where(&where, &c.grid, &c.survey, best.value);
        ari_say(&why, "%s", best.hint);
    }
    *out = found;
done:
    ari_survey_fini(&c.survey);
    return st;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/pattern_impl.h"

static const ari_detector detectors[] = {
    ari_detect_gather, ari_detect_repeat,   ari_detect_order,      ari_detect_sum,      ari_detect_loss,
    ari_detect_factor, ari_detect_tail,     ari_detect_vector,     ari_detect_zero,     ari_detect_rows,
    ari_detect_mask,   ari_detect_rounding, ari_detect_row_factor, ari_detect_bias,     ari_detect_drift,
    ari_detect_nan,    ari_detect_gradient, ari_detect_place,      ari_detect_anything,
};

ari_text ari_find(ari_finding *f, int confidence)
{
    f->confidence = confidence;
    f->value[0] = '\0';
    return ari_text_in(f->hint, sizeof f->hint);
}

/* The most confident finding; of equals the first in the table. */
static ar_status best_finding(ari_finding *best, const ari_case *c)
{
    *best = (ari_finding){0};
    for (size_t i = 0; i < sizeof detectors / sizeof *detectors; i++) {
        ari_finding f = {0};
        AR_TRY(detectors[i](&f, c));
        if (f.confidence > best->confidence)
            *best = f;
    }
    return AR_OK;
}

ar_status ari_pattern_find(ari_pattern *out, const ari_difference *d)
{
    ari_case c;
    ari_finding best;
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

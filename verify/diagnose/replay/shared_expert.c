/* SPDX-License-Identifier: Apache-2.0 */
/* The sum of what the experts of tokens make and what the one does that all share. */
#include "verify/diagnose/replay/experts.h"

/* Sums of what the experts make and what the shared one does, times its gate s; the first two are references. */
enum { GATED, UNGATED, ROUTED, SHARED_ALONE, SHARED_UNGATED, LOGIT, SUMS };

typedef struct shared {
    float *routed, *made, *logit; /* [rows][cols], the same, [rows]; logit NULL: there is no gate */
} shared;

static bool is_sum(const ari_case *c, const shared *s, size_t form, const float *x)
{
    for (size_t i = 0; i < c->count; i++) {
        const double logit = s->logit ? (double)s->logit[i / c->grid.cols] : 0.0, gate = 1.0 / (1.0 + exp(-logit));
        const double routed = form == SHARED_ALONE || form == SHARED_UNGATED ? 0.0 : (double)s->routed[i];
        const double by = form == UNGATED || form == SHARED_UNGATED ? 1.0
                          : form == ROUTED                          ? 0.0
                          : form == LOGIT                           ? logit
                                                                    : gate;
        const double expected = routed + by * (double)s->made[i];
        if (!(fabs(expected - (double)x[i]) <= c->absolute + c->relative * fabs(expected)))
            return false;
    }
    return true;
}

static void look_at_sum(ari_trace *t, const ari_case *c, const shared *s)
{
    const size_t base = s->logit ? GATED : UNGATED;
    size_t is = 0;
    if (!is_sum(c, s, base, c->ref))
        return;
    while (is < SUMS && (is == base || !is_sum(c, s, is, c->val)))
        is++;
    if (is == SUMS || (is == LOGIT && !s->logit))
        return;
    ari_trace_set(t, ARI_FOUND_SHARED_EXPERT,
                  is == ROUTED                                 ? ARI_IF(ZERO)
                  : is == SHARED_ALONE || is == SHARED_UNGATED ? ARI_IF(ALL)
                  : is == LOGIT                                ? ARI_IF(LOG)
                                                               : 0);
}

ar_status ari_measure_shared_expert(ari_trace *t, const ari_case *c)
{
    shared s = {.logit = NULL};
    bool held = true, gated = true;
    if (c->role != ARI_MLP || !ari_may_replay(c) || c->count > ARI_MOST_WEIGHT)
        return AR_OK;
    AR_TRY(ari_replay_rows(&s.routed, &held, c, c->count, ARI_EXPERTS, 'f'));
    AR_TRY(ari_replay_rows(&s.made, &held, c, c->count, ARI_SHARED_DOWN, 'f'));
    AR_TRY(ari_replay_rows(&s.logit, &gated, c, c->grid.rows, ARI_SHARED_SHARE, 'f'));
    s.logit = gated ? s.logit : NULL;
    if (held)
        look_at_sum(t, c, &s);
    return AR_OK;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* How often the uses by further tokens count in the gradient of the head or of the table of tokens. Of both its rows
 * are added up, the head's with factors, as those of a softmax cancel: of the difference, and of what the reference's
 * own values say that those uses contribute. */
#include "verify/diagnose/replay/replay.h"

enum { MOST_WORK = 1 << 26 };
#define LEFT 1e-5 /* of the squares */

typedef struct uses {
    const ari_case *c;
    bool head;
    size_t rows, width;    /* of the weight */
    double *wanted, *made; /* [width] */
} uses;

static double factor_of(const uses *u, size_t row)
{
    return u->head ? 1.0 + (double)(row * 7919 % 1009) / 1009.0 : 1.0;
}

/* What one use contributes: gradients of rows, or of logits with the head's input. */
static ar_status add_use(uses *u, const ari_walk *at)
{
    const ari_walk forward = ari_walk_of(u->c->known->reference, u->c->path, "f", at->key.step);
    const ar_dump_tensor *input = u->head ? ari_find_role(forward, ARI_MTP_NORM, at->key.layer) : NULL;
    const size_t each = u->head ? u->rows : u->width, tokens = at->t->count / each;
    float *dy = NULL, *x = NULL;
    if (at->t->count % each != 0 || at->t->count > MOST_WORK ||
        (u->head && (!input || input->count != tokens * u->width)))
        return AR_OK;
    AR_TRY(ari_read_values(&dy, at->t, u->c->arena));
    if (input)
        AR_TRY(ari_read_values(&x, input, u->c->arena));
    for (size_t t = 0; t < tokens; t++) {
        double sum = 0.0;
        for (size_t v = 0; v < u->rows && u->head; v++)
            sum += factor_of(u, v) * (double)dy[t * each + v];
        for (size_t i = 0; i < u->width; i++)
            u->made[i] += u->head ? sum * (double)x[t * u->width + i] : (double)dy[t * each + i];
    }
    return AR_OK;
}

static void judge(ari_trace *t, const uses *u)
{
    double both = 0.0, own = 0.0, left = 0.0, all = 0.0;
    for (size_t i = 0; i < u->width; i++) {
        both += u->wanted[i] * u->made[i];
        own += u->made[i] * u->made[i];
        all += u->wanted[i] * u->wanted[i];
    }
    const double times = own > 0.0 ? both / own : 0.0;
    for (size_t i = 0; i < u->width; i++)
        left += (u->wanted[i] - times * u->made[i]) * (u->wanted[i] - times * u->made[i]);
    if (!(left <= LEFT * all) || !(fabs(times - round(times)) < 1e-2) || !(fabs(round(times)) >= 1.0))
        return;
    ARI_FINDING(t, ARI_FOUND_FURTHER_USES, round(times) < 0.0 ? ARI_IF(ZERO) : ARI_IF(TWICE),
                {"times", .number = 1.0 + round(times)});
}

ar_status ari_measure_further_uses(ari_trace *t, const ari_case *c)
{
    const ari_role of = c->role == ARI_HEAD ? ARI_MTP_LOGITS : ARI_TOKENS_NORM;
    uses u = {.c = c, .head = c->role == ARI_HEAD};
    if ((c->role != ARI_HEAD && c->role != ARI_TOKENS) || !c->ref || c->step || c->reference->ndim != 2 ||
        c->count != c->reference->count)
        return AR_OK;
    u.rows = c->reference->shape[0];
    u.width = c->reference->shape[1];
    AR_TRY(ARI_TAKE(&u.wanted, c->arena, u.width, "sums of rows"));
    AR_TRY(ARI_TAKE(&u.made, c->arena, u.width, "sums of rows"));
    for (size_t i = 0; i < c->count; i++)
        u.wanted[i % u.width] += factor_of(&u, i / u.width) * ((double)c->val[i] - (double)c->ref[i]);
    for (ari_walk w = ari_walk_of(c->known->reference, c->path, "b", c->own.step); ari_walk_next(&w);) {
        if (ari_module_of(w.t->name, w.key.stem).role == of)
            AR_TRY(add_use(&u, &w));
    }
    judge(t, &u);
    return AR_OK;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Losses that a router has besides: the gradient that a balancing loss or a z-loss gives the logits, from the module's
 * input and the router's weight alone but for its coefficient. And a token's weights that do not add up to 1. */
#include <stdlib.h>

#include "ref/core/size.h"
#include "verify/diagnose/hypothesis.h"
#include "verify/diagnose/replay/replay.h"

enum { MOST_WORK = 1 << 25, MOST_CHOSEN = 8, MOST_SHARES = 16 };
/* Balanced over all tokens or over those of each sample, by a softmax or by shares of sigmoids; the square of the
 * logarithm of the softmax's sum. */
enum { SAMPLES = 1, SIGMOID = 2, Z = 4, FORMS };
static const char *const form_names[] = {"a balancing loss over all tokens", "a balancing loss of each sample",
                                         "a balancing loss over all tokens, of sigmoids",
                                         "a balancing loss of each sample, of sigmoids", "a z-loss"};

typedef struct router {
    const ari_case *c;
    size_t tokens, seq, n, cols;
    float *x, *w;               /* [tokens][cols]; [n][cols] */
    double *z, *dz, *p, *count; /* [tokens][n], twice; [n], twice */
    double *is;                 /* of the loss, in the case's elements */
} router;

/* --- the gradient of a loss --------------------------------------------------------------------------------------- */

/* Counts the k largest of `tokens` tokens from `first` on. */
static void count_chosen(router *r, size_t first, size_t tokens, size_t k)
{
    memset(r->count, 0, r->n * sizeof *r->count);
    for (size_t t = first; t < first + tokens; t++) {
        const double *z = r->z + t * r->n;
        for (size_t i = 0; i < r->n; i++) {
            size_t larger = 0;
            for (size_t j = 0; j < r->n; j++)
                larger += z[j] > z[i] || (j < i && !(z[j] < z[i]));
            r->count[i] += larger < k;
        }
    }
}

static void put_token(router *r, size_t t, size_t form)
{
    const double *z = r->z + t * r->n;
    double most = z[0], sum = 0.0, mean = 0.0;
    for (size_t i = 1; i < r->n; i++)
        most = fmax(most, z[i]);
    for (size_t i = 0; i < r->n; i++)
        sum += r->p[i] = form & SIGMOID ? 1.0 / (1.0 + exp(-z[i])) : exp(z[i] - most);
    for (size_t i = 0; i < r->n; i++)
        mean += r->p[i] / sum * r->count[i];
    for (size_t i = 0; i < r->n; i++) {
        const double slope = form & SIGMOID ? 1.0 - r->p[i] : 1.0;
        r->dz[t * r->n + i] = r->p[i] / sum * (form == Z ? most + log(sum) : slope * (r->count[i] - mean));
    }
}

/* The loss's gradient in the case's elements: of the weight, or of the input. */
static void put_loss(router *r, size_t form, size_t k)
{
    const size_t scope = form & SAMPLES ? r->seq : r->tokens;
    const bool of_weight = r->c->grid.d->pass == 'g';
    for (size_t t = 0; t < r->tokens; t++) {
        if (t % scope == 0)
            count_chosen(r, t, scope, k);
        put_token(r, t, form);
    }
    memset(r->is, 0, r->c->count * sizeof *r->is);
    for (size_t i = 0; i < r->tokens * r->n; i++) {
        const size_t t = i / r->n, e = i % r->n;
        const float *other = of_weight ? r->x + t * r->cols : r->w + e * r->cols;
        for (size_t f = 0; f < r->cols; f++)
            r->is[(of_weight ? e : t) * r->cols + f] += r->dz[i] * (double)other[f];
    }
}

/* --- the look ----------------------------------------------------------------------------------------------------- */

static bool look_at_form(ari_trace *t, const router *r, size_t form)
{
    const ari_case *c = r->c;
    ari_fit apart = {0}, alone = {0};
    double more, all;
    for (size_t i = 0; i < c->count; i++) {
        ari_fit_add(&apart, (double)c->val[i] - (double)c->ref[i], r->is[i], 0.0);
        ari_fit_add(&alone, (double)c->val[i], r->is[i], 0.0);
    }
    const bool is_alone = ari_fit_one(&all, &alone) <= ARI_UNFITTED;
    if (!is_alone && !(ari_fit_one(&more, &apart) <= ARI_UNFITTED))
        return false;
    ari_trace_set(t, ARI_FOUND_AUXILIARY, is_alone ? ARI_IF(ALONE) : more < 0.0 ? ARI_IF(NEGATIVE) : 0);
    t->flags |= form == Z && !is_alone ? ARI_IF(LOG) : 0;
    ari_words(t, "loss", "%s", form_names[form]);
    return true;
}

static bool has_part(const ari_case *c, const ar_dump_tensor *t, const char *part)
{
    const ari_order_key own = ari_order_of(c->reference->name, c->path), key = ari_order_of(t->name, c->path);
    return (key.pass == 'i' || key.pass == 'w') && labs(key.layer) == labs(own.layer) && strstr(t->name, part);
}

/* The only matrix of the case's module, or the case's own weight, where the layer has experts; NULL. */
static const ar_dump_tensor *find_weight(const ari_case *c)
{
    const ar_dump *dump = c->known->reference;
    const ari_order_key own = ari_order_of(c->reference->name, c->path);
    const ar_dump_tensor *found = NULL;
    bool experts = false;
    size_t parameters = 0;
    for (size_t i = 0; i < ar_dump_count(dump); i++) {
        const ar_dump_tensor *t = ar_dump_at(dump, i);
        const bool is_own = has_part(c, t, "") && strncmp(t->name, own.name, own.stem) == 0;
        experts = experts || (has_part(c, t, ".experts.") && !is_own);
        parameters += is_own;
        found = is_own ? t : found;
    }
    return experts && parameters == 1 && found->ndim == 2 ? found : NULL;
}

static ar_status look_at_losses(ari_trace *t, router *r, const ar_dump_tensor *x, const ar_dump_tensor *w)
{
    AR_TRY(ARI_ALLOC(&r->x, r->tokens * r->cols, x->name));
    AR_TRY(ARI_ALLOC(&r->w, r->n * r->cols, w->name));
    AR_TRY(ar_dump_read_f32(x, 0, r->tokens * r->cols, r->x));
    AR_TRY(ar_dump_read_f32(w, 0, r->n * r->cols, r->w));
    AR_TRY(ARI_ALLOC_ZERO(&r->z, r->tokens * r->n, "logits"));
    AR_TRY(ARI_ALLOC(&r->dz, r->tokens * r->n, "logits"));
    AR_TRY(ARI_ALLOC(&r->p, r->n, "a row of logits"));
    AR_TRY(ARI_ALLOC_ZERO(&r->count, r->n, "a row of logits"));
    AR_TRY(ARI_ALLOC(&r->is, r->c->count, r->c->grid.d->name));
    for (size_t i = 0; i < r->tokens * r->n; i++) {
        for (size_t f = 0; f < r->cols; f++)
            r->z[i] += (double)r->x[i / r->n * r->cols + f] * (double)r->w[i % r->n * r->cols + f];
    }
    for (size_t form = 0; form < FORMS; form++) {
        for (size_t k = 1; k <= MOST_CHOSEN && k < r->n && !(form == Z && k > 1); k++) {
            put_loss(r, form, k);
            if (look_at_form(t, r, form))
                return AR_OK;
        }
    }
    return AR_OK;
}

ar_status ari_measure_auxiliary(ari_trace *t, const ari_case *c)
{
    const ar_dump_tensor *w = find_weight(c), *x = w ? ari_replay_input(c, ARI_NORM2) : NULL;
    router r = {.c = c, .cols = c->grid.cols};
    if (!x || x->ndim != 3 || w->shape[1] != r.cols || x->shape[2] != r.cols || w->shape[0] < 2 ||
        c->count != (c->grid.d->pass == 'g' ? w->count : x->count) || x->count > MOST_WORK / w->shape[0])
        return AR_OK;
    r.n = w->shape[0];
    r.seq = x->shape[1];
    r.tokens = x->shape[0] * r.seq;
    const ar_status st = look_at_losses(t, &r, x, w);
    free(r.x);
    free(r.w);
    free(r.z);
    free(r.dz);
    free(r.p);
    free(r.count);
    free(r.is);
    return st;
}

/* --- weights of a token ------------------------------------------------------------------------------------------- */

/* True if the rows of x add up to 1. */
static bool are_shares(const ari_case *c, const float *x)
{
    for (size_t row = 0; row < c->grid.rows; row++) {
        double sum = 0.0;
        for (size_t i = 0; i < c->grid.cols; i++)
            sum += (double)x[row * c->grid.cols + i];
        if (!ari_is_near(sum, 1.0, ARI_SEEN))
            return false;
    }
    return true;
}

/* Both dumps' rows are the same but for a number, and those of one alone add up to 1. */
ar_status ari_measure_shares(ari_trace *t, const ari_case *c)
{
    const bool were = are_shares(c, c->ref), are = are_shares(c, c->val);
    double low = HUGE_VAL, high = 0.0;
    bool experts = false;
    for (size_t i = 0; i < ar_dump_count(c->known->reference) && !experts; i++)
        experts = has_part(c, ar_dump_at(c->known->reference, i), ".experts.");
    if (!experts || were == are || c->grid.cols < 2 || c->grid.cols > MOST_SHARES)
        return AR_OK;
    for (size_t i = 0; i < c->count; i++) {
        const size_t first = i / c->grid.cols * c->grid.cols;
        const double by = (double)c->val[first] / (double)c->ref[first];
        if (!ari_is_near((double)c->val[i], by * (double)c->ref[i], ARI_SEEN))
            return AR_OK;
        low = fmin(low, by);
        high = fmax(high, by);
    }
    ari_trace_set(t, ARI_FOUND_MIXTURE, ARI_IF(SAME) | (were ? ARI_IF(ZERO) : ARI_IF(ONE)));
    ari_number(t, "low", low);
    ari_number(t, "high", high);
    return AR_OK;
}

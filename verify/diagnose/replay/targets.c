/* SPDX-License-Identifier: Apache-2.0 */
/* The loss computed again from the logits: which tokens are targets, of which logits, and by how many it is divided. */
#include <stdlib.h>

#include "ref/core/size.h"
#include "verify/diagnose/replay/replay.h"

/* One dump's side of the loss. The cross-entropy of token i against id j is lse[i] less its logit of j. */
typedef struct side {
    float *logits; /* [samples, seq, vocabulary] */
    double *lse;   /* [samples, seq] */
    bool *counts;  /* [samples, seq]: the loss depends on this token's logits */
    bool of_dump;  /* a dump says so; else it is all tokens but each sample's last */
    size_t targets;
    double value; /* the loss */
} side;

typedef struct losses {
    const ari_case *c;
    size_t samples, seq, vocabulary, tokens;
    size_t *ids; /* [samples, seq] */
    side of[2];  /* the reference, the other */
} losses;

enum { MOST_LOGITS = 1 << 24 };

static const ar_dump_tensor *find_any(const ari_case *c, const ar_dump *dump, char pass)
{
    static const ari_role roles[] = {ARI_LOGITS, ARI_HEAD_LOGITS, ARI_HEAD, ARI_FINAL_NORM};
    const ar_dump_tensor *t = NULL;
    for (size_t i = 0; i < (pass == 'f' ? 3 : 4) && !t; i++)
        t = ari_replay_value(c, dump, roles[i], pass);
    return t && t->ndim == 3 ? t : NULL;
}

/* A token that is no target leaves no gradient. */
static ar_status read_counts(side *s, const losses *l, const ar_dump *dump)
{
    const ar_dump_tensor *t = find_any(l->c, dump, 'b');
    const bool held = t && t->shape[0] == l->samples && t->shape[1] == l->seq && t->shape[2] > 0;
    float *row = NULL;
    ar_status st = AR_OK;
    AR_TRY(ari_alloc_zero((void **)&s->counts, l->tokens, sizeof *s->counts, "targets"));
    AR_TRY(ari_alloc((void **)&row, held ? t->shape[2] : 1, sizeof *row, "targets"));
    s->of_dump = held;
    for (size_t i = 0; i < l->tokens; i++) {
        s->counts[i] = !held && i % l->seq + 1 < l->seq;
        if (held)
            AR_TRY_TO(done, st, ar_dump_read_f32(t, i * t->shape[2], t->shape[2], row));
        for (size_t k = 0; held && k < t->shape[2]; k++)
            s->counts[i] = s->counts[i] || row[k] != 0.0f;
        s->targets += s->counts[i];
    }
done:
    free(row);
    return st;
}

static ar_status read_side(side *s, bool *held, losses *l, const ar_dump *dump)
{
    const ar_dump_tensor *t = find_any(l->c, dump, 'f');
    *held = t && t->count > 0 && t->count <= MOST_LOGITS && t->shape[1] > 1 &&
            (l->tokens == 0 || (t->shape[0] == l->samples && t->shape[1] == l->seq && t->shape[2] == l->vocabulary));
    if (!*held)
        return AR_OK;
    l->samples = t->shape[0], l->seq = t->shape[1], l->vocabulary = t->shape[2];
    l->tokens = l->samples * l->seq;
    AR_TRY(ari_alloc((void **)&s->logits, t->count, sizeof *s->logits, t->name));
    AR_TRY(ari_alloc((void **)&s->lse, l->tokens, sizeof *s->lse, t->name));
    AR_TRY(ar_dump_read_f32(t, 0, t->count, s->logits));
    for (size_t i = 0; i < l->tokens; i++) {
        const float *row = s->logits + i * l->vocabulary;
        double top = -HUGE_VAL, sum = 0.0;
        for (size_t k = 0; k < l->vocabulary; k++)
            top = fmax(top, (double)row[k]);
        for (size_t k = 0; k < l->vocabulary; k++)
            sum += exp((double)row[k] - top);
        s->lse[i] = top + log(sum);
    }
    return read_counts(s, l, dump);
}

static double entropy(const losses *l, const side *s, size_t token, size_t id)
{
    return s->lse[token] - (double)s->logits[token * l->vocabulary + id];
}

/* The sum over tokens that count on a side whose target, `shift` tokens on, is in their sample; *n of them. */
static double sum_of(const losses *l, const side *s, long shift, size_t *n)
{
    double sum = 0.0;
    *n = 0;
    for (size_t i = 0; i < l->tokens; i++) {
        const long to = (long)(i % l->seq) + shift;
        if (!s->counts[i] || to < 0 || to >= (long)l->seq)
            continue;
        sum += entropy(l, s, i, l->ids[(long)i + shift]);
        ++*n;
    }
    return sum;
}

/* Whether a sum over targets gives the loss, divided by their number or that of the reference. */
static bool gives(const losses *l, const side *s, double sum, size_t n)
{
    const double unsure = 2e-5 + 0.1 * l->c->relative;
    return n > 0 && (ari_is_near(s->value, sum / (double)n, unsure) ||
                     ari_is_near(s->value, sum / (double)l->of[0].targets, unsure));
}

/* Tokens that count on the other side alone, and the other way round. */
static size_t gained(const losses *l, int of)
{
    size_t n = 0;
    for (size_t i = 0; i < l->tokens; i++)
        n += l->of[of].counts[i] && !l->of[!of].counts[i];
    return n;
}

/* The sum is the reference's and its divisor another whole number, but for those that say something else: the number
 * of ranks or micro-batches. */
static void find_count(ari_trace *t, const losses *l, double sum)
{
    const double n = sum / l->of[1].value, whole = nearbyint(n), own = (double)l->of[0].targets;
    const double ratio = whole > own ? whole / own : own / whole, unsure = 2e-6 * n;
    if (!(whole >= 1.0 && whole <= 4.0 * (double)l->tokens && fabs(n - whole) <= unsure && unsure < 0.05) ||
        ratio == nearbyint(ratio))
        return;
    ari_found(t, ARI_FOUND_TARGETS, ARI_IF(COUNT));
    ari_count(t, "n", (size_t)whole);
    ari_words(t, "which", "%s",
              (size_t)whole == l->tokens                                ? ", the number of all tokens"
              : (size_t)whole == l->tokens - l->samples                 ? ", ignored labels counted too"
              : whole == own + 1.0 || whole == own + (double)l->samples ? ", one too many"
                                                                        : "");
}

static void look_at(ari_trace *t, const losses *l)
{
    static const long shifts[] = {0, 2, -1, 3};
    const side *ref = &l->of[0], *other = &l->of[1];
    size_t n;
    const double sum = sum_of(l, ref, 1, &n);
    if (n != ref->targets || !gives(l, ref, sum, n))
        return;
    const size_t more = gained(l, 1), less = gained(l, 0);
    const double same = sum_of(l, other, 1, &n);
    for (size_t i = 0; i < 4 && t->kind == ARI_FOUND_NOTHING; i++) {
        size_t shifted;
        const double of_shift = sum_of(l, other, shifts[i], &shifted);
        if (!gives(l, other, of_shift, shifted))
            continue;
        ari_found(t, ARI_FOUND_TARGETS, ARI_IF(SHIFT));
        ari_number(t, "by", (double)shifts[i]);
    }
    if (t->kind == ARI_FOUND_NOTHING && other->of_dump && ref->of_dump && more > 0 && less == 0) {
        ari_found(t, ARI_FOUND_TARGETS, ARI_IF(PADDED));
        ari_count(t, "more", more);
    } else if (t->kind == ARI_FOUND_NOTHING && more == 0 && less == 0) {
        find_count(t, l, same);
    }
    if (t->kind != ARI_FOUND_NOTHING)
        ari_count(t, "targets", ref->targets);
}

ar_status ari_measure_targets(ari_trace *t, const ari_case *c)
{
    losses l = {.c = c};
    bool held = c->known->reference && c->known->other && c->reference && c->val && c->count == 1 &&
                c->grid.d->pass == 'f' && (ari_name_is(c->grid.d->name) & ARI_IS_LOSS) && isfinite(c->val[0]) &&
                isfinite(c->ref[0]);
    ar_status st = AR_OK;
    for (int k = 0; k < 2 && held; k++) {
        AR_TRY_TO(done, st, read_side(&l.of[k], &held, &l, k == 0 ? c->known->reference : c->known->other));
        l.of[k].value = (double)(k == 0 ? c->ref[0] : c->val[0]);
    }
    if (held)
        AR_TRY_TO(done, st, ari_replay_ids(&l.ids, c, l.tokens));
    for (size_t i = 0; l.ids && i < l.tokens; i++)
        held = held && l.ids[i] < l.vocabulary;
    if (held && l.ids)
        look_at(t, &l);
done:
    for (int k = 0; k < 2; k++) {
        free(l.of[k].logits);
        free(l.of[k].lse);
        free(l.of[k].counts);
    }
    free(l.ids);
    return st;
}

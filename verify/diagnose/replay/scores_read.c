/* SPDX-License-Identifier: Apache-2.0 */
/* What dumps have of a router: logits, or what these are computed from, its bias, and the experts of each
 * token. A dump without a bias has one of zeros. */
#include "verify/diagnose/replay/scores.h"

enum { MOST_ELEMENTS = 1 << 22, MOST_WORK = 1 << 26 };

static ar_status read_numbers(double *gives, bool *held, const ar_dump_tensor *t, size_t n)
{
    float room[ARI_MOST_SCORED];
    *held = t && t->count == n && n <= ARI_MOST_SCORED;
    if (!*held)
        return AR_OK;
    AR_TRY(ar_dump_read_f32(t, 0, n, room));
    for (size_t i = 0; i < n; i++)
        gives[i] = (double)room[i];
    return AR_OK;
}

ar_status ari_scored_bias(double *bias, double *moved, bool *held, const ari_case *c, size_t n)
{
    const ar_dump *dump = c->known->reference;
    const ari_walk after = ari_walk_of(dump, NULL, "n", c->own.step);
    bool before = false;
    for (size_t i = 0; i < n; i++)
        bias[i] = 0.0;
    AR_TRY(read_numbers(bias, &before, ari_find_role(ari_replay_weights(c, dump), ARI_ROUTER_BIAS, c->own.layer), n));
    return moved ? read_numbers(moved, held, ari_find_role(after, ARI_ROUTER_BIAS, c->own.layer), n) : AR_OK;
}

/* The logits, of the layer's second norm's output and the router's weight. */
static ar_status compute_logits(ari_scored *s, bool *held, const ari_case *c)
{
    const ar_dump_tensor *x = ari_replay_input(c, ARI_NORM2), *w = ari_replay_parameter(c, ARI_ROUTER, ".weight");
    const size_t cols = x && x->ndim == 3 ? x->shape[2] : 0;
    float *in = NULL, *of = NULL;
    *held = w && w->ndim == 2 && cols > 0 && w->shape[1] == cols && w->shape[0] > 1 && w->shape[0] <= ARI_MOST_SCORED &&
            x->count <= MOST_WORK / w->shape[0];
    if (!*held)
        return AR_OK;
    *s = (ari_scored){.tokens = x->count / cols, .n = w->shape[0], .samples = x->shape[0]};
    AR_TRY(ari_replay_rows(&in, held, c, x->count, ARI_NORM2, 'f'));
    AR_TRY(ari_read_values(&of, w, c->arena));
    AR_TRY(ARI_TAKE(&s->z, c->arena, s->tokens * s->n, w->name));
    for (size_t i = 0; i < s->tokens * s->n && *held; i++) {
        double sum = 0.0;
        for (size_t k = 0; k < cols; k++)
            sum += (double)in[i / s->n * cols + k] * (double)of[i % s->n * cols + k];
        s->z[i] = (float)sum;
    }
    return AR_OK;
}

/* Those of the dump: a value of more features than a token has experts. */
static ar_status read_logits(ari_scored *s, bool *held, const ari_case *c)
{
    const ar_dump_tensor *z = ari_replay_input(c, ARI_ROUTER),
                         *w = ari_replay_value(c, c->known->reference, ARI_ROUTES, 'f');
    const ar_dump_tensor *chosen = ari_replay_value(c, c->known->reference, ARI_CHOSEN, 'f');
    const size_t n = z && z->ndim == 3 ? z->shape[2] : 0;
    *held = n > 1 && n <= ARI_MOST_SCORED && z->count <= MOST_ELEMENTS && (w || chosen);
    if (!*held)
        return compute_logits(s, held, c);
    *s = (ari_scored){.tokens = z->count / n, .n = n, .samples = z->shape[0]};
    return ari_replay_rows(&s->z, held, c, z->count, ARI_ROUTER, 'f');
}

/* The experts of each token, from their numbers or their weights; of a router that gives weights in the order of its
 * choice, these. */
static ar_status read_chosen(ari_scored *s, const ari_case *c)
{
    const ar_dump *dump = c->known->reference;
    const ar_dump_tensor *numbers = ari_replay_value(c, dump, ARI_CHOSEN, 'f'),
                         *all = ari_replay_value(c, dump, ARI_ROUTES, 'f'),
                         *own = ari_replay_value(c, dump, ARI_ROUTER, 'f'),
                         *t = numbers ? numbers
                              : all   ? all
                                      : own;
    const size_t each = t ? t->count / s->tokens : 0;
    float *x = NULL;
    if (!t || t->count != s->tokens * each || each == 0 || t->count > MOST_ELEMENTS || (t == all && each != s->n) ||
        (t != all && (each > s->n || each > ARI_MOST_CHOSEN)))
        return AR_OK;
    AR_TRY(ari_read_values(&x, t, c->arena));
    s->known = t != own;
    for (size_t i = 0; i < t->count && s->known; i++) {
        uint8_t *row = s->chosen[0] + i / each * s->n;
        s->known = t == all || (x[i] >= 0.0f && x[i] < (float)s->n);
        if (s->known && t == numbers)
            row[(size_t)x[i]] = 1;
        else if (s->known)
            row[i % each] = x[i] != 0.0f;
    }
    for (size_t i = 0; i < s->n && s->known; i++)
        s->k += s->chosen[0][i];
    if (t == own) {
        s->k = each;
        s->weight = x;
    }
    return AR_OK;
}

ar_status ari_scored_read(ari_scored *s, bool *held, const ari_case *c)
{
    *s = (ari_scored){.tokens = 0};
    AR_TRY(read_logits(s, held, c));
    if (!*held)
        return AR_OK;
    AR_TRY(ARI_TAKE(&s->bias, c->arena, 3 * s->n, "a router's bias"));
    s->a = s->bias + s->n;
    s->unsure = ARI_SUMS + c->relative;
    for (int i = 0; i < 2; i++)
        AR_TRY(ARI_TAKE(&s->chosen[i], c->arena, s->tokens * s->n, "experts of tokens"));
    AR_TRY(ari_scored_bias(s->bias, NULL, NULL, c, s->n));
    return read_chosen(s, c);
}

/* SPDX-License-Identifier: Apache-2.0 */
/* One vector of each sample, pooled of its tokens: which of them the mean is of, or which one it is. */
#include "verify/diagnose/replay/replay.h"

enum { MOST_WORK = 1 << 28 };

/* The mean of the first tokens or of the last, or one token; `all`: n is a sample's number of places in each. */
typedef enum pooling { ONE_TOKEN, OF_FIRST, OF_LAST, POOLINGS } pooling;
typedef struct pooled {
    bool fits[POOLINGS], all[POOLINGS], first; /* first: the one token is the first one */
    size_t n[POOLINGS][ARI_PROBE_TOKENS];
} pooled;

typedef struct places {
    ari_probe p;
    size_t seq;
    double *sum; /* [seq + 1][outs]: what the last layer makes of the sum of the tokens before */
} places;

/* The squares that a pooling of n places leaves of the row of token k. */
static double left_of(const places *s, pooling by, size_t n, const float *row)
{
    double left = 0.0;
    for (size_t i = 0; i < s->p.outs; i++) {
        const double *sum = s->sum + i;
        const size_t outs = s->p.outs,
                     from = by == OF_FIRST  ? 0
                            : by == OF_LAST ? s->seq - n
                                            : n - 1,
                     to = by == OF_LAST ? s->seq : n;
        const double x = (sum[to * outs] - sum[from * outs]) / (double)(to - from);
        const double off = (double)row[s->p.out[i]] - x - (s->p.w ? (double)s->p.bias[i] : 0.0);
        left += off * off;
    }
    return left;
}

static void pool(pooled *to, const places *s, size_t k, const float *const *rows, double allowed)
{
    for (pooling by = ONE_TOKEN; by < POOLINGS; by++) {
        double least = HUGE_VAL;
        for (size_t n = 1; n <= s->seq; n++) {
            const double left = left_of(s, by, n, rows[k]);
            to->n[by][k] = left < least ? n : to->n[by][k];
            least = fmin(left, least);
        }
        to->fits[by] = (k == 0 || to->fits[by]) && least <= allowed;
        to->all[by] = (k == 0 || to->all[by]) && to->n[by][k] == s->seq;
    }
    to->first = (k == 0 || to->first) && to->n[ONE_TOKEN][k] == 1;
}

/* Of both sides, from a value [samples, seq, width]. */
static ar_status pool_rows(pooled of[2], places *s, const ar_dump_tensor *t)
{
    const size_t width = t->shape[2], outs = s->p.outs;
    float *x = NULL;
    double *one = NULL;
    s->seq = t->shape[1];
    AR_TRY(ARI_TAKE(&x, s->p.c->arena, s->seq * width, t->name));
    AR_TRY(ARI_TAKE(&one, s->p.c->arena, width, t->name));
    AR_TRY(ARI_TAKE(&s->sum, s->p.c->arena, (s->seq + 1) * outs, t->name));
    for (size_t k = 0; k < s->p.tokens; k++) {
        double off = 0.0;
        AR_TRY(ar_dump_read_f32(t, s->p.token[k] * s->seq * width, s->seq * width, x));
        for (size_t token = 0; token < s->seq; token++) {
            for (size_t i = 0; i < width; i++)
                one[i] = (double)x[token * width + i];
            ari_probe_put(&s->p, k, one);
            for (size_t i = 0; i < outs; i++)
                s->sum[(token + 1) * outs + i] =
                    s->sum[token * outs + i] + s->p.is[k * outs + i] - (s->p.w ? (double)s->p.bias[i] : 0.0);
        }
        for (size_t i = 0; i < outs; i++)
            off += pow((double)s->p.val[k][s->p.out[i]] - (double)s->p.ref[k][s->p.out[i]], 2.0);
        pool(&of[0], s, k, s->p.ref, ARI_REPLAY_MISTAKE * off);
        pool(&of[1], s, k, s->p.val, ARI_REPLAY_MISTAKE * off);
    }
    return AR_OK;
}

static bool say_pooling(ari_trace *t, const char *fact, const pooled *p)
{
    static const char *const of_all[POOLINGS] = {"the last place", "the mean over all places",
                                                 "the mean over all places"},
                             *const of_some[POOLINGS] = {"one token of each sample",
                                                         "the mean over each sample's first tokens",
                                                         "the mean over each sample's last tokens"};
    pooling by = ONE_TOKEN;
    while (by < POOLINGS && !p->fits[by])
        by++;
    if (by < POOLINGS)
        ari_words(t, fact, "%s", by == ONE_TOKEN && p->first ? "the first token" : (p->all[by] ? of_all : of_some)[by]);
    return by < POOLINGS;
}

ar_status ari_measure_pooled(ari_trace *t, const ari_case *c)
{
    places s = {.seq = 0};
    bool held = false;
    if (c->grid.nd != 2 || c->grid.shape[0] < 2 || c->count > ARI_PROBE_ELEMENTS)
        return AR_OK;
    ari_probe_choose_rows(&s.p, c);
    AR_TRY(ari_probe_read_layer(&s.p, &held, ARI_NO_ROLE));
    const size_t width = held ? s.p.in : c->grid.cols;
    for (ari_walk w = ari_walk_of(c->known->reference, NULL, "f", c->own.step);
         t->kind == ARI_FOUND_NOTHING && s.p.tokens > 1 && ari_walk_next(&w);) {
        pooled of[2] = {{.first = false}};
        bool right = w.t->ndim == 3 && w.t->shape[0] == c->grid.shape[0] && w.t->shape[2] == width &&
                     w.t->shape[1] * width * s.p.outs * s.p.tokens <= MOST_WORK;
        float *unused = NULL;
        ARI_ARENA_SCOPE(c->arena);
        if (right)
            AR_TRY(ari_right_rows(&unused, &right, c, w.t->count, w.t));
        if (right)
            AR_TRY(pool_rows(of, &s, w.t));
        if (right && say_pooling(t, "wanted", &of[0]) && say_pooling(t, "other", &of[1])) {
            t->kind = ARI_FOUND_POOLED;
            ARI_FACTS(t, {"of", .text = w.t->name});
        } else
            ari_trace_clear(t);
    }
    return AR_OK;
}

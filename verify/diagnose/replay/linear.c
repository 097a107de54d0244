/* SPDX-License-Identifier: Apache-2.0 */
/* A layer's first linear module computed again from other inputs than the norm's output. */
#include <stdlib.h>

#include "ref/core/size.h"
#include "verify/diagnose/replay/replay.h"

enum { INPUTS = 32, VALUES = ARI_PROBE_TOKENS * ARI_PROBE_FEATURES };

typedef struct linear {
    ari_probe p;
    const ar_dump_tensor *near[INPUTS + 1]; /* the last one NULL: no second term */
    size_t n, base;                         /* base: which one the reference reads */
    double (*of)[VALUES];                   /* [n + 1]: what the module makes of each without bias */
} linear;

/* Sets the values where the module reads the sum of two tensors. */
static void put_sum(linear *l, size_t a, size_t b)
{
    for (size_t i = 0; i < l->p.tokens * l->p.outs; i++)
        l->p.is[i] = l->of[a][i] + l->of[b][i] + (double)l->p.bias[i % l->p.outs];
}

static ar_status read_values(linear *l)
{
    float *row = NULL;
    double *x = NULL;
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, ARI_ALLOC_ZERO(&l->of, l->n + 1, "products"));
    AR_TRY_TO(done, st, ARI_ALLOC(&row, l->p.in, "a row"));
    AR_TRY_TO(done, st, ARI_ALLOC(&x, l->p.in, "a row"));
    for (size_t i = 0; i < l->n; i++) {
        for (size_t k = 0; k < l->p.tokens; k++) {
            const size_t at = (l->p.sample * l->p.seq + l->p.token[k]) * l->p.in;
            AR_TRY_TO(done, st, ar_dump_read_f32(l->near[i], at, l->p.in, row));
            for (size_t j = 0; j < l->p.in; j++)
                x[j] = (double)row[j];
            ari_probe_put(&l->p, k, x);
        }
        for (size_t k = 0; k < l->p.tokens * l->p.outs; k++)
            l->of[i][k] = l->p.is[k] - (double)l->p.bias[k % l->p.outs];
    }
done:
    free(row);
    free(x);
    return st;
}

static bool is_norm(const ar_dump_tensor *t)
{
    return ari_role_place_of(ari_module_of(t->name, ari_order_of(t->name, NULL).stem).role)->is & ARI_IS_NORM;
}

static void find_input(ari_trace *t, linear *l)
{
    double least = HUGE_VAL, best = ARI_REPLAY_MISTAKE;
    for (size_t i = 0; i < l->n; i++) {
        put_sum(l, i, l->n);
        l->base = ari_probe_try_base(&l->p, &least) ? i : l->base;
    }
    for (size_t i = 0; i < l->n && least <= ARI_REPLAY_BASE; i++) {
        for (size_t k = i + 1; k <= l->n; k++) {
            put_sum(l, i, k);
            const double left = ari_probe_left(&l->p);
            if (!(left < best))
                continue;
            best = left;
            const bool norm = is_norm(l->near[l->base]);
            const bool other = k == l->n && is_norm(l->near[i]);
            ari_found(t, ARI_FOUND_LINEAR, norm && !other ? ARI_IF(ZERO) : 0);
            ari_words(t, "wanted", "%.90s", l->near[l->base]->name);
            ari_words(t, "other", "%.80s%s%.80s", l->near[i]->name, k < l->n ? " + " : "",
                      k < l->n ? l->near[k]->name : "");
            ari_number(t, "left", left);
        }
    }
}

ar_status ari_measure_linear(ari_trace *t, const ari_case *c)
{
    const ari_role role = ari_replay_role(c);
    linear l = {.base = 0};
    ar_status st = AR_OK;
    bool held = true;
    if (!ari_may_replay(c) || !(role == ARI_Q || role == ARI_K || role == ARI_V || role == ARI_QKV ||
                                role == ARI_GATE || role == ARI_UP || role == ARI_GATE_UP || role == ARI_FIRST))
        return AR_OK;
    ari_probe_choose(&l.p, c);
    AR_TRY_TO(done, st, ari_probe_read_layer(&l.p, &held, role, 0));
    if (!held)
        goto done;
    l.n = ari_replay_near(l.near, INPUTS, c, l.p.in);
    AR_TRY_TO(done, st, read_values(&l));
    find_input(t, &l);
done:
    free(l.of);
    ari_probe_fini(&l.p);
    return st;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* All of the data in another place: dimensions in another order, everything some elements further on. */
#include <stdio.h>

#include "verify/diagnose/explain_impl.h"

/* --- dimensions in another order ---------------------------------------------------------------------------------- */

/* The tensor's elements in the order of its dimensions `order`: the strides in the reference. */
typedef struct permuted {
    int nd, order[AR_MAX_DIMS];
    size_t extent[AR_MAX_DIMS], stride[AR_MAX_DIMS];
} permuted;

static permuted permute(const size_t *shape, int nd, const int *order)
{
    permuted p = {.nd = nd};
    for (int i = 0; i < nd; i++) {
        size_t stride = 1;
        for (int k = order[i] + 1; k < nd; k++)
            stride *= shape[k];
        p.order[i] = order[i];
        p.extent[i] = shape[order[i]];
        p.stride[i] = stride;
    }
    return p;
}

/* Where element i of the permuted order stands in row-major order. */
static size_t permuted_at(const permuted *p, size_t i)
{
    size_t at = 0;
    for (int k = p->nd - 1; k >= 0; k--) {
        at += i % p->extent[k] * p->stride[k];
        i /= p->extent[k];
    }
    return at;
}

/* Whether the other's elements, in their own order, are the reference's in the permuted one. */
static bool is_permuted(const ari_whole *w, const permuted *p, double *worst)
{
    size_t telling = 0;
    *worst = 0.0;
    for (size_t i = 0; i < w->count; i++) {
        const size_t at = permuted_at(p, i);
        if (!ari_holds(w, w->val[i], (double)w->ref[at]))
            return false;
        if (!ari_same_bits(w->val[i], w->ref[at]))
            *worst = fmax(*worst, fabs((double)w->val[i] - (double)w->ref[at]));
        telling += ari_off(w, i);
    }
    return telling >= 4 && ari_explains(w, *worst);
}

static void say_transposed(ari_clue *f, const ari_whole *w, const permuted *p, double worst)
{
    const ari_grid *g = &w->view.grid;
    bool square = true;
    for (int i = 0; i < p->nd; i++)
        square = square && p->extent[i] == g->shape[i];
    ari_text t = ari_find(f, ARI_IDENTITY + 8);
    snprintf(f->value, sizeof f->value, "the reference's values transposed");
    ari_say(&t, "transposed: the data is the reference's with its dimensions in the order");
    for (int i = 0; i < p->nd; i++)
        ari_say(&t, i ? ", %d" : " %d", p->order[i]);
    ari_say(&t, square ? "" : ", written under the shape of the untransposed one (reshaped, not transposed back)");
    ari_say(&t, "; ");
    ari_say_exactness(&t, w, worst);
    if (g->d->ndim == 2 && g->d->pass != 'f' && g->d->pass != 'b')
        ari_say(&t, "; a weight [in, out] (Conv1D, JAX) against [out, in] (Linear)");
    else if (p->order[0] == 1 && p->nd >= 3)
        ari_say(&t, "; [s, b, h] against [b, s, h]");
    else
        ari_say(&t, "; heads and tokens exchanged, or a view of data that was not made contiguous");
}

static bool next_order(int *order, int nd)
{
    int i = nd - 2, k = nd - 1;
    while (i >= 0 && order[i] > order[i + 1])
        i--;
    if (i < 0)
        return false;
    while (order[k] < order[i])
        k--;
    const int swap = order[i];
    order[i] = order[k];
    order[k] = swap;
    for (int a = i + 1, b = nd - 1; a < b; a++, b--) {
        const int s = order[a];
        order[a] = order[b];
        order[b] = s;
    }
    return true;
}

/* Whether an order moves a dimension of more than one element past another. */
static bool moves(const size_t *shape, const int *order, int nd)
{
    int last = -1;
    for (int i = 0; i < nd; i++) {
        if (shape[order[i]] == 1)
            continue;
        if (order[i] < last)
            return true;
        last = order[i];
    }
    return false;
}

/* Of [b, s, H*d]: each sample's [s, H, d] written as [H, s, d], or the other way round, under the shape of the
 * former. */
static bool seek_heads(ari_clue *f, const ari_whole *w)
{
    const ari_grid *g = &w->view.grid;
    if (g->nd != 3 || w->inner)
        return false;
    for (size_t heads = 2; heads <= g->cols / 2 && heads <= 256; heads++) {
        const size_t known = w->facts.heads ? w->facts.heads : heads, d = g->cols / heads, s = g->shape[1];
        const size_t ways[2][4] = {{g->shape[0], s, heads, d}, {g->shape[0], heads, s, d}};
        static const int order[] = {0, 2, 1, 3};
        if (g->cols % heads != 0 || (heads != known && heads != w->facts.kv_heads))
            continue;
        for (size_t k = 0; k < 2; k++) {
            const permuted p = permute(ways[k], 4, order);
            double worst = 0.0;
            if (!is_permuted(w, &p, &worst))
                continue;
            ari_text t = ari_find(f, ARI_IDENTITY + 8);
            snprintf(f->value, sizeof f->value, "the reference's values in another place");
            ari_say(
                &t,
                "heads and tokens exchanged: the reference's [b, s, %zu heads, %zu] stands here as [b, %zu heads, s, "
                "%zu] under the old shape, or the other way round (a reshape where a transposition was wanted first); ",
                heads, d, heads, d);
            ari_say_exactness(&t, w, worst);
            return true;
        }
    }
    return false;
}

ar_status ari_seek_transposed(ari_clue *f, const ari_whole *w)
{
    const ari_grid *g = &w->view.grid;
    int order[AR_MAX_DIMS] = {0, 1, 2, 3};
    if (seek_heads(f, w))
        return AR_OK;
    /* As dimensions of the reference; then as dimensions of the other, which is the inverse. */
    while (g->nd > 1 && next_order(order, g->nd)) {
        permuted p = permute(g->shape, g->nd, order);
        double worst = 0.0;
        if (!moves(g->shape, order, g->nd))
            continue;
        if (is_permuted(w, &p, &worst)) {
            say_transposed(f, w, &p, worst);
            return AR_OK;
        }
        size_t shape[AR_MAX_DIMS]; /* the reference read as if it had the permuted shape */
        for (int i = 0; i < g->nd; i++)
            shape[order[i]] = g->shape[i];
        permuted inverse = permute(shape, g->nd, order);
        if (is_permuted(w, &inverse, &worst)) {
            say_transposed(f, w, &inverse, worst);
            return AR_OK;
        }
    }
    return AR_OK;
}

/* --- everything some elements further on -------------------------------------------------------------------------- */

enum { WINDOW = 12 };

/* A window of the other's values that differ and vary; SIZE_MAX if there is none. */
static size_t telling_window(const ari_whole *w)
{
    for (size_t at = w->count / 3; at + WINDOW <= w->count; at++) {
        size_t telling = 0;
        for (size_t i = at; i < at + WINDOW; i++)
            telling += ari_off(w, i) && fabs((double)w->val[i]) > 16.0 * w->absolute && isfinite(w->val[i]);
        if (telling == WINDOW && !ari_same_bits(w->val[at], w->val[at + 1]))
            return at;
    }
    return SIZE_MAX;
}

static bool window_at(const ari_whole *w, size_t at, size_t from)
{
    for (size_t i = 0; i < WINDOW; i++) {
        if (!ari_holds(w, w->val[at + i], (double)w->ref[from + i]))
            return false;
    }
    return true;
}

/* Elements that differ and are the reference's `by` further on; *lost: that would be from outside, or are not. */
static size_t shifted(const ari_whole *w, ptrdiff_t by, size_t *lost)
{
    size_t follow = 0;
    *lost = 0;
    for (size_t i = 0; i < w->count; i++) {
        const ptrdiff_t from = (ptrdiff_t)i + by;
        if (!ari_off(w, i))
            continue;
        if (from >= 0 && (size_t)from < w->count && ari_holds(w, w->val[i], (double)w->ref[from]))
            follow++;
        else
            (*lost)++;
    }
    return follow;
}

ar_status ari_seek_shift(ari_clue *f, const ari_whole *w)
{
    const size_t at = telling_window(w);
    if (at == SIZE_MAX)
        return AR_OK;
    for (size_t from = 0; from + WINDOW <= w->count; from++) {
        if (from == at || !window_at(w, at, from))
            continue;
        const ptrdiff_t by = (ptrdiff_t)from - (ptrdiff_t)at;
        const size_t size = (size_t)(by < 0 ? -by : by);
        size_t lost = 0;
        const size_t follow = shifted(w, by, &lost);
        if (follow < 16 || lost > size || lost * 2 > follow)
            continue;
        ari_text t = ari_find(f, size % w->view.grid.cols ? ARI_IDENTITY + 2 : ARI_TRACE + 6);
        snprintf(f->value, sizeof f->value, "the reference's values %zu elements %s", size, by < 0 ? "earlier" : "on");
        ari_say(&t,
                "shifted in memory: %zu of %zu different elements are the reference's %zu %s; an offset into a "
                "buffer or a file is off by that much",
                follow, follow + lost, size, by < 0 ? "before" : "after");
        if (size % w->view.grid.cols == 0 && w->view.grid.nd > 1)
            ari_say(&t, " (%zu row%s)", size / w->view.grid.cols, size == w->view.grid.cols ? "" : "s");
        return AR_OK;
    }
    return AR_OK;
}

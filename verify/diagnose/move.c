/* SPDX-License-Identifier: Apache-2.0 */
/* All of the data in another place: dimensions in another order, everything some elements further on; or pairs of
 * features turned by an angle of their position: rotary embeddings at other positions, or with other frequencies. */
#include <complex.h>
#include <stdlib.h>

#include "ref/core/size.h"
#include "verify/diagnose/case.h"

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
        p.order[i] = order[i];
        p.extent[i] = shape[order[i]];
        p.stride[i] = ari_volume(shape + order[i] + 1, nd - order[i] - 1);
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
static bool is_permuted(const ari_case *c, const permuted *p, double *worst)
{
    size_t telling = 0;
    *worst = 0.0;
    for (size_t i = 0; i < c->count; i++) {
        const size_t at = permuted_at(p, i);
        if (!ari_holds(c, c->val[i], (double)c->ref[at]))
            return false;
        if (!ari_same_bits(c->val[i], c->ref[at]))
            *worst = fmax(*worst, fabs((double)c->val[i] - (double)c->ref[at]));
        telling += ari_off(c, i);
    }
    return telling >= 4 && ari_explains(c, *worst);
}

static void found_transposed(ari_trace *t, const ari_case *c, const permuted *p, double worst)
{
    bool square = true;
    for (int i = 0; i < p->nd; i++)
        square = square && p->extent[i] == c->grid.shape[i];
    ari_found(t, ARI_FOUND_TRANSPOSED, p->order[0] == 1 && p->nd >= 3 ? ARI_IF(SAMPLES) : 0);
    ari_text order = ari_list(t, "order");
    for (int i = 0; i < p->nd; i++)
        ari_say(&order, i ? ", %d" : "%d", p->order[i]);
    ari_words(t, "shape",
              square ? "" : ", written under the shape of the untransposed one (reshaped, not transposed back)");
    ari_say_exactness(t, c, worst);
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
static bool look_for_heads(ari_trace *t, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    const size_t head = g->d->head_dim, own = c->inner && head > 0 ? g->cols / head : c->facts.heads;
    if (g->nd != 3 || (c->inner && own == 0))
        return false;
    for (size_t heads = 2; heads <= g->cols / 2 && heads <= 256; heads++) {
        const size_t known = own ? own : heads, d = g->cols / heads, s = g->shape[1];
        const size_t ways[2][4] = {{g->shape[0], s, heads, d}, {g->shape[0], heads, s, d}};
        static const int order[] = {0, 2, 1, 3};
        if (g->cols % heads != 0 || (heads != known && heads != c->facts.kv_heads))
            continue;
        for (size_t k = 0; k < 2; k++) {
            const permuted p = permute(ways[k], 4, order);
            double worst = 0.0;
            if (!is_permuted(c, &p, &worst))
                continue;
            ari_found(t, ARI_FOUND_HEADS_MOVED, 0);
            ari_count(t, "heads", heads);
            ari_count(t, "lanes", d);
            ari_say_exactness(t, c, worst);
            return true;
        }
    }
    return false;
}

ar_status ari_measure_transposed(ari_trace *t, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    int order[AR_MAX_DIMS] = {0, 1, 2, 3};
    if (look_for_heads(t, c))
        return AR_OK;
    /* As dimensions of the reference; then as dimensions of the other, which is the inverse. */
    while (g->nd > 1 && next_order(order, g->nd)) {
        permuted p = permute(g->shape, g->nd, order);
        double worst = 0.0;
        if (!moves(g->shape, order, g->nd))
            continue;
        if (is_permuted(c, &p, &worst)) {
            found_transposed(t, c, &p, worst);
            return AR_OK;
        }
        size_t shape[AR_MAX_DIMS]; /* the reference read as if it had the permuted shape */
        for (int i = 0; i < g->nd; i++)
            shape[order[i]] = g->shape[i];
        permuted inverse = permute(shape, g->nd, order);
        if (is_permuted(c, &inverse, &worst)) {
            found_transposed(t, c, &inverse, worst);
            return AR_OK;
        }
    }
    return AR_OK;
}

/* --- everything some elements further on -------------------------------------------------------------------------- */

enum { WINDOW = 12 };

/* A window of the other's values that differ and vary; SIZE_MAX if there is none. */
static size_t telling_window(const ari_case *c)
{
    for (size_t at = c->count / 3; at + WINDOW <= c->count; at++) {
        size_t telling = 0;
        for (size_t i = at; i < at + WINDOW; i++)
            telling += ari_off(c, i) && fabs((double)c->val[i]) > 16.0 * c->absolute && isfinite(c->val[i]);
        if (telling == WINDOW && !ari_same_bits(c->val[at], c->val[at + 1]))
            return at;
    }
    return SIZE_MAX;
}

static bool window_at(const ari_case *c, size_t at, size_t from)
{
    for (size_t i = 0; i < WINDOW; i++) {
        if (!ari_holds(c, c->val[at + i], (double)c->ref[from + i]))
            return false;
    }
    return true;
}

/* Elements that differ and are the reference's `by` further on; *lost: that would be from outside, or are not. */
static size_t shifted(const ari_case *c, ptrdiff_t by, size_t *lost)
{
    size_t follow = 0;
    *lost = 0;
    for (size_t i = 0; i < c->count; i++) {
        const ptrdiff_t from = (ptrdiff_t)i + by;
        if (!ari_off(c, i))
            continue;
        if (from >= 0 && (size_t)from < c->count && ari_holds(c, c->val[i], (double)c->ref[from]))
            follow++;
        else
            (*lost)++;
    }
    return follow;
}

ar_status ari_measure_shift(ari_trace *t, const ari_case *c)
{
    const size_t at = telling_window(c);
    if (at == SIZE_MAX)
        return AR_OK;
    for (size_t from = 0; from + WINDOW <= c->count; from++) {
        if (from == at || !window_at(c, at, from))
            continue;
        const ptrdiff_t by = (ptrdiff_t)from - (ptrdiff_t)at;
        const size_t size = (size_t)(by < 0 ? -by : by);
        size_t lost = 0;
        const size_t follow = shifted(c, by, &lost);
        if (follow < 16 || lost > size || lost * 2 > follow)
            continue;
        const size_t rows = size % c->grid.cols == 0 && c->grid.nd > 1 ? size / c->grid.cols : 0;
        ari_found(t, ARI_FOUND_SHIFTED, 0);
        t->less = size % c->grid.cols ? 0 : 6;
        ari_count(t, "follow", follow);
        ari_count(t, "all", follow + lost);
        ari_count(t, "by", size);
        ari_words(t, "looks", by < 0 ? "earlier" : "on");
        ari_words(t, "side", by < 0 ? "before" : "after");
        ari_words(t, "rows", rows == 1 ? " (1 row)" : rows ? " (%zu rows)" : "", rows);
        return AR_OK;
    }
    return AR_OK;
}

/* --- turned pairs ------------------------------------------------------------------------------------------------- */

/* Where positions and pairs lie. */
typedef struct turns {
    int dim;             /* of positions */
    size_t seq, head, n; /* positions, elements of a head, pairs of one */
    size_t end;          /* of positions whose reference is not zero: a last token's key has no gradient */
    size_t near, apart;  /* pair p begins at p*near; its second element is `apart` further on */
    double _Complex *z;  /* [seq][n]: sum over heads and samples of value times conjugate reference */
    double length, both; /* sum of |value||reference| of pairs that differ; of |sum| over positions and pairs */
    double vv, rr;
    double sign; /* of the angle that a later position turns values by: gradients are turned back */
} turns;

static void add_pair(turns *t, const ari_case *c, size_t i, size_t k, size_t pos, size_t pair)
{
    const double a = (double)c->ref[i], b = (double)c->ref[k], x = (double)c->val[i], y = (double)c->val[k];
    if (!ari_off(c, i) && !ari_off(c, k))
        return;
    t->z[pos * t->n + pair] += CMPLX(x * a + y * b, y * a - x * b);
    const double rr = a * a + b * b, vv = x * x + y * y; /* of fp32 numbers: neither overflows, nor their product */
    t->length += sqrt(rr * vv);
    t->vv += vv;
    t->rr += rr;
}

/* Whether every pair that differs was turned, by an angle of its position and its place in the head alone. */
static bool are_turned(turns *t, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    t->length = t->both = t->vv = t->rr = 0.0;
    memset(t->z, 0, t->seq * t->n * sizeof *t->z);
    for (size_t start = 0; start < c->count; start += t->head) {
        const size_t pos = ari_grid_index(g, start, t->dim);
        for (size_t p = 0; p < t->n; p++)
            add_pair(t, c, start + p * t->near, start + p * t->near + t->apart, pos, p);
    }
    for (size_t i = 0; i < t->seq * t->n; i++)
        t->both += cabs(t->z[i]);
    return t->length > 0.0 && t->both > 0.999 * t->length && fabs(t->vv / t->rr - 1.0) < 2e-3;
}

/* What the angles leave of the differences, relative to them; noise is turned by no angle. */
static double left_by(const turns *t, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    double left = 0.0, all = 0.0;
    for (size_t at = 0; at < c->count / t->head * t->n; at++) {
        const size_t p = at % t->n, start = at / t->n * t->head, i = start + p * t->near, k = i + t->apart;
        const double _Complex z = t->z[ari_grid_index(g, start, t->dim) * t->n + p];
        const double _Complex r = CMPLX((double)c->ref[i], (double)c->ref[k]);
        const double _Complex v = CMPLX((double)c->val[i], (double)c->val[k]);
        const double off = cabs(v - r), rest = cabs(z) > 0.0 ? cabs(v - r * (z / cabs(z))) : off;
        left += rest * rest;
        all += off * off;
    }
    return left / all;
}

static double wrapped(double angle)
{
    return remainder(angle, 6.283185307179586);
}

/* The angle of the fastest pair at a position, which turns by 1 from one position to the next. */
static double angle_at(const turns *t, size_t pos)
{
    return t->sign * carg(t->z[pos * t->n]);
}

static bool differs_at(const turns *t, size_t pos)
{
    for (size_t p = 0; p < t->n; p++) {
        if (fabs(carg(t->z[pos * t->n + p])) > 1e-3)
            return true;
    }
    return false;
}

/* Whether the fastest pair is turned by `by` times the position, everywhere. */
static bool turns_with_position(const turns *t, double by)
{
    for (size_t pos = 0; pos < t->end; pos++) {
        if (fabs(wrapped(angle_at(t, pos) - by * (double)pos)) > 0.02)
            return false;
    }
    return true;
}

/* The number of positions that turns the fastest pair by this angle; 0: none of at most `most`. */
static long positions_of(double angle, long most)
{
    for (long k = 1; k <= most; k++) {
        if (fabs(wrapped(angle - (double)k)) < 0.01)
            return k;
        if (fabs(wrapped(angle + (double)k)) < 0.01)
            return -k;
    }
    return 0;
}

static void found_positions(ari_trace *t, const turns *r)
{
    size_t first = 0, last = r->end;
    while (first < last && !differs_at(r, first))
        first++;
    while (last > first && !differs_at(r, last - 1))
        last--;
    const double angle = angle_at(r, first);
    bool same = true;
    for (size_t pos = first; pos < last; pos++)
        same = same && fabs(wrapped(angle_at(r, pos) - angle)) < 0.02;
    const long by = positions_of(angle, (long)r->seq * 2);
    if (fabs(angle) < 1e-3 && first > 0 && same)
        t->is |= ARI_IF(OF_THETA);
    else if (by != 0 && same && last == r->end)
        t->is |= ARI_IF(SHIFT);
    else if (first > 0 && fabs(wrapped(angle + (double)first)) < 0.01)
        t->is |= ARI_IF(SOME);
    ari_count(t, "first", first);
    ari_count(t, "by", (size_t)labs(by));
    ari_words(t, "side", by > 0 ? "later" : "earlier");
    ari_number(t, "angle", angle);
}

static void found_turns(ari_trace *t, const turns *r)
{
    ari_found(t, ARI_FOUND_ROPE, 0);
    ari_words(t, "pairing", r->near == 1 ? "of two halves of a head" : "of neighbours");
    if (turns_with_position(r, -1.0))
        t->is |= ARI_IF(ZERO);
    else if (turns_with_position(r, -2.0))
        t->is |= ARI_IF(NEGATIVE);
    else if (turns_with_position(r, 1.0))
        t->is |= ARI_IF(TWICE);
    else
        found_positions(t, r);
}

ar_status ari_measure_rope(ari_trace *t, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    turns r = {.sign = g->d->pass == 'b' ? -1.0 : 1.0,
               .dim = g->nd - 2,
               .head = g->nd == 4   ? g->cols
                       : g->nd == 3 ? ari_head_size(c, 2)
                                    : 0};
    if ((!ari_is_activation(g->d)) || r.head < 4 || r.head % 2 || g->cols % r.head || c->inner ||
        c->survey.total.nan > 0 || c->survey.different < 16)
        return AR_OK;
    if (g->nd == 4 && strcmp(ari_dim_name(g, 1, false), "token") == 0)
        r.dim = 1;
    r.seq = g->shape[r.dim];
    r.n = r.head / 2;
    for (size_t i = 0; i < c->count; i++) {
        const size_t pos = c->ref[i] != 0.0f ? ari_grid_index(g, i, r.dim) + 1 : 0;
        r.end = pos > r.end ? pos : r.end;
    }
    AR_TRY(ari_alloc((void **)&r.z, r.seq * r.n, sizeof *r.z, g->d->name));
    for (int halves = 1; halves >= 0 && t->kind == ARI_FOUND_NOTHING; halves--) {
        r.near = halves ? 1 : 2;
        r.apart = halves ? r.n : 1;
        if (r.seq > 1 && are_turned(&r, c) && left_by(&r, c) < 0.05)
            found_turns(t, &r);
    }
    free(r.z);
    return AR_OK;
}

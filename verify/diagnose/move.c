/* SPDX-License-Identifier: Apache-2.0 */
/* All of the data in another place: dimensions in another order, everything some elements further on; or pairs of
 * features turned by an angle of their position: rotary embeddings at other positions, or with other frequencies. */
#include <complex.h>
#include <stdlib.h>

#include "verify/diagnose/hypothesis.h"
#include "verify/diagnose/replay/replay.h"

/* --- dimensions in another order ---------------------------------------------------------------------------------- */

enum { MOST_FACTORS = AR_MAX_DIMS + 1 }; /* dimensions, one of which may be cut in two */

/* The reference's data, read with dimensions `extent`, in the order of its dimensions `order`. */
typedef struct permuted {
    int nd, order[MOST_FACTORS];
    size_t extent[MOST_FACTORS], stride[MOST_FACTORS]; /* in that order */
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

static double expect_permuted(const ari_hypothesis *h, const ari_run *run, size_t i)
{
    const permuted *p = h->of;
    size_t at = 0, rest = run->index + i;
    for (int k = p->nd - 1; k >= 0; k--) {
        at += rest % p->extent[k] * p->stride[k];
        rest /= p->extent[k];
    }
    return (double)h->c->ref[at];
}

/* True if the other's elements in their own order are the reference's in the permuted order, or the inverse: the data
 * read with those dimensions in the original order. */
static bool is_permuted(ari_residual *left, const ari_case *c, permuted *p, size_t least)
{
    const ari_hypothesis h = {.expect = expect_permuted, .c = c, .of = p};
    for (int way = 0; way < 2; way++) {
        int back[MOST_FACTORS] = {0};
        if (ari_holds_all(left, &h) && left->held >= least)
            return true;
        for (int i = 0; i < p->nd; i++)
            back[p->order[i]] = i;
        *p = permute(p->extent, p->nd, back);
    }
    return false;
}

/* The next order in which each dimension is named once. */
static bool next_order(int *order, int nd)
{
    unsigned named;
    do {
        int i = nd - 1;
        while (i >= 0 && ++order[i] == nd)
            order[i--] = 0;
        if (i < 0)
            return false;
        named = 0;
        for (int k = 0; k < nd; k++)
            named |= 1u << order[k];
    } while (named != (1u << nd) - 1u);
    return true;
}

static void look_for_orders(ari_trace *t, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    int order[AR_MAX_DIMS] = {0, 1, 2, 3};
    ari_residual left;
    while (t->kind == ARI_FOUND_NOTHING && next_order(order, g->nd)) {
        permuted p = permute(g->shape, g->nd, order);
        if (!is_permuted(&left, c, &p, 4))
            continue;
        const bool square = memcmp(p.extent, g->shape, (size_t)g->nd * sizeof *p.extent) == 0;
        ari_trace_set(t, ARI_FOUND_TRANSPOSED, p.order[0] == 1 && p.nd >= 3 ? ARI_IF(SAMPLES) : 0);
        ari_text text = ari_list(t, "order");
        for (int i = 0; i < p.nd; i++)
            ari_say(&text, i ? ", %d" : "%d", p.order[i]);
        ari_words(t, "shape",
                  square ? "" : ", written under the shape of the untransposed one (reshaped, not transposed back)");
        ari_say_exactness(t, c, left.worst);
    }
}

/* A dimension of [b, s, h] cut in two and moved: the parts of n ranks, [b, s/n, h] each, one after the other, of all
 * samples or of those that go through the model together; or each sample's heads [s, H, d] written as [H, s, d] under the
 * same shape. Or the inverse. */
static const struct {
    ari_trace_kind kind;
    int dim, order[5]; /* of [groups of samples, samples, ..] */
} cuts[] = {{ARI_FOUND_RANK_MAJOR, 1, {0, 2, 1, 3, 4}}, {ARI_FOUND_HEADS_MOVED, 2, {0, 1, 3, 2, 4}}};

/* True if a dimension of a three-dimensional tensor may be cut into so many parts. */
static bool may_be_cut(const ari_case *c, int dim, size_t parts)
{
    const ari_grid *g = &c->grid;
    const size_t head = g->d->head_dim, heads = c->inner && head > 0 ? g->cols / head : c->facts.heads;
    if (g->shape[dim] % parts != 0)
        return false;
    if (dim == 1)
        return strcmp(ari_dim_name(g, 1, false), "token") == 0 && parts <= ARI_MOST_RANKS && parts < g->shape[1];
    return (heads == 0 && !c->inner) || parts == heads || (heads > 0 && parts == c->facts.kv_heads);
}

static void look_for_cuts(ari_trace *t, const ari_case *c)
{
    const size_t *shape = c->grid.shape;
    enum { MOST_PARTS = 256 };
    ari_residual left;
    for (size_t k = 0; k < sizeof cuts / sizeof *cuts; k++) {
        const int dim = cuts[k].dim;
        for (size_t i = 0; i < shape[dim] * shape[0] && t->kind == ARI_FOUND_NOTHING; i++) {
            const size_t n = i / shape[0] + 1, groups = i % shape[0] + 1, b = shape[0] / groups;
            const size_t parts[][5] = {{groups, b, n, shape[1] / n, shape[2]}, {groups, b, shape[1], n, shape[2] / n}};
            if (n < 2 || n > MOST_PARTS || shape[0] % groups != 0 || (dim == 2 ? groups > 1 : b == 1 && groups > 1) ||
                !may_be_cut(c, dim, n))
                continue;
            permuted p = permute(parts[dim - 1], 5, cuts[k].order);
            if (!is_permuted(&left, c, &p, 8))
                continue;
            ARI_FINDING(t, cuts[k].kind, 0, {"n", .count = n}, {"heads", .count = n}, {"lanes", .count = shape[2] / n});
            ari_say_exactness(t, c, left.worst);
        }
    }
}

ar_status ari_measure_transposed(ari_trace *t, const ari_case *c)
{
    if (c->grid.nd == 3)
        look_for_cuts(t, c);
    if (t->kind == ARI_FOUND_NOTHING)
        look_for_orders(t, c);
    return AR_OK;
}

/* --- parts cut as one --------------------------------------------------------------------------------------------- */

enum { MOST_PARTS = 3 };

/* The weights that many programs keep in one tensor, one after the other, of which the case's own is one. */
typedef struct packed {
    float *at;         /* [all, cols] */
    size_t all, cols;  /* all 0: not known */
    size_t start, end; /* rows of the case's own */
    size_t ranks;      /* blocks that all are cut into at once, each taken for a block of every part */
} packed;

static double expect_cut_as_one(const ari_hypothesis *h, const ari_run *run, size_t i)
{
    const packed *p = h->of;
    const size_t at = run->index + i, row = at / p->cols, each = (p->end - p->start) / p->ranks;
    return (double)p->at[(row / each * p->all + p->start) / p->ranks * p->cols + row % each * p->cols + at % p->cols];
}

static ar_status read_packed(packed *p, const ari_case *c, const ari_role *role)
{
    const ar_dump_tensor *part[MOST_PARTS];
    size_t rows = 0, at = 0, parts = 0;
    for (; parts < MOST_PARTS && role[parts] != ARI_NO_ROLE; parts++) {
        const bool own = role[parts] == c->role;
        const ar_dump_tensor *t = own ? c->reference : ari_replay_parameter(c, role[parts], ".weight");
        if (!t || t->ndim != 2 || t->shape[1] != p->cols)
            return AR_OK;
        p->start = own ? rows : p->start;
        rows += t->shape[0];
        p->end = own ? rows : p->end;
        part[parts] = t;
    }
    AR_TRY(ARI_TAKE(&p->at, c->arena, rows * p->cols, c->d->name));
    for (size_t k = 0; k < parts; at += part[k++]->count)
        AR_TRY(ar_dump_read_f32(part[k], 0, part[k]->count, p->at + at));
    p->all = p->end > 0 ? rows : 0;
    return AR_OK;
}

/* Each part has to be cut separately: else a rank has all of the first part instead of a share of every one. */
ar_status ari_measure_packed(ari_trace *t, const ari_case *c)
{
    static const ari_role roles[][MOST_PARTS] = {{ARI_GATE, ARI_UP, ARI_NO_ROLE}, {ARI_Q, ARI_K, ARI_V}};
    for (size_t i = 0; i < 2 && c->grid.nd == 2 && t->kind == ARI_FOUND_NOTHING; i++) {
        packed p = {.cols = c->grid.cols, .ranks = 2};
        const ari_hypothesis h = {.expect = expect_cut_as_one, .c = c, .of = &p, .kind = ARI_FOUND_SHARDS};
        AR_TRY(read_packed(&p, c, roles[i]));
        while (p.ranks <= ARI_MOST_RANKS &&
               (p.all % p.ranks || p.start % p.ranks || p.end % p.ranks || p.all == 0 || !ari_holds_all(NULL, &h)))
            p.ranks++;
        if (p.ranks <= ARI_MOST_RANKS) {
            ari_trace_set(t, ARI_FOUND_SHARDS, ARI_IF(PACKED));
            ari_words(t, "pairs", "%s, one after the other, in %zu blocks", i == 0 ? "gate and up" : "q, k and v",
                      p.ranks);
        }
    }
    return AR_OK;
}

/* --- everything some elements further on -------------------------------------------------------------------------- */

static double expect_shifted(const ari_hypothesis *h, const ari_run *run, size_t i)
{
    const size_t from = run->index + i + (size_t) * (const ptrdiff_t *)h->of;
    return from < h->c->count ? (double)h->c->ref[from] : (double)NAN;
}

enum { WINDOW = 12 };

/* A window of the other's values that differ and vary; SIZE_MAX: none. */
static size_t telling_window(const ari_case *c)
{
    for (size_t at = c->count / 3, telling = 0; at < c->count; at++) {
        const bool tells = ari_off(c, at) && fabs((double)c->val[at]) > 16.0 * c->absolute && isfinite(c->val[at]);
        telling = tells ? telling + 1 : 0;
        if (telling >= WINDOW && !ari_same_bits(c->val[at], c->val[at - 1]))
            return at + 1 - WINDOW;
    }
    return SIZE_MAX;
}

static bool window_at(const ari_case *c, size_t at, size_t from)
{
    size_t i = 0;
    while (i < WINDOW && ari_holds(c, c->val[at + i], (double)c->ref[from + i]))
        i++;
    return i == WINDOW;
}

/* Elements that come in from outside are lost, as many as the shift; a shift moves a stretch of memory, not a column.
 * */
ar_status ari_measure_shift(ari_trace *t, const ari_case *c)
{
    const size_t at = telling_window(c);
    size_t first = 0, end = c->count; /* of what differs */
    while (first < end && !ari_off(c, first))
        first++;
    while (end > first && !ari_off(c, end - 1))
        end--;
    for (size_t from = 0; at < c->count && from + WINDOW <= c->count && t->kind == ARI_FOUND_NOTHING; from++) {
        const ptrdiff_t by = (ptrdiff_t)from - (ptrdiff_t)at;
        const size_t size = (size_t)(by < 0 ? -by : by), rows = c->grid.nd > 1 ? size / c->grid.cols : 0;
        if (by == 0 || !window_at(c, at, from))
            continue;
        const ari_hypothesis h = {expect_shifted,           .c = c, .of = &by, .may_miss = size, .differs_only = true,
                                  .kind = ARI_FOUND_SHIFTED};
        const ari_residual left = ari_residual_of(&h);
        if (left.held < 16 || left.missed > size || left.missed * 2 > left.held || left.held * 2 < end - first)
            continue;
        ari_trace_set(t, ARI_FOUND_SHIFTED, 0);
        t->penalty = size % c->grid.cols ? 0 : 6;
        ARI_FACTS(t, {"follow", .count = left.held}, {"all", .count = left.held + left.missed}, {"by", .count = size},
                  {"looks", .text = by < 0 ? "earlier" : "on"}, {"side", .text = by < 0 ? "before" : "after"});
        ari_words(t, "rows", size % c->grid.cols || rows == 0 ? "" : rows == 1 ? " (1 row)" : " (%zu rows)", rows);
    }
    return AR_OK;
}

/* --- turned pairs ------------------------------------------------------------------------------------------------- */

/* Layout of positions and rotary pairs. */
typedef struct turns {
    int dim;             /* of positions */
    size_t seq, head, n; /* positions, elements of a head, pairs of one */
    size_t end;          /* of positions whose reference is not zero: a last token's key has no gradient */
    size_t near, apart;  /* pair p begins at p*near; its second element is `apart` further on */
    double _Complex *z;  /* [seq][n]: sum over heads and samples of value times conjugate reference */
    double sign;         /* of the angle that a later position turns values by: gradients are turned back */
    float *gain, *shift; /* [cols], of a norm, which has turned what it multiplies; NULL */
} turns;

/* The first element of the pair that element i is in; *z: the sum that it is in. */
static size_t pair_of(double _Complex **z, const turns *t, const ari_grid *g, size_t i)
{
    const size_t lane = i % t->head, p = t->near == 1 ? lane % t->n : lane / 2;
    *z = &t->z[ari_grid_index(g, i, t->dim) * t->n + p];
    return i - lane + p * t->near;
}

static double gain_at(const turns *t, const ari_grid *g, size_t i)
{
    return t->gain ? (double)t->gain[i % g->cols] : 1.0;
}

static double _Complex pair_at(const float *x, const turns *t, const ari_grid *g, size_t i)
{
    // Not CMPLX, which some compilers lack, and no product with I, which would make NaN of infinity.
    const double parts[2] = {(double)x[i] / gain_at(t, g, i), (double)x[i + t->apart] / gain_at(t, g, i + t->apart)};
    double _Complex z;
    memcpy(&z, parts, sizeof z);
    return z;
}

static double expect_turned(const ari_hypothesis *h, const ari_run *run, size_t i)
{
    double _Complex *z;
    const size_t first = pair_of(&z, h->of, run->g, run->index + i);
    const double _Complex r = pair_at(h->c->ref, h->of, run->g, first),
                          turned = cabs(*z) > 0.0 ? r * (*z / cabs(*z)) : r;
    return gain_at(h->of, run->g, run->index + i) * (first == run->index + i ? creal(turned) : cimag(turned));
}

/* True if every differing pair was rotated by an angle that depends on its position and its place in the head alone.
 * The residual has to be small compared to the differences and to the values. */
static bool are_turned(const turns *t, const ari_case *c)
{
    static const double of_differences = 0.05, of_squares = 0.002;
    double squares = 0.0;
    memset(t->z, 0, t->seq * t->n * sizeof *t->z);
    for (size_t i = 0; i < c->count; i++) {
        double _Complex *z;
        if (pair_of(&z, t, &c->grid, i) != i || (!ari_off(c, i) && !ari_off(c, i + t->apart)))
            continue;
        const double _Complex r = pair_at(c->ref, t, &c->grid, i);
        *z += pair_at(c->val, t, &c->grid, i) * conj(r);
        squares += creal(r * conj(r));
    }
    const ari_hypothesis h = {.expect = expect_turned, .c = c, .of = t, .may_miss = c->count, .differs_only = true};
    const ari_residual left = ari_residual_of(&h);
    return left.left < of_differences * left.all && left.left < of_squares * squares;
}

/* Angles this far apart are different ones; below the last, a pair is not turned. */
static const double about = 0.02, right_at = 0.01, still = 1e-3;

static double off_by(double angle, double other)
{
    return fabs(remainder(angle - other, 6.283185307179586));
}

/* The angle of the fastest pair at a position, which turns by 1 from one position to the next. */
static double angle_at(const turns *t, size_t pos)
{
    return t->sign * carg(t->z[pos * t->n]);
}

/* True if the fastest pair is rotated by `from` plus `by` times the position throughout a range. */
static bool turns_by(const turns *t, size_t first, size_t last, double from, double by)
{
    while (first < last && off_by(angle_at(t, first), from + by * (double)first) <= about)
        first++;
    return first == last;
}

/* The number of positions that turns the fastest pair by this angle; 0: none of at most `most`. */
static long positions_of(double angle, long most)
{
    for (long k = 1; k <= 2 * most; k++) {
        const long by = k % 2 ? (k + 1) / 2 : -k / 2;
        if (off_by(angle, (double)by) < right_at)
            return by;
    }
    return 0;
}

static ari_properties positions_turned(ari_trace *t, const ari_case *c, const turns *r)
{
    size_t first, last;
    ari_bounding_range(c, r->dim, &first, &last);
    last = last < r->end ? last : r->end;
    const double angle = angle_at(r, first);
    const bool same = turns_by(r, first, last, angle, 0.0);
    const long by = positions_of(angle, (long)r->seq * 2);
    ARI_FACTS(t, {"first", .count = first}, {"by", .count = (size_t)labs(by)},
              {"side", .text = by > 0 ? "later" : "earlier"}, {"angle", .number = angle});
    if (fabs(angle) < still && first > 0 && same)
        return ARI_IF(OF_THETA);
    if (by != 0 && same && last == r->end)
        return ARI_IF(SHIFT);
    return first > 0 && off_by(angle, -(double)first) < right_at ? ARI_IF(SOME) : 0;
}

ar_status ari_measure_rope(ari_trace *t, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    turns r = {.sign = g->d->pass == 'b' ? -1.0 : 1.0,
               .dim = g->nd == 4 && strcmp(ari_dim_name(g, 1, false), "token") == 0 ? 1 : g->nd - 2,
               .head = g->nd == 4   ? g->cols
                       : g->nd == 3 ? ari_head_size(c, 2)
                                    : 0};
    bool gained = false;
    if (r.head < 4 || r.head % 2 || g->cols % r.head || c->inner || g->shape[r.dim] < 2)
        return AR_OK;
    r.seq = g->shape[r.dim];
    r.n = r.head / 2;
    for (size_t i = 0; i < c->count; i++) {
        const size_t pos = c->ref[i] != 0.0f ? ari_grid_index(g, i, r.dim) + 1 : 0;
        r.end = pos > r.end ? pos : r.end;
    }
    if (c->is & ARI_IS_NORM)
        AR_TRY(ari_norm_parameters(&r.gain, &r.shift, &gained, c));
    AR_TRY(ARI_TAKE(&r.z, c->arena, r.seq * r.n, g->d->name));
    for (int halves = 1; halves >= 0 && t->kind == ARI_FOUND_NOTHING; halves--) {
        r.near = halves ? 1 : 2;
        r.apart = halves ? r.n : 1;
        if (!are_turned(&r, c))
            continue;
        ARI_FINDING(t, ARI_FOUND_ROPE, 0, {"pairing", .text = halves ? "of two halves of a head" : "of neighbours"});
        t->flags |= turns_by(&r, 0, r.end, 0.0, -1.0)   ? ARI_IF(ZERO)
                    : turns_by(&r, 0, r.end, 0.0, -2.0) ? ARI_IF(NEGATIVE)
                    : turns_by(&r, 0, r.end, 0.0, 1.0)  ? ARI_IF(TWICE)
                                                        : positions_turned(t, c, &r);
    }
    return AR_OK;
}

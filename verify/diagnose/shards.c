/* SPDX-License-Identifier: Apache-2.0 */
/* Whose part of a tensor each rank has: its own alone, ungathered; another rank's; that of its rank in the world. */
#include "ref/core/tensor_private.h"
#include "verify/diagnose/hypothesis.h"

/* --- each rank has its own part alone ----------------------------------------------------------------------------- */

/* A dimension shared out among neighbours: all but a rank's own part is zero, or anything. */
typedef struct sharing {
    int dim, neighbours;
    bool zero;
} sharing;

static double expect_own(const ari_hypothesis *h, const ari_run *run, size_t i)
{
    const sharing *s = h->of;
    const ari_rank_copy *copy = &run->g->d->copy[run->rank];
    const size_t n = copy->shape[s->dim], inner = ari_volume(copy->shape + s->dim + 1, copy->ndim - s->dim - 1);
    size_t start = 0, count = 0;
    ari_split_uneven(n, s->neighbours, run->rank % s->neighbours, &start, &count);
    if ((run->at + i) / inner % n - start < count)
        return (double)run->ref[i];
    return s->zero ? 0.0 : (double)run->value[i];
}

/* True if each rank's own part is right and the rest zero, or else most of it wrong. Zeros that are few are of something
 * else. */
static bool own_is_right(const ari_case *c, sharing s)
{
    const ari_hypothesis h = {.expect = expect_own, .c = c, .of = &s, .differs_only = true};
    const size_t n = (size_t)s.neighbours, others = c->survey.total.held / n * (n - 1);
    ari_residual left;
    for (int r = 0; r < c->d->ranks; r++) {
        const ari_rank_copy *copy = &c->d->copy[r];
        if (copy->ndim <= s.dim || copy->shape[s.dim] < n)
            return false;
    }
    return ari_holds_all(&left, &h) && left.held * (s.zero ? 8 : 2) > others;
}

/* Looks at the whole tensor, or at the positions that a rank has between the tensor-parallel regions. */
ar_status ari_measure_own_block(ari_trace *t, const ari_case *c)
{
    const ari_difference *d = c->d;
    const sharing tokens = {.dim = d->ndim - 2, .neighbours = ari_along(d, ARI_CUTS_FEATURES), .zero = true};
    /* Of all ranks, or where each data-parallel rank has its own samples of a value, of the ranks that have copies. */
    const int copies = c->survey.whole ? d->ranks : ari_is_activation(d) ? tokens.neighbours : 1;
    const bool all = copies > 1 && d->copy[0].layout->replicas == copies && c->survey.wrong_ranks == d->ranks;
    for (int i = 2 * c->grid.nd - 1; all && i >= 0 && t->kind == ARI_FOUND_NOTHING; i--) {
        const sharing s = {.dim = i / 2, .neighbours = copies, .zero = i % 2};
        if (!own_is_right(c, s))
            continue;
        ARI_FINDING(t, ARI_FOUND_OWN_BLOCK, s.zero ? ARI_IF(ZERO) : 0, {"n", .count = (size_t)copies},
                    {"axis", .text = ari_dim_name(&c->grid, s.dim, true)});
    }
    if (t->kind == ARI_FOUND_NOTHING && d->sp && ari_is_activation(d) && d->ndim >= 3 &&
        c->survey.total.zero == c->survey.total.different && own_is_right(c, tokens))
        ari_trace_set(t, ARI_FOUND_OWN_BLOCK, ARI_IF(TOKENS));
    return AR_OK;
}

/* --- a rank holds another rank's shard ---------------------------------------------------------------------------- */

/* A box that a rank holds. */
typedef struct box {
    int rank; /* -1: none */
    size_t k;
    const ar_box *at;
} box;

static box box_of(const ari_grid *g, int rank, size_t k)
{
    return (box){rank, k, &g->d->copy[rank].layout->box[k]};
}

/* Rows that box k of every rank has: where the parts are uneven, the smallest one's. */
static size_t common_rows(const ari_grid *g, size_t k)
{
    size_t rows = SIZE_MAX;
    for (int r = 0; r < g->d->ranks && g->nd > 1; r++) {
        const ar_layout *o = g->d->copy[r].layout;
        rows = k < o->nbox && o->box[k].extent[0] < rows ? o->box[k].extent[0] : rows;
    }
    return rows;
}

/* True if the bits in one box are the reference's in another; rows that not every rank has may be right in their own
 * place. A constant block equals many places, and proves only that it is right. */
static bool holds_block(const ari_grid *g, box mine, box from)
{
    const ari_rank_copy *copy = &g->d->copy[mine.rank];
    const size_t *extent = mine.at->extent, common = common_rows(g, mine.k), count = ari_volume(extent, g->d->ndim);
    const size_t inner = g->nd > 1 ? ari_volume(extent + 1, g->nd - 1) : count + 1; /* elements of a row */
    float other = NAN;
    bool varies = mine.at == from.at;
    for (int i = 0; i < g->d->ndim; i++) {
        if ((i == 0 && extent[i] > common ? common : extent[i]) > from.at->extent[i])
            return false;
    }
    for (size_t i = 0; i < count; i++) {
        const float value = copy->local[ari_box_index(copy->shape, mine.at->local, extent, g->d->ndim, i)];
        const size_t own = ari_box_index(g->shape, mine.at->global, extent, g->d->ndim, i);
        if (i / inner >= common && ari_same_bits(value, g->d->reference[own]))
            continue;
        const size_t there = ari_box_index(g->shape, from.at->global, extent, g->d->ndim, i);
        if ((g->nd > 1 && i / inner >= from.at->extent[0]) || !ari_same_bits(value, g->d->reference[there]))
            return false;
        varies = varies || (!isnan(other) && !ari_same_bits(other, value));
        other = value;
    }
    return varies;
}

/* Whose block it is that a rank holds in a box: its own if that is right; of others the same box before other boxes. */
static box find_source(const ari_grid *g, box mine)
{
    if (holds_block(g, mine, mine))
        return mine;
    for (int q = 0; q < g->d->ranks; q++) {
        const size_t boxes = g->d->copy[q].layout->nbox;
        for (size_t k = 0; k < boxes; k++) {
            const box from = box_of(g, q, (mine.k + k) % boxes);
            if (holds_block(g, mine, from))
                return from;
        }
    }
    return (box){.rank = -1};
}

/* The source of each box of each rank, in a row. */
typedef struct shards {
    const ari_grid *g;
    struct {
        box mine, from;
    } * of;
    size_t n;
} shards;

/* True if two boxes hold the same elements: several ranks may hold them. */
static bool is_same(const shards *s, const ar_box *a, const ar_box *b)
{
    return memcmp(a->global, b->global, (size_t)s->g->d->ndim * sizeof *a->global) == 0;
}

static bool is_moved(const shards *s, size_t i)
{
    return s->of[i].mine.at != s->of[i].from.at;
}

/* --- by what rule ------------------------------------------------------------------------------------------------- */

/* True if every box is the one held `by` places further on among n ranks `stride` apart, cyclically; or, for `one`, the
 * box at place `by`. Other ranks may hold the same. */
static bool follow(const shards *s, bool one, int stride, int n, int by)
{
    const ari_difference *d = s->g->d;
    bool all = true;
    for (size_t i = 0; i < s->n && all; i++) {
        const box mine = s->of[i].mine, from = s->of[i].from;
        const int own = mine.rank / stride % n, q = mine.rank + ((one ? by : (own + by) % n) - own) * stride;
        all = q < d->ranks && mine.k < d->copy[q].layout->nbox && is_same(s, box_of(s->g, q, mine.k).at, from.at);
    }
    return all;
}

/* True if an activation's boxes differ in their samples alone. */
static bool is_cut_by_samples(const ari_grid *g)
{
    const ar_layout *last = g->d->copy[g->d->ranks - 1].layout;
    return ari_is_activation(g->d) && g->nd > 1 && last->nbox > 0 && last->ndim == g->nd &&
           last->box[0].extent[0] < g->shape[0] &&
           memcmp(&last->box[0].extent[1], &g->shape[1], sizeof *g->shape * (size_t)(g->nd - 1)) == 0;
}

/* Along one axis, or over all ranks. */
static bool is_along(ari_trace *t, const ari_case *c, const shards *s, bool one)
{
    const ari_difference *d = s->g->d;
    char name[ARI_AXES_TEXT];
    for (int i = ARI_LAYOUT_AXES - 1, stride = 1; i >= -1; i--) {
        const ari_axes axes = i < 0 ? 0 : ari_layout_axes[i].axes;
        const int n = i < 0 ? d->ranks : ari_along(d, axes);
        for (int by = one ? 0 : 1; by < n && n > 1; by++) {
            if (!follow(s, one, i < 0 ? 1 : stride, n, by))
                continue;
            t->flags |= one ? ARI_IF(SAME) : ARI_IF(SHIFT);
            t->flags |= axes == ARI_CUTS_SAMPLES && ari_is_activation(d) ? ARI_IF(SAMPLES) : 0;
            ARI_FACTS(t, {"shift", .count = (size_t)by}, {"of", .count = (size_t)n});
            ari_words(t, "along", n < d->ranks ? " along %s" : "",
                      i < 0 ? "" : ari_extent_text(name, c->known->other, i));
            return true;
        }
        stride *= n;
    }
    return false;
}

/* True if a shard found at another rank's place is right at its own place too. */
static bool is_repeated(const shards *s)
{
    for (size_t i = 0; i < s->n; i++) {
        for (size_t k = 0; k < s->n && is_moved(s, i); k++) {
            if (!is_moved(s, k) && is_same(s, s->of[k].mine.at, s->of[i].from.at))
                return true;
        }
    }
    return false;
}

/* True if ranks hold a chunk of either half of the tokens. */
static bool is_of_chunks(const shards *s)
{
    const ar_layout *o = s->g->d->copy[0].layout;
    return s->g->nd >= 3 && ari_is_activation(s->g->d) && o->nbox == 2 && o->box[0].global[1] != o->box[1].global[1];
}

/* True if each rank has two consecutive chunks, or its own two exchanged. */
static bool is_zigzag(const shards *s)
{
    bool follow = true, swapped = true;
    for (size_t i = 0; i < s->n; i += 2) {
        const ar_box *first = s->of[i].from.at, *second = s->of[i + 1].from.at;
        follow = follow && second->global[1] == first->global[1] + first->extent[1];
        swapped = swapped && is_same(s, first, s->of[i + 1].mine.at) && is_same(s, second, s->of[i].mine.at);
    }
    return follow || swapped;
}

/* True if parts that consecutive ones of each n ranks share, KV heads or samples, are dealt out in turn: part r mod parts
 * instead of floor(r * parts / n). */
static bool is_by_rank(const shards *s, int n, int parts)
{
    bool holds = parts > 1 && n > parts && n % parts == 0;
    for (size_t i = 0; i < s->n && holds; i++)
        holds = s->of[i].mine.k > 0 || s->of[i].from.rank % n / (n / parts) == s->of[i].mine.rank % n % parts;
    return holds;
}

/* The first few that moved; false where some are another box's than that of their number. */
static bool say_pairs(ari_trace *t, const shards *s)
{
    const ari_difference *d = s->g->d;
    ari_text pairs = ari_list(t, "pairs");
    bool same = true;
    for (size_t i = 0, shown = 0; i < s->n; i++) {
        const box mine = s->of[i].mine, from = s->of[i].from;
        same = same && from.k == mine.k;
        if (!is_moved(s, i) || shown++ >= 4)
            continue;
        ari_say(&pairs, shown > 1 ? ", " : "");
        if (d->copy[mine.rank].layout->nbox > 1)
            ari_say(&pairs, "rank %d's part %zu is rank %d's part %zu", d->first_rank + mine.rank, mine.k,
                    d->first_rank + from.rank, from.k);
        else
            ari_say(&pairs, "rank %d has rank %d's", d->first_rank + mine.rank, d->first_rank + from.rank);
    }
    return same;
}

static void found_shards(ari_trace *t, const ari_case *c, const shards *s)
{
    const ari_difference *d = s->g->d;
    const int copies = d->copy[0].layout->replicas, parts = copies > 0 ? d->ranks / copies : 0;
    const bool chunks = is_of_chunks(s);
    ari_trace_set(t, ARI_FOUND_SHARDS, 0);
    const bool same = say_pairs(t, s);
    ARI_FACTS(t, {"heads", .count = (size_t)parts}, {"places", .count = (size_t)ari_along(d, ARI_CUTS_POSITIONS)});
    const int tp = ari_along(d, ARI_CUTS_FEATURES), n = is_by_rank(s, d->ranks, parts) ? d->ranks : tp;
    ARI_FACTS(t, {"n", .count = (size_t)n});
    if (is_by_rank(s, n, parts))
        t->flags |= ARI_IF(HEADS);
    else if (chunks && is_zigzag(s))
        t->flags |= ARI_IF(TOKENS);
    else if (!same && !chunks)
        t->flags |= ARI_IF(PACKED);
    else if (same && !is_along(t, c, s, true))
        is_along(t, c, s, false);
    t->flags |= same && is_repeated(s) ? ARI_IF(TWICE) : 0;
    t->flags |= is_cut_by_samples(s->g) ? ARI_IF(SAMPLES) : 0;
}

ar_status ari_measure_shards(ari_trace *t, const ari_case *c)
{
    shards s = {.g = &c->grid};
    bool moved = false; /* some box is another block of the reference than its own */
    if (c->survey.whole || c->d->ranks < 2)
        return AR_OK;
    AR_TRY(ARI_TAKE(&s.of, c->arena, (size_t)c->d->ranks * AR_MAX_BOXES, c->d->name));
    for (int r = 0; r < c->d->ranks; r++) {
        for (size_t k = 0; k < c->d->copy[r].layout->nbox; k++, s.n++) {
            s.of[s.n].mine = box_of(s.g, r, k);
            s.of[s.n].from = find_source(s.g, s.of[s.n].mine);
            if (s.of[s.n].from.rank < 0)
                return AR_OK;
            moved = moved || is_moved(&s, s.n);
        }
    }
    if (moved)
        found_shards(t, c, &s);
    return AR_OK;
}

/* --- all but the first tensor-parallel group ---------------------------------------------------------------------- */

ar_status ari_measure_world_rank(ari_trace *t, const ari_case *c)
{
    const ari_difference *d = c->d;
    const ari_survey *s = &c->survey;
    const int tp = ari_along(d, ARI_CUTS_FEATURES);
    const bool zeros = s->total.zero == s->total.different;
    /* Initial values at another rank's place are some rank's, or zero: any others were drawn anew. With ZeRO-3 the
     * first group is also the one whose share of a weight is the whole. A group of one rank, beside ranks with zeros, is
     * no evidence but of ids, whose owner is then no rank; nor are values of the first tokens alone, where all others
     * are of later ones, or a tied weight's on the first stage. */
    const bool later = (!zeros && ari_is_activation(d) && ari_along(d, ARI_CUTS_SAMPLES) == 1 &&
                        ari_along(d, ARI_CUTS_POSITIONS) > 1) ||
                       (ari_along(d, ARI_CUTS_LAYERS) > 1 && ari_along(d, ARI_CUTS_DATA) == 1);
    if (d->ranks < 2 * tp || (tp < 2 && !(zeros && d->pass == 'f' && (c->is & ARI_IS_EMBEDDING))) || d->gathers ||
        (d->pass == 'i' && !zeros) || later)
        return AR_OK;
    for (int r = 0; r < d->ranks; r++) {
        const ari_tally *own = &s->rank[r];
        if (own->held == 0 || (r < tp ? own->different > 0 : own->different * 2 < own->held))
            return AR_OK;
    }
    ARI_FINDING(t, ARI_FOUND_WORLD_RANK, 0,
                {"zeros", .text = !zeros   ? ""
                                  : tp > 1 ? " and has zeros"
                                           : " and has zeros, if it computed its part"});
    return AR_OK;
}

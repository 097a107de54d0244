/* SPDX-License-Identifier: Apache-2.0 */
/* The right values in the wrong place: shards that repeat, blocks in another order, shards filled in part. */
#include <stdlib.h>

#include "ref/core/size.h"
#include "verify/diagnose/pattern_impl.h"
#include "verify/diagnose/roles.h"

/* --- a rank holds another rank's shard ---------------------------------------------------------------------------- */

/* Rows that every rank's box k has: where the parts are uneven, the smallest one's. */
static size_t common_rows(const ari_grid *g, size_t k)
{
    size_t rows = SIZE_MAX;
    for (int r = 0; r < g->d->ranks; r++) {
        const ar_layout *o = g->d->copy[r].layout;
        if (k < o->nbox && o->box[k].extent[0] < rows)
            rows = o->box[k].extent[0];
    }
    return rows;
}

/* Whether what rank r holds in box k is, bit for bit, the reference where `from` begins: all of that block, or, where
 * the parts are uneven, its first part; rows that not every rank has may be right in their own place. Counts distinct
 * neighbours too: a constant block equals many places and proves nothing. */
static bool holds_block(const ari_grid *g, int r, size_t k, const ar_box *from, bool *varies)
{
    const ar_box *mine = &g->d->copy[r].layout->box[k];
    size_t shift_stride[AR_MAX_DIMS], stride = 1;
    const size_t common = g->d->ndim > 1 ? common_rows(g, k) : SIZE_MAX;
    for (int i = g->d->ndim - 1; i >= 0; i--) {
        const size_t extent = i == 0 && mine->extent[i] > common ? common : mine->extent[i];
        if (extent > from->extent[i])
            return false;
        shift_stride[i] = stride;
        stride *= g->shape[i];
    }
    ptrdiff_t shift = 0;
    for (int i = 0; i < g->d->ndim; i++)
        shift += ((ptrdiff_t)from->global[i] - (ptrdiff_t)mine->global[i]) * (ptrdiff_t)shift_stride[i];
    ari_runs it = ari_runs_of_rank(g, r);
    ari_run run;
    bool seen = false;
    float first = 0.0f;
    *varies = false;
    while (ari_runs_next(&it, &run)) {
        if (run.box != k)
            continue;
        const size_t row = g->nd > 1 ? ari_grid_index(g, run.index, 0) - mine->global[0] : 0;
        const bool beyond = row >= common, there = row < from->extent[0];
        for (size_t i = 0; i < run.count; i++) {
            if (beyond && ari_same_bits(run.value[i], run.ref[i]))
                continue;
            if (!there || !ari_same_bits(run.value[i], run.ref[(ptrdiff_t)i + shift]))
                return false;
            *varies = *varies || (seen && !ari_same_bits(first, run.value[i]));
            first = run.value[i];
            seen = true;
        }
    }
    return seen;
}

typedef struct source {
    int rank; /* -1: none */
    size_t box;
} source;

/* Whose block it is that rank r holds in box k; its own if that is right. */
static source find_source(const ari_grid *g, int r, size_t k)
{
    const ari_difference *d = g->d;
    const ar_box *own = &d->copy[r].layout->box[k];
    bool varies = false;
    if (holds_block(g, r, k, own, &varies))
        return (source){r, k};
    for (int q = 0; q < d->ranks; q++) {
        const ar_layout *o = d->copy[q].layout;
        for (size_t i = 0; i < o->nbox; i++) {
            const size_t j = (k + i) % o->nbox; /* the same box first */
            if (holds_block(g, r, k, &o->box[j], &varies) && varies)
                return (source){q, j};
        }
    }
    return (source){-1, 0};
}

/* Fills from[ranks * AR_MAX_BOXES]; false unless every box is some block of the reference and one is not its own. */
static bool find_sources(const ari_grid *g, source *from)
{
    bool moved = false;
    for (int r = 0; r < g->d->ranks; r++) {
        for (size_t k = 0; k < g->d->copy[r].layout->nbox; k++) {
            source *s = &from[(size_t)r * AR_MAX_BOXES + k];
            *s = find_source(g, r, k);
            if (s->rank < 0)
                return false;
            moved = moved || s->rank != r || s->box != k;
        }
    }
    return moved;
}

typedef struct movement {
    bool same_box; /* no block went to a box of another number */
    int repeated;  /* the rank whose shard all wrong ranks hold; -1: several */
    int shift;     /* rank r holds the shard of (r + shift) mod N; 0: no such rule */
    int pairs;
} movement;

static movement describe(const ari_grid *g, const source *from)
{
    const int n = g->d->ranks;
    movement m = {.same_box = true, .repeated = -2, .shift = -1};
    for (int r = 0; r < n; r++) {
        for (size_t k = 0; k < g->d->copy[r].layout->nbox; k++) {
            const source *s = &from[(size_t)r * AR_MAX_BOXES + k];
            const int shift = (s->rank - r + n) % n;
            m.shift = m.shift < 0 || m.shift == shift ? shift : 0;
            m.same_box = m.same_box && s->box == k;
            if (s->rank == r && s->box == k)
                continue;
            m.repeated = m.repeated == -2 || m.repeated == s->rank ? s->rank : -1;
        }
    }
    return m;
}

static void say_pairs(ari_text *t, const ari_grid *g, const source *from)
{
    int shown = 0;
    for (int r = 0; r < g->d->ranks; r++) {
        for (size_t k = 0; k < g->d->copy[r].layout->nbox; k++) {
            const source *s = &from[(size_t)r * AR_MAX_BOXES + k];
            if ((s->rank == r && s->box == k) || shown >= 4)
                continue;
            ari_say(t, shown++ ? ", " : "");
            if (g->d->copy[r].layout->nbox > 1)
                ari_say(t, "rank %d's part %zu is rank %d's part %zu", r, k, s->rank, s->box);
            else
                ari_say(t, "rank %d has rank %d's", r, s->rank);
        }
    }
}

/* KV head r mod n_kv in place of floor(r n_kv / N), where every head is held by N / n_kv ranks. */
static bool is_wrong_head(const ari_grid *g, const source *from)
{
    const int n = g->d->ranks, copies = g->d->copy[0].layout->replicas;
    if (copies < 2 || copies >= n || n % copies != 0)
        return false;
    const int heads = n / copies;
    for (int r = 0; r < n; r++) {
        if (from[(size_t)r * AR_MAX_BOXES].rank / copies != r % heads)
            return false;
    }
    return true;
}

static void say_repeat(ari_clue *f, const ari_case *c, const source *from)
{
    const ari_grid *g = &c->grid;
    const movement m = describe(g, from);
    const bool fresh = g->d->pass == 'i';
    ari_text t = ari_find(f, ARI_IDENTITY + 4);
    if (is_wrong_head(g, from)) {
        f->confidence++; /* in the full tensor of several groups it looks like a mere permutation */
        ari_say(&t, "the wrong KV head: rank r holds head r mod %d, not floor(r %d / %d): ",
                g->d->ranks / g->d->copy[0].layout->replicas, g->d->ranks / g->d->copy[0].layout->replicas,
                g->d->ranks);
    } else if (!m.same_box) {
        ari_say(&t, "a packed tensor (q|k|v, gate|up) sharded as one block: ");
    } else if (m.repeated >= 0 && c->survey.wrong_ranks > 0) {
        ari_say(&t, fresh ? "every shard was seeded alike, or one shard broadcast over the whole world: "
                          : "every rank worked on one shard: ");
        ari_say(&t, "equal bits: ");
    } else if (m.shift > 0) {
        ari_say(&t, "shards in rotated order: rank r holds that of rank r + %d mod %d: ", m.shift, g->d->ranks);
    } else {
        ari_say(&t, "shards at the wrong ranks (a rank taken from another group or mesh dimension): ");
    }
    say_pairs(&t, g, from);
    if (m.same_box && m.repeated >= 0 && fresh)
        ari_say(&t, "; the random stream must be indexed in the full tensor");
}

ar_status ari_detect_repeat(ari_clue *f, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    source *from = NULL;
    if (c->survey.whole || g->d->ranks < 2)
        return AR_OK;
    AR_TRY(ari_alloc((void **)&from, (size_t)g->d->ranks, AR_MAX_BOXES * sizeof *from, g->d->name));
    if (find_sources(g, from))
        say_repeat(f, c, from);
    free(from);
    return AR_OK;
}

/* --- blocks of a whole tensor in another order -------------------------------------------------------------------- */

/* A whole tensor as [outer, blocks, inner]. */
typedef struct blocks {
    size_t outer, n, inner;
} blocks;

static bool block_is(const ari_grid *g, const float *value, const blocks *b, size_t at, size_t from)
{
    for (size_t o = 0; o < b->outer; o++) {
        const float *v = value + (o * b->n + at) * b->inner, *r = g->d->reference + (o * b->n + from) * b->inner;
        if (memcmp(v, r, b->inner * sizeof *v) != 0)
            return false;
    }
    return true;
}

/* Whether a block has two different values: a constant one equals many places and proves nothing. */
static bool block_varies(const float *value, const blocks *b, size_t at)
{
    for (size_t o = 0; o < b->outer; o++) {
        for (size_t i = 0; i < b->inner; i++) {
            if (!ari_same_bits(value[(o * b->n + at) * b->inner + i], value[at * b->inner]))
                return true;
        }
    }
    return false;
}

/* The order in which rank r's copy has the reference's blocks; false if it is none, or the right one. */
static bool find_order(const ari_grid *g, int r, const blocks *b, size_t *order)
{
    const float *value = g->d->copy[r].local;
    bool moved = false;
    for (size_t at = 0; at < b->n; at++) {
        size_t from = 0;
        while (from < b->n && !block_is(g, value, b, at, (at + from) % b->n)) /* its own place first */
            from++;
        if (from == b->n || (from > 0 && !block_varies(value, b, at)))
            return false;
        order[at] = (at + from) % b->n;
        moved = moved || from > 0;
    }
    return moved;
}

/* Whether every rank with a difference has the reference's blocks elsewhere; the first such rank's go to order. */
static bool all_in_order(const ari_case *c, const blocks *b, size_t *order, size_t *scratch, int *example)
{
    const ari_grid *g = &c->grid;
    *example = -1;
    for (int r = 0; r < g->d->ranks; r++) {
        if (c->survey.rank[r].different == 0)
            continue;
        if (!find_order(g, r, b, *example < 0 ? order : scratch))
            return false;
        *example = *example < 0 ? r : *example;
    }
    return *example >= 0;
}

static bool is_permutation(const size_t *order, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        for (size_t j = 0; j < i; j++) {
            if (order[i] == order[j])
                return false;
        }
    }
    return true;
}

static void say_order(ari_clue *f, const ari_case *c, int dim, const blocks *b, const size_t *order, int example)
{
    ari_text t = ari_find(f, ARI_IDENTITY + 3);
    const bool permuted = is_permutation(order, b->n);
    ari_say(&t, "blocks of %s %s: of %zu blocks, rank %d has", ari_dim_name(&c->grid, dim, true),
            permuted ? "in another order" : "that repeat", b->n, example);
    for (size_t i = 0; i < b->n && i < 8; i++)
        ari_say(&t, " %zu", order[i]);
    ari_say(&t, "%s, bit for bit; %s", b->n > 8 ? " ..." : "",
            permuted ? "an all-gather whose chunks were put down in order of arrival, not of rank"
                     : "an all-gather that read one rank's chunk several times, or before it was ready");
}

/* [b, s, h] gathered along s without regrouping: the parts of N ranks one after the other, each [b, s/N, h]. */
static bool is_interleaved(const ari_case *c)
{
    const ari_grid *g = &c->grid;
    const size_t n = (size_t)g->d->ranks;
    if (g->d->ndim != 3 || g->shape[0] < 2 || n < 2 || g->shape[1] % n != 0)
        return false;
    const size_t batch = g->shape[0], part = g->shape[1] / n * g->cols;
    for (int r = 0; r < g->d->ranks; r++) {
        for (size_t i = 0; i < n * batch && c->survey.rank[r].different > 0; i++) {
            const float *value = g->d->copy[r].local + i * part;
            const float *ref = g->d->reference + ((i % batch) * n + i / batch) * part;
            if (memcmp(value, ref, part * sizeof *ref) != 0)
                return false;
        }
    }
    return true;
}

ar_status ari_detect_order(ari_clue *f, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    const size_t n = (size_t)g->d->ranks;
    if (!c->survey.whole || n < 2)
        return AR_OK;
    if (is_interleaved(c)) {
        ari_text t = ari_find(f, ARI_IDENTITY + 3);
        ari_say(
            &t,
            "gathered parts left one after the other: bit for bit the [%zu, %zu, %zu] parts of %zu ranks in a row; for "
            "more than one sample an all-gather along tokens must put each sample's parts together",
            g->shape[0], g->shape[1] / n, g->shape[2], n);
        return AR_OK;
    }
    size_t *order = NULL;
    AR_TRY(ari_alloc((void **)&order, n, 2 * sizeof *order, g->d->name));
    for (int dim = 0; dim < g->nd && f->confidence == ARI_SILENT; dim++) {
        blocks b = {.outer = 1, .n = n, .inner = 1};
        int example = -1;
        for (int i = 0; i < g->nd; i++) {
            b.outer *= i < dim ? g->shape[i] : 1;
            b.inner *= i > dim ? g->shape[i] : 1;
        }
        b.inner *= g->shape[dim] / n;
        if (g->shape[dim] % n == 0 && all_in_order(c, &b, order, order + n, &example))
            say_order(f, c, dim, &b, order, example);
    }
    free(order);
    return AR_OK;
}

/* --- shards of which only the first part is right ----------------------------------------------------------------- */

/* Along one dimension, over all ranks: where in the local extent differences begin, and where right values end. */
typedef struct cut {
    bool possible;
    size_t first_wrong, last_right, extent;
} cut;

static void look_for_cut(cut *cuts, const ari_case *c, int rank)
{
    const ari_grid *g = &c->grid;
    ari_runs it = ari_runs_of_rank(g, rank);
    ari_run run;
    while (ari_runs_next(&it, &run)) {
        for (size_t i = 0; i < run.count; i++) {
            const bool off = ari_run_differs(g, &run, i);
            size_t rest = run.at + i;
            if (!off && run.ref[i] == 0.0f) /* zero is right anywhere */
                continue;
            for (int dim = g->nd - 1; dim >= 0; dim--) {
                const size_t n = g->d->copy[rank].shape[dim], at = rest % n;
                rest /= n;
                if (off && at < cuts[dim].first_wrong)
                    cuts[dim].first_wrong = at;
                if (!off && at + 1 > cuts[dim].last_right)
                    cuts[dim].last_right = at + 1;
            }
        }
    }
}

static void say_tail(ari_clue *f, const ari_case *c, int dim, const cut *at, bool zero)
{
    const ari_difference *d = c->grid.d;
    const size_t times = at->extent / at->first_wrong, ranks = (size_t)ari_tp_of(d);
    const bool by_heads = ari_is_by_heads(d) && dim == d->ndim - 1 && at->first_wrong % d->head_dim == 0;
    const size_t unit = by_heads ? d->head_dim : 1, local = at->extent / unit, right = at->first_wrong / unit;
    const bool heads =
        ari_name_has(d, "attn") || ari_name_has(d, "attention") || (ari_name_is(d->name) & ARI_IS_CONTEXT);
    ari_text t = ari_find(f, zero ? ARI_TRACE + 8 : ARI_SHAPE + 10);
    ari_say(&t, "%s every rank has only the first %zu of its %zu %s right",
            heads ? "heads:" : "shards:", at->first_wrong, at->extent, ari_dim_name(&c->grid, dim, true));
    if (by_heads)
        ari_say(&t, " (%zu of %zu heads)", right, local);
    ari_say(&t, zero ? ", the rest is zero" : ", the rest is wrong");
    if (by_heads && local % ranks != 0 && right == local / ranks)
        ari_say(&t, "; that is %zu / %zu rounded down: the local head count was divided by the number of ranks twice",
                local, ranks);
    else if (times == ranks && at->extent % at->first_wrong == 0)
        ari_say(&t, "; that is 1/%zu for %zu ranks: the local %s was divided by the number of ranks twice", times,
                ranks, heads ? "head count" : "extent");
    else
        ari_say(&t, "; the rest was left out of the loop, or its size was rounded down");
}

ar_status ari_detect_tail(ari_clue *f, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    const ari_survey *s = &c->survey;
    cut all[AR_MAX_DIMS];
    bool begun = false;
    if (g->d->ndim == 0 || g->d->ranks < 2 || s->wrong_ranks < s->holding_ranks)
        return AR_OK;
    for (int r = 0; r < g->d->ranks; r++) {
        cut mine[AR_MAX_DIMS];
        if (s->rank[r].different == 0 && s->rank[r].kept == 0)
            continue;
        for (int dim = 0; dim < g->nd; dim++)
            mine[dim] = (cut){true, SIZE_MAX, 0, g->d->copy[r].shape[dim]};
        look_for_cut(mine, c, r);
        for (int dim = 0; dim < g->nd; dim++) {
            const bool cut_here = mine[dim].last_right > 0 && mine[dim].last_right <= mine[dim].first_wrong;
            all[dim] = begun ? all[dim] : mine[dim];
            all[dim].possible = all[dim].possible && cut_here && mine[dim].extent < g->shape[dim] &&
                                all[dim].first_wrong == mine[dim].first_wrong && all[dim].extent == mine[dim].extent;
        }
        begun = true;
    }
    const bool zero = s->total.zero == s->total.different;
    for (int dim = g->nd - 1; dim >= 0 && begun; dim--) {
        const bool fraction = all[dim].possible && all[dim].extent % all[dim].first_wrong == 0;
        if (all[dim].possible && (zero || fraction)) {
            say_tail(f, c, dim, &all[dim], zero);
            break;
        }
    }
    return AR_OK;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Zeros, or one value, where the reference has others: nothing written, shards filled in part, dropout, masks; and the
 * place of the differences, which remains if no relation holds. */
#include "verify/diagnose/hypothesis.h"

enum { MASK_CHUNK = 4096 };

/* Rounding of a zero may be as large as any difference from a fifth of the largest one on. */
static const double noise_beside = 0.2;

/* The only rank with a gradient has that of its share (ZeRO): all from one end of the tensor up to some element is zero,
 * and the rest is right. Of a packed weight that may be one of the parts. */
static bool is_beside_own_share(const ari_case *c)
{
    const ari_survey *s = &c->survey;
    const ari_role role = ari_module_within(c->d->name).role;
    size_t from = 0, to = c->grid.count;
    if (c->d->pass != 'g' || !c->d->zero || s->total.kept == 0 || s->holding_ranks > 1 || role == ARI_QKV ||
        role == ARI_GATE_UP)
        return false;
    while (from < to && !ari_off(c, from))
        from++;
    while (to > from && !ari_off(c, to - 1))
        to--;
    return to - from == s->different && (from == 0) != (to == c->grid.count);
}

ar_status ari_measure_zero(ari_trace *t, const ari_case *c)
{
    const ari_survey *s = &c->survey;
    const size_t unit = 2 * (size_t)ari_along(c->d, ARI_CUTS_POSITIONS);
    size_t from = 0, to = 0;
    if (s->total.zero < s->total.different || c->d->noise > noise_beside * s->total.max_difference)
        return AR_OK;
    if (unit > 2 && ari_is_activation(c->d) && c->grid.nd == 3)
        ari_bounding_range(c, 1, &from, &to);
    /* All tokens from a position on, and no others, are zero: the length rounded down to a multiple of twice the
     * context-parallel ranks. */
    if (from > 0 && to % unit > 0 && from == to / unit * unit && to == c->grid.shape[1] && s->hit[1] == to - from)
        ARI_FINDING(t, ARI_FOUND_TAIL, ARI_IF(TOKENS), {"cut", .count = from}, {"extent", .count = to},
                    {"unit", .count = unit});
    else
        ari_trace_set(t, ARI_FOUND_ZERO,
                      is_beside_own_share(c)                                     ? ARI_IF(OF_SHARDS)
                      : s->wrong_ranks == s->holding_ranks && s->total.kept == 0 ? ARI_IF(ALL)
                      : s->wrong_ranks < s->holding_ranks                        ? ARI_IF(SOME)
                                                                                 : 0);
    return AR_OK;
}

ar_status ari_measure_block_of_zeros(ari_trace *t, const ari_case *c)
{
    const ari_survey *s = &c->survey;
    size_t covered = 1, from, to;
    if (s->total.zero < s->total.different || s->total.different < 2 || s->total.kept == 0)
        return AR_OK;
    for (int dim = 0; dim < c->grid.nd; dim++) {
        ari_bounding_range(c, dim, &from, &to);
        if (s->hit[dim] * 10 < (to - from) * 9)
            return AR_OK;
        covered *= to - from;
    }
    if (covered == c->count || s->total.different * 4 < covered)
        return AR_OK;
    ari_trace_set(t, ARI_FOUND_ZERO_BLOCK, s->hit[0] == 1 && covered == c->grid.cols ? ARI_IF(ONE) : 0); /* a row */
    return AR_OK;
}

/* --- shards of which only the first part is there ----------------------------------------------------------------- */

/* The first `cut` of each shard's `extent` indices are right; n shards, 0: those of the ranks. */
static void found_tail(ari_trace *t, const ari_case *c, int dim, size_t cut, size_t extent, size_t n)
{
    const ari_difference *d = c->d;
    const bool zero = c->survey.total.zero == c->survey.total.different, seen = n == 0;
    const bool by_heads = seen && ari_is_by_heads(d) && dim == d->ndim - 1 && cut % d->head_dim == 0;
    const bool heads = seen ? strstr(d->name, "attn") || strstr(d->name, "attention") || (c->is & ARI_IS_CONTEXT)
                            : ari_has_heads(c, dim);
    const size_t ranks = seen ? (size_t)ari_along(d, ARI_CUTS_FEATURES) : n;
    const size_t local = by_heads ? extent / d->head_dim : 0, right = by_heads ? cut / d->head_dim : 0;
    ari_trace_set(t, ARI_FOUND_TAIL, 0);
    if (by_heads && local % ranks != 0 && right == local / ranks)
        t->flags |= ARI_IF(FRACTION);
    else if (extent % cut == 0 && extent / cut == ranks)
        t->flags |= ARI_IF(TWICE);
    t->penalty = seen ? zero ? 0 : 18 : 4;
    ARI_FACTS(t, {"of", .text = heads ? "heads" : "shards"});
    ari_words(t, "each", seen ? "every rank" : "each of %zu shards", n);
    ARI_FACTS(t, {"cut", .count = cut}, {"extent", .count = extent}, {"shards", .count = ranks},
              {"local", .count = local}, {"axes", .text = ari_dim_name(&c->grid, dim, true)});
    ari_words(t, "by_heads", by_heads ? " (%zu of %zu heads)" : "", right, local);
    ARI_FACTS(t, {"rest", .text = zero ? "zero" : "wrong"}, {"ranks", .text = seen ? "ranks" : "shards"},
              {"count", .text = heads ? "head count" : "extent"});
}

/* The place from which on each of n = 2 .. shards along a dimension has zeros, and only there. */
static size_t cut_of_shards(const ari_case *c, int dim, size_t n)
{
    const size_t *hits = c->survey.hits[dim], size = c->grid.shape[dim] / n;
    size_t cut = 0;
    while (cut < size && hits[cut] == 0)
        cut++;
    if (cut == 0 || cut == size)
        return 0;
    for (size_t i = 0; i < n * size; i++) {
        if ((hits[i] > 0) != (i % size >= cut))
            return 0;
    }
    return cut;
}

/* A run whose ranks are not seen may have any number of shards; one whose ranks are seen has those. */
ar_status ari_measure_tail(ari_trace *t, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    const ari_tally *all = &c->survey.total;
    const bool seen = !g->d->hidden, zero = all->zero == all->different;
    if (g->d->pass == 'n' && g->d->zero) /* what is right may be the first rank's share of each update */
        return AR_OK;
    if (seen ? c->survey.wrong_ranks < c->survey.holding_ranks : !zero || all->different < 2 || all->kept == 0)
        return AR_OK;
    for (int dim = g->d->ndim - 1; dim >= 0 && t->kind == ARI_FOUND_NOTHING; dim--) {
        const size_t size = g->shape[dim], local = seen ? g->d->copy[0].shape[dim] : 0;
        const size_t own = local > 0 && size % local == 0 ? size / local : 0, most = seen ? own : ARI_MOST_RANKS;
        for (size_t n = seen ? own : 2; n > 1 && n <= most && n * 2 <= size && t->kind == ARI_FOUND_NOTHING; n++) {
            const size_t cut = size % n == 0 ? cut_of_shards(c, dim, n) : 0;
            if (cut > 0 && (zero || size / n % cut == 0))
                found_tail(t, c, dim, cut, size / n, seen ? 0 : n);
        }
    }
    return AR_OK;
}

/* --- dropout ------------------------------------------------------------------------------------------------------ */

static bool is_dropped(const ari_case *c, size_t i)
{
    return ari_off(c, i) && fabs((double)c->val[i]) <= c->d->noise;
}

/* The samples of an activation that differ, most of each, where others are right as a whole: those of some ranks; 0:
 * there are none. */
static size_t wrong_samples(const ari_case *c)
{
    const ari_grid *g = &c->grid;
    const size_t hit = c->survey.hit[0];
    size_t i = 0;
    while (i < g->shape[0] && (c->survey.hits[0][i] == 0 || 2 * c->survey.hits[0][i] > ari_grid_inner(g, 0)))
        i++;
    return g->nd > 2 && ari_is_activation(c->d) && i == g->shape[0] && hit < i ? hit : 0;
}

/* `some`: wrong_samples. */
static bool is_of_wrong_sample(const ari_case *c, size_t some, size_t i)
{
    return some == 0 || c->survey.hits[0][i / ari_grid_inner(&c->grid, 0)] > 0;
}

static double dropped_or_times(const ari_hypothesis *h, const ari_run *run, size_t i)
{
    const size_t at = run->index + i;
    return !is_of_wrong_sample(h->c, *(const size_t *)h->of, at) ? (double)run->ref[i]
           : is_dropped(h->c, at)                                ? 0.0
                                                                 : h->factor * (double)run->ref[i];
}

size_t ari_scattered(const ari_case *c, bool (*is)(const ari_case *c, size_t i))
{
    const ari_grid *g = &c->grid;
    const size_t most = wrong_samples(c);
    size_t all = 0;
    for (size_t i = 0; i < g->count; i++)
        all += is(c, i);
    for (int dim = 0; dim < g->nd; dim++) {
        const size_t n = g->shape[dim], inner = ari_grid_inner(g, dim);
        const double expected = (double)all / (double)(dim == 0 && most > 0 ? most : n);
        for (size_t k = 0; k < n; k++) {
            size_t own = 0;
            for (size_t start = k * inner; start < g->count; start += inner * n) {
                for (size_t i = start; i < start + inner; i++)
                    own += is(c, i);
            }
            if ((double)own > expected + 6.0 * sqrt(expected) + 4.0)
                return 0;
        }
    }
    return all;
}

/* Dropped elements are scattered, and all others have one factor, which makes up for them, or none. */
static void measure_dropout(ari_trace *t, const ari_case *c)
{
    const size_t some = wrong_samples(c);
    ari_hypothesis h = {.expect = dropped_or_times, .c = c, .of = &some, .kind = ARI_FOUND_DROPOUT};
    ari_fit f = {0};
    size_t count = 0;
    for (size_t i = 0; i < c->count; i++) {
        count += is_of_wrong_sample(c, some, i);
        if (is_of_wrong_sample(c, some, i) && !is_dropped(c, i))
            ari_fit_add(&f, (double)c->val[i], (double)c->ref[i], 0.0);
    }
    const size_t dropped = count - f.n;
    const double rate = (double)dropped / (double)count;
    if (dropped < 16 || rate > 0.95)
        return;
    ari_fit_one(&h.factor, &f);
    const double spread = sqrt(rate * (1.0 - rate) / (double)count);
    const bool scaled = fabs(h.factor * (1.0 - rate) - 1.0) <= 5.0 * h.factor * spread;
    const bool right = ari_is_near(h.factor, 1.0, ARI_KNOWN);
    if ((!scaled && !right) || !ari_holds_all(NULL, &h) || !ari_scattered(c, is_dropped))
        return;
    ARI_FINDING(t, ARI_FOUND_DROPOUT, right ? ARI_IF(ONE) : 0, {"dropped", .count = dropped},
                {"percent", .number = 100.0 * rate}, {"factor", .number = h.factor},
                {"p", .number = 1.0 - 1.0 / h.factor});
}

/* --- whole tokens ------------------------------------------------------------------------------------------------- */

/* Rows that are zero as a whole, none in part alone, where others are right. */
static void measure_tokens(ari_trace *t, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    size_t none = 0;
    if (g->nd < 2 || c->survey.total.zero < c->survey.different || c->survey.total.kept == 0)
        return;
    for (size_t row = 0; row < g->rows; row++) {
        const bool off = ari_row_differs(c, row);
        for (size_t i = row * g->cols; off && i < (row + 1) * g->cols; i++) {
            if (!ari_off(c, i) && fabs((double)c->ref[i]) > 2.0 * g->d->noise)
                return;
        }
        none += off;
    }
    if (none < 2 || none == g->rows)
        return;
    ARI_FINDING(t, ARI_FOUND_ROWS_ZERO, 0, {"zero", .count = none}, {"all", .count = g->rows});
}

/* --- one value ---------------------------------------------------------------------------------------------------- */

static double one_value(const ari_hypothesis *h, const ari_run *run, size_t i)
{
    (void)run, (void)i;
    return *(const double *)h->of;
}

/* A clamp cuts at a bound within the values; this value exceeds all of them. */
static void measure_filled(ari_trace *t, const ari_case *c)
{
    size_t first = 0;
    while (!ari_off(c, first))
        first++;
    const double value = (double)c->val[first];
    const ari_hypothesis h = {one_value, .c = c, .of = &value, .differs_only = true, .kind = ARI_FOUND_FILLED};
    if (c->survey.different < 8 || c->survey.different == c->count || isnan(value) || fabs(value) <= c->max_ref ||
        fabs(value) <= 8.0 * c->absolute || !ari_holds_all(NULL, &h))
        return;
    ARI_FINDING(t, ARI_FOUND_FILLED, 0, {"wrong", .count = c->survey.different}, {"filled", .number = value});
}

ar_status ari_measure_dropped(ari_trace *t, const ari_case *c)
{
    if (c->count < 64)
        return AR_OK;
    measure_filled(t, c);
    if (t->kind == ARI_FOUND_NOTHING)
        measure_tokens(t, c);
    if (t->kind == ARI_FOUND_NOTHING)
        measure_dropout(t, c);
    return AR_OK;
}

/* --- another mask ------------------------------------------------------------------------------------------------- */

/* True if all values that are zero in the reference alone have a key after the query. */
static bool lacks_causal_mask(const ari_case *c)
{
    const ari_grid *g = &c->grid;
    size_t after = 0;
    if (!c->val || g->nd < 3 || g->shape[g->nd - 1] != g->shape[g->nd - 2] || c->survey.total.gained < 4)
        return false;
    for (size_t i = 0; i < c->count; i++) {
        const size_t key = i % g->cols, query = i / g->cols % g->shape[g->nd - 2];
        after += ari_off(c, i) && c->ref[i] == 0.0f && fabs((double)c->val[i]) > g->d->noise && key > query;
    }
    return after >= c->survey.total.gained;
}

/* True if the values are zero exactly where another tensor's are. */
static ar_status is_zero_where(bool *same, const ari_case *c, const ar_dump_tensor *other)
{
    float x[MASK_CHUNK];
    *same = other->count == c->grid.count;
    for (ari_run run = ari_runs_of(&c->grid); *same && ari_runs_next(&run);) {
        for (size_t at = 0; *same && at < run.count; at += MASK_CHUNK) {
            const size_t n = run.count - at < MASK_CHUNK ? run.count - at : MASK_CHUNK;
            AR_TRY(ar_dump_read_f32(other, run.index + at, n, x));
            for (size_t i = 0; *same && i < n; i++)
                *same = (x[i] == 0.0f) == (run.value[at + i] == 0.0f);
        }
    }
    return AR_OK;
}

/* The reference's mask of another layer. */
static ar_status find_mask(ari_trace *t, const ari_case *c)
{
    const ar_dump *known = c->known->reference;
    const ar_dump_tensor *of = c->d->dump_tensor;
    bool same = false;
    for (size_t i = 0; known && of && !same && i < ar_dump_count(known); i++) {
        const ar_dump_tensor *other = ar_dump_at(known, i);
        if (other == of || !ari_alike_but_for_numbers(of->name, strlen(of->name), other->name, strlen(other->name)))
            continue;
        AR_TRY(is_zero_where(&same, c, other));
        if (same) {
            t->flags |= ARI_IF(OF_LAYER);
            ARI_FACTS(t, {"other", .text = other->name});
        }
    }
    return AR_OK;
}

ar_status ari_measure_mask(ari_trace *t, const ari_case *c)
{
    const ari_tally *all = &c->survey.total;
    const bool causal = lacks_causal_mask(c);
    /* Both ways, and not a handful: elements dropped that the reference keeps, and kept that it drops. */
    if (!causal && (all->zero + all->gained < all->different || all->zero * 20 < all->different ||
                    all->gained * 20 < all->different || all->different < 16))
        return AR_OK;
    ari_trace_set(t, ARI_FOUND_MASK, causal ? ARI_IF(CAUSAL) : 0);
    size_t tokens = 0;
    for (size_t row = 0; row < c->grid.rows; row++)
        tokens += ari_row_differs(c, row);
    /* As a whole, and not inside a block, where tokens are dropped on purpose. */
    if (c->grid.nd < 3 || ari_section_of(c->role) == ARI_IN_BLOCKS || tokens * c->grid.cols != c->survey.different)
        tokens = 0;
    t->flags |= tokens > 0 && all->zero + all->gained == all->different ? ARI_IF(TOKENS) : 0;
    ARI_FACTS(t, {"tokens", .count = tokens}, {"zero", .count = all->zero}, {"gained", .count = all->gained});
    return find_mask(t, c);
}

/* --- ranks, samples, tokens --------------------------------------------------------------------------------------- */

/* Rows that the batch used, or that were computed elsewhere, may all lie on one rank, and differ by a fault of all
 * ranks: that rank stands out only if half of its part is wrong. */
static bool stands_out(const ari_case *c)
{
    const ari_survey *s = &c->survey;
    size_t held = 0, different = 0;
    for (int r = 0; r < c->d->ranks; r++) {
        held += s->rank[r].different > 0 ? s->rank[r].held : 0;
        different += s->rank[r].different;
    }
    return s->wrong_ranks < s->holding_ranks && different * 2 >= held;
}

/* True if the first tokens are right and later ones are not. A first token whose reference is zero is right by
 * accident; a small difference may begin with the first sum; and with fewer than 8 differing elements per token the
 * first may have none by chance, one time in e^8 at that number. A few last tokens are another matter, except on the
 * last of the ranks that share a sequence, where attention has met the others' keys. */
static bool begins_later(const ari_case *c)
{
    const ari_grid *g = &c->grid;
    const ari_survey *s = &c->survey;
    const bool of_attention = c->role >= ARI_CONTEXT && c->role <= ARI_ATTENTION_SUM;
    const size_t cp = of_attention ? (size_t)ari_along(g->d, ARI_CUTS_POSITIONS) : 1;
    return s->total.kept > 0 && s->total.dd > 4e-4 * s->total.rr && g->d->ndim == 3 && s->hits[1][0] == 0 &&
           (s->hit[1] * 4 > g->shape[1] || (cp > 1 && s->hit[1] * cp >= g->shape[1])) &&
           s->different >= 8 * g->shape[1];
}

/* --- shards, heads, packed parts ---------------------------------------------------------------------------------- */

static void place_of_shard(ari_trace *t, const ari_case *c)
{
    for (int dim = 0; dim < c->grid.nd; dim++) {
        const size_t n = c->grid.shape[dim];
        const char *name;
        size_t from, to, which = 0, start, size;
        ari_bounding_range(c, dim, &from, &to);
        const size_t blocks = ari_block_of(n, from, to, &which), head = ari_head_size(c, dim);
        const bool heads = head > 0 && from % head == 0 && to % head == 0 && to - from < n;
        if (to - from == n || to - from < 2 || c->survey.hit[dim] * 10 <= (to - from) * 9 ||
            (!heads && !ari_packed_part(c, dim, from, to, &name, &start, &size) && (blocks == 0 || blocks > 64)))
            continue;
        ari_trace_set(t, ARI_FOUND_SHARD_WRONG, 0);
        ari_text where = ari_list(t, "where");
        if (blocks > 1)
            ari_say(&where, "only shard %zu of %zu along dimension %d differs", which, blocks, dim);
        else
            ari_say(&where, "only %s %zu..%zu of %zu differ", ari_dim_name(&c->grid, dim, true), from, to - 1, n);
        ari_say_part(&where, c);
        ARI_FACTS(t, {"or_head", .text = heads ? " (or one head)" : ""});
        return;
    }
}

/* --- borders of ranks' parts -------------------------------------------------------------------------------------- */

/* True if all that differs along a dimension, most of it, is within a quarter of a part of the borders between n even
 * parts, at each of them; *before and *behind: the indices on either side. */
static bool is_at_borders(size_t *before, size_t *behind, const ari_case *c, int dim, size_t n)
{
    const size_t all = c->grid.shape[dim], size = all / n, *hits = c->survey.hits[dim];
    *before = *behind = 0;
    for (size_t i = 0; i < all; i++) {
        const size_t at = i % size, left = size - at, part = i / size;
        const bool near = (part > 0 && 4 * at < size) || (part + 1 < n && 4 * left <= size);
        if (hits[i] > 0 && (!near || 2 * hits[i] * all < c->grid.count))
            return false;
        if (at == 0 && part > 0 && hits[i] + hits[i - 1] == 0)
            return false;
        if (hits[i] > 0)
            *(4 * at < size ? behind : before) =
                4 * at < size ? (at >= *behind ? at + 1 : *behind) : (left > *before ? left : *before);
    }
    return true;
}

ar_status ari_measure_borders(ari_trace *t, const ari_case *c)
{
    size_t before, behind;
    for (int i = ARI_LAYOUT_DP; i < ARI_LAYOUT_AXES; i++) {
        const int own = ari_along(c->d, ari_layout_axes[i].axes),
                  known = ari_ranks_along(&c->known->mesh, ari_layout_axes[i].axes);
        const size_t n = (size_t)(own > known ? own : known);
        for (int dim = 1; dim < c->grid.nd && t->kind == ARI_FOUND_NOTHING; dim++) {
            const size_t all = c->grid.shape[dim];
            if (n < 2 || all % n != 0 || all / n < 4 || !is_at_borders(&before, &behind, c, dim, n))
                continue;
            ARI_FINDING(t, ARI_FOUND_BORDERS, 0, {"n", .count = n}, {"before", .count = before},
                        {"behind", .count = behind});
        }
    }
    return AR_OK;
}

ar_status ari_measure_place(ari_trace *t, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    const ari_survey *s = &c->survey;
    const bool activation = ari_is_activation(g->d) && g->d->ndim >= 3;
    /* A rank may be the only one where rounding happened to be larger. */
    const bool beyond = !(g->d->allowed > 0.0 && s->total.max_difference < 100.0 * g->d->allowed);
    if (s->disagree > 0 && s->wrong_ranks < s->holding_ranks) { /* some copies are right, some are not */
        ARI_FINDING(t, ARI_FOUND_RANKS_WRONG, 0, {"largest", .number = s->total.max_difference});
        return AR_OK;
    }
    if (g->d->hidden ? c->val != NULL : s->whole && s->wrong_ranks == s->holding_ranks && beyond)
        place_of_shard(t, c);
    /* Tokens of some later samples are a few tokens; a mask or an offset changes most of each. */
    bool later_samples = activation && g->shape[0] > 1 && s->hits[0][0] == 0;
    for (size_t i = 1; later_samples && i < g->shape[0]; i++)
        later_samples = 2 * s->hits[0][i] >= g->count / g->shape[0];
    if (t->kind == ARI_FOUND_NOTHING && later_samples)
        ari_trace_set(t, ARI_FOUND_FIRST_SAMPLE, 0);
    /* The later context-parallel ranks hold the later tokens. */
    const bool later = activation && g->d->pass == 'f' && begins_later(c),
               tokens = later && ari_along(g->d, ARI_CUTS_POSITIONS) > 1;
    const bool documents = ari_first_document(c) > 0;
    if (t->kind == ARI_FOUND_NOTHING && !(tokens && !documents) && stands_out(c) && beyond)
        ari_trace_set(t, ARI_FOUND_RANKS_WRONG, 0);
    if (t->kind == ARI_FOUND_NOTHING && documents)
        ari_trace_set(t, ARI_FOUND_LATER_TOKENS, ARI_IF(DOCUMENTS));
    if (t->kind == ARI_FOUND_NOTHING && later)
        ari_trace_set(t, ARI_FOUND_LATER_TOKENS, 0);
    return AR_OK;
}

ar_status ari_measure_anything(ari_trace *t, const ari_case *c)
{
    (void)c;
    ari_trace_set(t, ARI_FOUND_ANYTHING, 0);
    return AR_OK;
}

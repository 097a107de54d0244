/* SPDX-License-Identifier: Apache-2.0 */
/* Whole rows: ids looked up, ids of the batch, ids of padding or left over. */
#include <stdio.h>

#include "verify/diagnose/case.h"
#include "verify/dump/dump_private.h"

/* --- tokens of one id --------------------------------------------------------------------------------------------- */

enum { ROWS_COMPARED = 64, MOST_TOKENS = 1 << 13 };

static bool same_reference_row(const ari_grid *g, size_t a, size_t b)
{
    return memcmp(g->d->reference + a * g->cols, g->d->reference + b * g->cols, g->cols * sizeof(float)) == 0;
}

/* Tokens with equal reference rows looked up one id. */
typedef struct looked_up {
    size_t row[ROWS_COMPARED]; /* a wrong token of each id */
    size_t ids, wrong, right;  /* right: tokens of these ids without a difference */
    bool many;
} looked_up;

static void find_ids(looked_up *l, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    for (size_t row = 0; row < g->rows && !l->many; row++) {
        size_t i = 0;
        if (!ari_row_differs(c, row))
            continue;
        l->wrong++;
        while (i < l->ids && !same_reference_row(g, row, l->row[i]))
            i++;
        if (i < l->ids)
            continue;
        l->many = l->ids == ROWS_COMPARED;
        if (!l->many)
            l->row[l->ids++] = row;
    }
    for (size_t row = 0; row < g->rows && !l->many; row++) {
        for (size_t i = 0; i < l->ids; i++)
            l->right += same_reference_row(g, row, l->row[i]) && !ari_row_differs(c, row);
    }
}

/* True if every differing row is its id's row of a table [ids, cols]. */
static bool is_looked_up_in(const ari_case *c, const float *table, size_t ids)
{
    const size_t cols = c->grid.cols;
    for (ari_run run = ari_runs_of(&c->grid); ari_runs_next(&run);) {
        const int64_t id = c->d->ids[run.row];
        if (id < 0 || (size_t)id >= ids)
            return false;
        for (size_t i = 0; i < run.count; i++) {
            if (ari_run_differs(&c->grid, &run, i) &&
                !ari_same_bits(run.value[i], table[(size_t)id * cols + run.col + i]))
                return false;
        }
    }
    return true;
}

/* True if the table holds the weights before the last update. */
static ar_status measure_stale_table(ari_trace *t, const ari_case *c)
{
    const ari_difference *d = c->d;
    const ar_dump *known = c->known->reference;
    float *table = NULL;
    char stem[200];
    const int n = snprintf(stem, sizeof stem, "%s.weight", d->name);
    if (!known || !d->ids || d->step < 2 || c->grid.rows != d->batch * d->seq || n >= (int)sizeof stem)
        return AR_OK;
    const ar_dump_tensor *before = ari_weight_before(known, stem, (size_t)n, d->step - 1);
    if (!before || before->ndim != 2 || before->shape[1] != c->grid.cols)
        return AR_OK;
    AR_TRY(ari_read_values(&table, before, c->arena));
    if (is_looked_up_in(c, table, before->shape[0]))
        ari_trace_set(t, ARI_FOUND_LOOKUP, ARI_IF(OF_BEFORE));
    return AR_OK;
}

static void measure_lookup(ari_trace *t, const ari_case *c)
{
    const ari_survey *s = &c->survey;
    looked_up l = {.ids = 0};
    find_ids(&l, c);
    if (l.many || l.right > 0 || l.ids > (size_t)c->d->ranks || l.wrong == c->grid.rows)
        return;
    const bool none = s->total.zero == s->total.different;
    ARI_FINDING(t, ARI_FOUND_LOOKUP, 0, {"tokens", .count = l.wrong}, {"ids", .count = l.ids},
                {"hold", .text = l.wrong == 1 ? " holds" : "s hold"}, {"plural", .text = ARI_PLURAL(l.ids)},
                {"them", .text = l.ids == 1 ? "it" : "them"},
                {"whose", .text = none ? "no shard" : "two shards, whose rows were added"});
    ari_words(t, "bits",
              s->total.max_difference > 1e6 * s->max_reference ? " as bit patterns (differences up to %.1e)" : "",
              s->total.max_difference);
}

/* True if row `id` is the first or the last of some rank's shard, and not of the whole. */
static bool is_edge(const ari_difference *d, size_t id)
{
    for (int r = 0; r < d->ranks; r++) {
        const ar_layout *o = d->copy[r].layout;
        for (size_t k = 0; k < o->nbox; k++) {
            const size_t start = o->box[k].global[0], end = start + o->box[k].extent[0];
            if ((id == start && start > 0) || (id + 1 == end && end < d->shape[0]))
                return true;
        }
    }
    return false;
}

static void measure_edge_rows(ari_trace *t, const ari_case *c)
{
    const ari_survey *s = &c->survey;
    if (s->hit[0] > 2 * (size_t)c->d->ranks)
        return;
    for (size_t id = 0; id < c->grid.shape[0]; id++) {
        if (s->hits[0][id] > 0 && !is_edge(c->d, id))
            return;
    }
    ari_trace_set(t, ARI_FOUND_EDGE_ROWS, 0);
    ari_text ids = ari_list(t, "ids");
    ari_say_indices(&ids, c, 0);
    ARI_FACTS(t, {"differ", .text = s->hit[0] == 1 ? "differs" : "differ"});
}

/* --- the ids of the batch ----------------------------------------------------------------------------------------- */

static bool row_is_zero(const ari_case *c, const float *data, size_t row)
{
    for (size_t i = 0; i < c->grid.cols; i++) {
        if (data[row * c->grid.cols + i] != 0.0f)
            return false;
    }
    return true;
}

/* Counts each id of the batch; *last counts those at a sequence's end, which predict nothing. */
static ar_status count_ids(size_t *times, size_t *last, const ari_case *c, const ar_dump_tensor *of_dump)
{
    const ari_difference *d = c->d;
    const size_t n = d->ids ? d->batch * d->seq : of_dump->count,
                 seq = d->ids ? d->seq : of_dump->shape[of_dump->ndim - 1];
    double *ids = NULL;
    AR_TRY(ARI_TAKE(&ids, c->arena, n, "ids"));
    if (!d->ids)
        AR_TRY(ari_dump_read_f64(of_dump, 0, n, ids));
    for (size_t i = 0; i < n; i++) {
        const double id = d->ids ? (double)d->ids[i] : ids[i];
        if (!(id >= 0.0 && id < (double)c->grid.shape[0]))
            continue;
        times[(size_t)id]++;
        last[(size_t)id] += (i + 1) % seq == 0;
    }
    return AR_OK;
}

/* States what became of the embedding's use of a tied weight: v = r - e has less of r, v = r + e more. */
static void say_use(ari_trace *t, const ari_case *c)
{
    const ari_tally *all = &c->survey.total;
    ARI_FACTS(t, {"use", .text = all->vr < all->rr ? "is missing from the sum" : "was counted twice"});
}

/* Wrong rows against the ids of the batch. */
static void compare_ids(ari_trace *t, const ari_case *c, const size_t *times, const size_t *last)
{
    size_t wrong = 0, unused = 0, once = 0, right = 0, right_repeated = 0, others = 0;
    for (size_t id = 0; id < c->grid.shape[0]; id++) {
        const bool off = c->survey.hits[0][id] > 0;
        wrong += off;
        unused += off && times[id] == 0;
        once += off && times[id] == 1;
        right += !off && times[id] > last[id];
        right_repeated += !off && times[id] > last[id] + 1;
        others += !off && !row_is_zero(c, c->d->reference, id);
    }
    const bool repeated = once == 0 && right_repeated == 0 && right > 0;
    if (unused > 0 || wrong < 2 || (!repeated && right > 0))
        return;
    ari_trace_set(t, ARI_FOUND_BATCH_ROWS, repeated ? ARI_IF(TWICE) : others > 0 ? ARI_IF(SOME) : 0);
    say_use(t, c);
    ARI_FACTS(t, {"ids", .count = wrong});
}

/* The number of ids that the batch holds, by the distinct rows of the reference's embedding; 0: unknown. */
static ar_status count_looked_up(size_t *ids, const ari_case *c)
{
    const char *name = c->d->name, *dot = strrchr(name, '.');
    const size_t stem = dot ? (size_t)(dot - name) : 0, cols = c->grid.cols;
    const ar_dump_tensor *of = ari_tensor_of_step(c->known->reference, name, stem, "fwd", c->d->step);
    float *x = NULL;
    *ids = 0;
    if (!of || of->count % cols != 0 || of->count / cols > MOST_TOKENS)
        return AR_OK;
    AR_TRY(ari_read_values(&x, of, c->arena));
    for (size_t row = 0, other; row < of->count / cols; row++) {
        for (other = 0; other < row && memcmp(x + other * cols, x + row * cols, cols * sizeof *x) != 0;)
            other++;
        *ids += other == row;
    }
    return AR_OK;
}

/* Without the ids: some scattered rows are wrong as a whole, and the others, which have gradients too, are right. There
 * are as many as the batch has ids, if that is known, apart from ids that end a sample. */
static ar_status guess_tied(ari_trace *t, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    size_t wrong = 0, partly = 0, zero = 0, from, to, held;
    AR_TRY(count_looked_up(&held, c));
    for (size_t row = 0; row < g->rows; row++) {
        const size_t hits = c->survey.hits[0][row];
        wrong += hits > 0;
        partly += hits > 0 && hits * 10 < g->cols * 9;
        zero += hits == 0 && row_is_zero(c, g->d->reference, row);
    }
    ari_bounding_range(c, 0, &from, &to);
    if (wrong < 4 || partly * 10 > wrong || zero * 10 > g->rows || wrong * 3 > (to - from) * 2 ||
        (held > 0 && (wrong > held || wrong + c->facts.batch < held)))
        return AR_OK;
    ari_trace_set(t, ARI_FOUND_BATCH_ROWS, ARI_IF(PERHAPS));
    say_use(t, c);
    t->penalty = 24;
    ARI_FACTS(t, {"ids", .count = wrong});
    return AR_OK;
}

/* A tied weight without its use in the head: every row of the reference has a gradient, here only those of the batch's
 * ids do. `times` is NULL where those are not known. */
static void look_for_lost_head(ari_trace *t, const ari_case *c, const size_t *times, const size_t *last)
{
    size_t zero = 0, off = 0;
    for (size_t id = 0; c->val && id < c->grid.rows; id++) {
        const bool held = times && times[id] > last[id];
        if (row_is_zero(c, c->ref, id) || (row_is_zero(c, c->val, id) && held))
            return;
        zero += row_is_zero(c, c->val, id);
        off += !row_is_zero(c, c->val, id) && c->survey.hits[0][id] * 2 > c->grid.cols;
    }
    if (zero < 2 || off < 2 || zero + off < c->grid.rows)
        return;
    ARI_FINDING(t, ARI_FOUND_BATCH_ROWS, ARI_IF(ZERO), {"ids", .count = zero});
}

/* A tied weight whose use in the head counts twice: the rows of ids outside the batch are twice the reference. */
static void look_for_doubled_head(ari_trace *t, const ari_case *c, const size_t *times)
{
    const size_t cols = c->grid.cols;
    size_t doubled = 0, held = 0;
    for (size_t id = 0; c->val && id < c->grid.rows; id++) {
        held += times[id] > 0;
        if (times[id] > 0 || row_is_zero(c, c->ref, id))
            continue;
        for (size_t i = id * cols; i < (id + 1) * cols; i++) {
            if (!ari_holds(c, c->val[i], 2.0 * (double)c->ref[i]))
                return;
        }
        doubled++;
    }
    if (doubled < 2 || held < 2)
        return;
    ARI_FINDING(t, ARI_FOUND_BATCH_ROWS, ARI_IF(ALL), {"ids", .count = doubled});
}

static ar_status measure_batch(ari_trace *t, const ari_case *c)
{
    const ari_difference *d = c->d;
    const ar_dump_tensor *of_dump = d->ids ? NULL : ari_find_ids(c->known);
    size_t *times = NULL, *last = NULL;
    if (!d->ids && !of_dump) {
        if (d->hidden)
            AR_TRY(guess_tied(t, c));
        if (t->kind == ARI_FOUND_NOTHING)
            look_for_lost_head(t, c, NULL, NULL);
        return AR_OK;
    }
    AR_TRY(ARI_TAKE(&times, c->arena, c->grid.shape[0], d->name));
    AR_TRY(ARI_TAKE(&last, c->arena, c->grid.shape[0], d->name));
    AR_TRY(count_ids(times, last, c, of_dump));
    compare_ids(t, c, times, last);
    if (t->kind == ARI_FOUND_NOTHING)
        look_for_lost_head(t, c, times, last);
    if (t->kind == ARI_FOUND_NOTHING)
        look_for_doubled_head(t, c, times);
    return AR_OK;
}

/* --- ids of padding or left over ---------------------------------------------------------------------------------- */

/* All rows that differ come last, and the reference has zeros there. */
static bool is_padding(const ari_case *c, size_t *from)
{
    const ari_survey *s = &c->survey;
    size_t to;
    ari_bounding_range(c, 0, from, &to);
    for (size_t row = *from; row < to; row++) {
        if (s->hits[0][row] == 0 || !row_is_zero(c, c->d->reference, row))
            return false;
    }
    return to == c->grid.shape[0] && *from > 0;
}

/* The last ids alone, as many as are left over where a vocabulary is split over ranks and rounded down. */
static void measure_left_over(ari_trace *t, const ari_case *c, int dim)
{
    const ari_difference *d = c->d;
    const size_t n = c->grid.shape[dim], most = d->hidden ? ARI_MOST_RANKS : (size_t)ari_along(d, ARI_CUTS_FEATURES);
    size_t from, to;
    ari_bounding_range(c, dim, &from, &to);
    if (to != n || from == 0 || (d->hidden && (n - from) * 8 > n) || c->survey.hit[dim] != n - from ||
        c->survey.different * 2 < (n - from) * (c->grid.count / n)) /* an element alone is not its id's row */
        return;
    for (size_t ranks = d->hidden ? 2 : most; ranks <= most; ranks++) {
        if (n % ranks != n - from)
            continue;
        ari_trace_set(t, ARI_FOUND_LEFT_OVER, 0);
        t->penalty = d->hidden ? 5 : 0;
        ARI_FACTS(t, {"left", .count = n - from}, {"vocabulary", .count = n}, {"shards", .count = ranks},
                  {"from", .count = from});
        return;
    }
}

ar_status ari_measure_ids(ari_trace *t, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    const ari_difference *d = g->d;
    const bool activation = ari_is_activation(d), embedding = c->is & ARI_IS_EMBEDDING;
    const int dim = activation ? g->nd - 1 : 0;
    size_t from = 0;
    if (!(c->is & (ARI_IS_EMBEDDING | ARI_IS_HEAD)) || c->start > 0)
        return AR_OK;
    if (d->pass == 'f' && d->ndim >= 2 && embedding) {
        AR_TRY(measure_stale_table(t, c));
        if (t->kind == ARI_FOUND_NOTHING)
            measure_lookup(t, c);
    } else if (d->pass == 'g' && d->ndim == 2)
        measure_edge_rows(t, c);
    if (t->kind == ARI_FOUND_NOTHING && strcmp(ari_dim_name(g, dim, false), "id") == 0)
        measure_left_over(t, c, dim);
    if (t->kind != ARI_FOUND_NOTHING || d->ndim != 2 || activation)
        return AR_OK;
    if (d->hidden && is_padding(c, &from)) {
        ARI_FINDING(t, ARI_FOUND_PADDING, 0, {"ids", .count = g->shape[0] - from}, {"from", .count = from});
        return AR_OK;
    }
    return d->pass == 'g' && embedding ? measure_batch(t, c) : AR_OK;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of ids: padding, ids that belong to nobody, ids of the batch. */
#include <stdlib.h>

#include "ref/core/size.h"
#include "verify/diagnose/explain_impl.h"
#include "verify/diagnose/roles.h"

/* --- rows of ids -------------------------------------------------------------------------------------------------- */

static bool row_is_zero(const ari_whole *w, const float *data, size_t row)
{
    for (size_t i = 0; i < w->view.grid.cols; i++) {
        if (data[row * w->view.grid.cols + i] != 0.0f)
            return false;
    }
    return true;
}

/* All rows that differ come last, and the reference has zeros there. */
static bool is_padding(const ari_whole *w, size_t *from)
{
    const ari_survey *s = &w->view.survey;
    size_t to;
    ari_hull(w, 0, from, &to);
    for (size_t row = *from; row < to; row++) {
        if (s->hits[0][row] == 0 || !row_is_zero(w, w->ref, row))
            return false;
    }
    return to == w->view.grid.shape[0] && *from > 0;
}

/* How often the batch has each id; *last of them where a sequence ends, which predicts nothing. */
static ar_status count_ids(size_t *times, size_t *last, size_t vocab, const ar_dump_tensor *t)
{
    double *ids = NULL;
    AR_TRY(ari_alloc((void **)&ids, t->count, sizeof *ids, t->name));
    const ar_status st = ar_dump_read_f64(t, 0, t->count, ids);
    const size_t seq = t->shape[t->ndim - 1];
    for (size_t i = 0; st == AR_OK && i < t->count; i++) {
        if (!(ids[i] >= 0.0 && ids[i] < (double)vocab))
            continue;
        times[(size_t)ids[i]]++;
        last[(size_t)ids[i]] += (i + 1) % seq == 0;
    }
    free(ids);
    return st;
}

/* Wrong rows against the ids of the batch. */
typedef struct id_rows {
    size_t wrong, wrong_unused, wrong_once, right_used, right_repeated;
} id_rows;

static id_rows compare_ids(const ari_whole *w, const size_t *times, const size_t *last)
{
    id_rows r = {0};
    for (size_t id = 0; id < w->view.grid.shape[0]; id++) {
        const bool wrong = w->view.survey.hits[0][id] > 0;
        const size_t telling = times[id] - last[id];
        r.wrong += wrong;
        r.wrong_unused += wrong && times[id] == 0;
        r.wrong_once += wrong && times[id] == 1;
        r.right_used += !wrong && telling > 0;
        r.right_repeated += !wrong && telling > 1;
    }
    return r;
}

static void say_ids(ari_clue *f, const id_rows *r)
{
    if (r->wrong_unused > 0 || r->wrong < 2)
        return;
    if (r->wrong_once == 0 && r->right_repeated == 0) {
        ari_text t = ari_find(f, ARI_TRACE + 6);
        ari_say(&t,
                "repeated ids: exactly the rows of the %zu ids that the batch has more than once differ: their "
                "contributions were overwritten in place of added",
                r->wrong);
    } else if (r->right_used == 0) {
        ari_text t = ari_find(f, ARI_TRACE + 4);
        ari_say(&t,
                "exactly the rows of the %zu ids in the batch differ, all others are right: the embedding's own sum "
                "over tokens is wrong, missing or counted twice (a tied weight has two uses)",
                r->wrong);
    }
}

/* Without the ids: some rows are wrong as a whole, scattered, and the others, which have gradients too, are right. */
static void seek_tied(ari_clue *f, const ari_whole *w)
{
    const ari_grid *g = &w->view.grid;
    size_t wrong = 0, partly = 0, zero = 0, from, to;
    if (!ari_is_embedding(g->d) || g->d->pass != 'g')
        return;
    for (size_t row = 0; row < g->rows; row++) {
        const size_t hits = w->view.survey.hits[0][row];
        wrong += hits > 0;
        partly += hits > 0 && hits * 10 < g->cols * 9;
        zero += hits == 0 && row_is_zero(w, w->ref, row);
    }
    ari_hull(w, 0, &from, &to);
    if (wrong < 4 || partly * 10 > wrong || zero * 10 > g->rows || wrong * 3 > (to - from) * 2)
        return;
    ari_text t = ari_find(f, ARI_SHAPE);
    ari_say(&t,
            "a tied weight, perhaps: the rows of %zu ids differ as a whole, all others have gradients too and are "
            "right; if those are the ids of the batch, the embedding's own use of the weight is missing from the sum, "
            "or was counted twice",
            wrong);
}

/* The last ids alone, as many as are left over where a vocabulary is split over ranks and rounded down. */
static void seek_left_over(ari_clue *f, const ari_whole *w, int dim)
{
    const size_t n = w->view.grid.shape[dim];
    size_t from, to;
    ari_hull(w, dim, &from, &to);
    if (to != n || from == 0 || (n - from) * 8 > n || w->view.survey.hit[dim] != n - from)
        return;
    for (size_t ranks = 2; ranks <= ARI_MOST_RANKS; ranks++) {
        if (n % ranks != n - from)
            continue;
        ari_text t = ari_find(f, ARI_TRACE + 2);
        ari_say(&t,
                "only the last %zu of %zu ids differ, as many as are left over where the vocabulary is split over %zu "
                "ranks and rounded down: ids from %zu on belong to nobody; a vocabulary that does not divide needs "
                "uneven shards, or padding that is masked",
                n - from, n, ranks, from);
        return;
    }
}

ar_status ari_seek_ids(ari_clue *f, const ari_whole *w)
{
    const ari_grid *g = &w->view.grid;
    const ari_difference *d = g->d;
    const bool vocabulary = ari_name_is(d->name) & (ARI_IS_EMBEDDING | ARI_IS_HEAD);
    size_t from = 0, *times = NULL, *last = NULL;
    if (!vocabulary || w->start > 0)
        return AR_OK;
    const bool logits = d->pass == 'f' || d->pass == 'b';
    if (strcmp(ari_axis_name(w, logits ? g->nd - 1 : 0, false), "id") == 0)
        seek_left_over(f, w, logits ? g->nd - 1 : 0);
    if (d->ndim != 2 || logits)
        return AR_OK;
    if (is_padding(w, &from)) {
        ari_text t = ari_find(f, ARI_TRACE + 6);
        ari_say(&t,
                "padded vocabulary: only the last %zu ids (from %zu on) differ, which are zero in the reference; "
                "padding must stay out of the softmax and of gradients, and never be saved",
                g->shape[0] - from, from);
        return AR_OK;
    }
    const ar_dump_tensor *ids = ari_find_ids(w->known);
    if (!ids)
        seek_tied(f, w);
    if (!ids || !ari_is_embedding(d))
        return AR_OK;
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, ari_alloc_zero((void **)&times, g->shape[0], sizeof *times, d->name));
    AR_TRY_TO(done, st, ari_alloc_zero((void **)&last, g->shape[0], sizeof *last, d->name));
    AR_TRY_TO(done, st, count_ids(times, last, g->shape[0], ids));
    const id_rows r = compare_ids(w, times, last);
    say_ids(f, &r);
done:
    free(times);
    free(last);
    return st;
}

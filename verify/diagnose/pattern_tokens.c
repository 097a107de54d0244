/* SPDX-License-Identifier: Apache-2.0 */
/* Whole rows: tokens that stand in another token's place, rows of a weight that the batch looked up, rows whose mean or
 * variance is another. */
#include <stdlib.h>

#include "ref/core/size.h"
#include "verify/diagnose/pattern_impl.h"
#include "verify/diagnose/roles.h"

/* --- tokens in another order -------------------------------------------------------------------------------------- */

enum { MOST_ROWS = 4096 };

static bool is_activation(const ari_difference *d)
{
    return d->pass == 'f' || d->pass == 'b';
}

static bool run_is_wrong(const ari_grid *g, const ari_run *run)
{
    for (size_t i = 0; i < run->count; i++) {
        if (ari_run_differs(g, run, i))
            return true;
    }
    return false;
}

/* The row whose reference stands in this run's columns, bit for bit; g->rows if there is none. A constant run equals
 * many places and proves nothing. */
static size_t row_of(const ari_grid *g, const ari_run *run)
{
    bool varies = false;
    for (size_t i = 1; i < run->count; i++)
        varies = varies || !ari_same_bits(run->value[i], run->value[0]);
    for (size_t row = 0; varies && row < g->rows; row++) {
        const float *ref = g->d->reference + row * g->cols + run->col;
        if (ari_same_bits(run->value[0], ref[0]) && memcmp(run->value, ref, run->count * sizeof *ref) == 0)
            return row;
    }
    return g->rows;
}

/* Fills from[rows]: whose values each row has, its own where they are right. False unless every wrong row has
 * another's, and all ranks say the same. */
static bool find_rows(const ari_case *c, size_t *from)
{
    const ari_grid *g = &c->grid;
    size_t moved = 0;
    for (size_t row = 0; row < g->rows; row++)
        from[row] = row;
    ari_runs it = ari_runs_of(g);
    ari_run run;
    while (ari_runs_next(&it, &run)) {
        if (!run_is_wrong(g, &run))
            continue;
        const size_t source = row_of(g, &run);
        if (source == g->rows || (from[run.row] != run.row && from[run.row] != source))
            return false;
        moved += from[run.row] == run.row;
        from[run.row] = source;
    }
    return moved > 1;
}

/* Row i of [b, s] has what stands at i where the parts of the ranks, [b, s/N] each, lie one after the other. */
static bool is_rank_major(const ari_grid *g, const size_t *from)
{
    const size_t n = (size_t)ari_tp_of(g->d), b = g->shape[0], s = g->nd == 3 ? g->shape[1] : 0;
    if (n < 2 || b < 2 || s == 0 || s % n != 0)
        return false;
    const size_t part = s / n;
    for (size_t i = 0; i < b * s; i++) {
        const size_t rank = i / (b * part), sample = i / part % b, expected = sample * s + rank * part + i % part;
        /* Tokens of equal values are the same one. */
        if (memcmp(g->d->reference + from[i] * g->cols, g->d->reference + expected * g->cols,
                   g->cols * sizeof(float)) != 0)
            return false;
    }
    return true;
}

static void say_moved(ari_text *t, const ari_grid *g, const size_t *from)
{
    int shown = 0;
    for (size_t row = 0; row < g->rows && shown < 3; row++) {
        if (from[row] == row)
            continue;
        ari_say(t, shown++ ? ", [" : " [");
        for (int dim = 0; dim + 1 < g->nd; dim++)
            ari_say(t, dim ? ", %zu" : "%zu", ari_grid_index(g, row * g->cols, dim));
        ari_say(t, "] has");
        for (int dim = 0; dim + 1 < g->nd; dim++)
            ari_say(t, dim ? ", %zu" : " [%zu", ari_grid_index(g, from[row] * g->cols, dim));
        ari_say(t, "]'s");
    }
}

ar_status ari_detect_tokens(ari_clue *f, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    size_t *from = NULL;
    if (!is_activation(g->d) || g->nd < 2 || g->rows > MOST_ROWS)
        return AR_OK;
    AR_TRY(ari_alloc((void **)&from, g->rows, sizeof *from, g->d->name));
    if (find_rows(c, from)) {
        const bool known = is_rank_major(g, from);
        ari_text t = ari_find(f, known ? ARI_IDENTITY + 3 : ARI_TRACE - 3);
        ari_say(&t, "tokens in another order: every wrong row is another token's, bit for bit:");
        say_moved(&t, g, from);
        if (known)
            ari_say(&t, "; it is the order of the ranks' parts one after the other: for more than one sample, tokens "
                        "gathered over tp must be put together sample by sample (sequence parallelism)");
        else
            ari_say(&t, "; a gather, a scatter or a transposition that mixes samples, tokens and ranks");
    }
    free(from);
    return AR_OK;
}

/* --- rows of the ids in the batch --------------------------------------------------------------------------------- */

/* Whether the rows that differ are those of the ids in the batch, all of them and no other. The last token of a sample
 * predicts nothing, so that an id which stands there alone may have no gradient. */
static bool are_ids(const ari_case *c, size_t *ids)
{
    const ari_grid *g = &c->grid;
    const ari_difference *d = g->d;
    *ids = 0;
    for (size_t id = 0; id < g->shape[0]; id++) {
        bool used = false, predicts = false;
        for (size_t i = 0; i < d->batch * d->seq && !predicts; i++) {
            used = used || d->ids[i] == (int64_t)id;
            predicts = d->ids[i] == (int64_t)id && (i + 1) % d->seq != 0;
        }
        const bool wrong = c->survey.hits[0][id] > 0;
        if ((wrong && !used) || (predicts && !wrong))
            return false;
        *ids += wrong;
    }
    return true;
}

static bool others_have_gradients(const ari_case *c)
{
    const ari_grid *g = &c->grid;
    for (size_t row = 0; row < g->rows; row++) {
        for (size_t i = 0; c->survey.hits[0][row] == 0 && i < g->cols; i++) {
            if (g->d->reference[row * g->cols + i] != 0.0f)
                return true;
        }
    }
    return false;
}

ar_status ari_detect_tied(ari_clue *f, const ari_case *c)
{
    const ari_difference *d = c->grid.d;
    size_t ids = 0;
    if (d->pass != 'g' || d->ndim != 2 || !d->ids || !ari_is_embedding(d) || !are_ids(c, &ids) || ids < 2)
        return AR_OK;
    ari_text t = ari_find(f, ARI_TRACE + 4);
    if (others_have_gradients(c))
        ari_say(&t,
                "a tied weight: exactly the rows of the %zu ids that the batch holds differ, all others have the LM "
                "head's gradient and are right; the embedding's own use of the weight is missing from the sum, or was "
                "counted twice",
                ids);
    else
        ari_say(&t, "every row that the batch looks up differs (%zu ids): the embedding's own sum over tokens is wrong",
                ids);
    return AR_OK;
}

/* --- a norm's mean and variance ----------------------------------------------------------------------------------- */

typedef struct lines {
    bool possible, moved; /* moved: some row is not a mere multiple */
    size_t n;             /* rows */
    double low, high;     /* slopes */
} lines;

/* Fits value = slope * reference + shift. What is left must be small beside the difference, not beside the values: a
 * bias that is added after the stretching leaves that much. */
static void add_line(lines *l, const ari_run *run)
{
    double sr = 0.0, sv = 0.0, rr = 0.0, rv = 0.0, vv = 0.0, dd = 0.0, sd = 0.0;
    const double n = (double)run->count;
    for (size_t i = 0; i < run->count; i++) {
        const double r = (double)run->ref[i], v = (double)run->value[i], apart = v - r;
        sr += r, sv += v, rr += r * r, rv += r * v, vv += v * v, dd += apart * apart, sd += apart;
    }
    const double slope = (rv - sr * sv / n) / (rr - sr * sr / n);
    const double left = (vv - sv * sv / n) - slope * (rv - sr * sv / n);
    l->possible = l->possible && slope > 0.0 && left <= 0.05 * (dd - sd * sd / n) + 1e-10 * vv;
    l->low = l->n == 0 || slope < l->low ? slope : l->low;
    l->high = l->n == 0 || slope > l->high ? slope : l->high;
    l->moved = l->moved || vv - rv * rv / rr > 1e-10 * vv;
    l->n++;
}

ar_status ari_detect_statistic(ari_clue *f, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    lines l = {.possible = true};
    ari_runs it = ari_runs_of(g);
    ari_run run;
    if (g->d->pass != 'f' || !ari_is_norm(g->d) || g->nd < 2 || g->cols < 8)
        return AR_OK;
    while (l.possible && ari_runs_next(&it, &run)) {
        if (run.count == g->cols && run_is_wrong(g, &run))
            add_line(&l, &run);
    }
    if (!l.possible || l.n == 0 || (fabs(l.low - 1.0) < 1e-3 && fabs(l.high - 1.0) < 1e-3))
        return AR_OK;
    size_t padded = 1;
    while (padded < g->cols)
        padded *= 2;
    const double factor = sqrt((double)padded / (double)g->cols);
    const bool by_padding = padded > g->cols && fabs(l.low / factor - 1.0) < 0.02 && fabs(l.high / factor - 1.0) < 0.02;
    if (!l.moved && !by_padding) /* ari_detect_row_factor's */
        return AR_OK;
    ari_text t = ari_find(f, by_padding ? ARI_IDENTITY + 1 : ARI_TRACE + 6);
    ari_say(&t,
            "a norm's statistics: each wrong row is stretched, by %.4g to %.4g, and perhaps moved, but otherwise "
            "unchanged: mean and variance (or mean square) are not the row's",
            l.low, l.high);
    if (by_padding)
        ari_say(&t, "; sqrt(%zu / %zu) = %.4g: they were taken over %zu lanes, padding included", padded, g->cols,
                factor, padded);
    else
        ari_say(&t, "; they include lanes of padding, or cover a shard of the features alone");
    return AR_OK;
}

/* --- ids that belong to nobody ------------------------------------------------------------------------------------ */

/* The first id that is left out where `vocab` ids over tp ranks are rounded down; vocab if it divides. */
static size_t first_left_out(const ari_difference *d, size_t vocab)
{
    const size_t tp = (size_t)ari_tp_of(d);
    return vocab / tp * tp;
}

static bool only_ids_from(const size_t *hits, size_t vocab, size_t first)
{
    for (size_t id = 0; id < vocab; id++) {
        if ((hits[id] > 0) != (id >= first))
            return false;
    }
    return true;
}

ar_status ari_detect_truncation(ari_clue *f, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    const ari_difference *d = g->d;
    const unsigned is = ari_name_is(d->name);
    const bool head = is & ARI_IS_HEAD, weight = d->pass != 'f' && d->pass != 'b' && d->ndim == 2;
    const bool logits = head && (d->pass == 'f' || (is & ARI_IS_LOGITS)) && !weight;
    if (!logits && !(weight && (is & (ARI_IS_HEAD | ARI_IS_EMBEDDING))))
        return AR_OK;
    const int dim = logits ? g->nd - 1 : 0;
    const size_t vocab = g->shape[dim], first = first_left_out(d, vocab);
    if (first == vocab || first == 0 || !only_ids_from(c->survey.hits[dim], vocab, first))
        return AR_OK;
    ari_text t = ari_find(f, ARI_TRACE + 7);
    ari_say(
        &t,
        "the last %zu of %zu ids belong to nobody: %zu over %d ranks, rounded down to %zu each, leaves the ids from "
        "%zu on out; a vocabulary that does not divide needs uneven shards, or padding that is masked",
        vocab - first, vocab, vocab, ari_tp_of(d), first / (size_t)ari_tp_of(d), first);
    return AR_OK;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Documents that share a row: which of them the differences are in, positions that do not restart in each, and masks
 * that do not end with it. */
#include "verify/diagnose/case.h"
#include "verify/diagnose/replay/replay.h"
#include "verify/diagnose/roles.h"

/* --- places ------------------------------------------------------------------------------------------------------- */

static int document_of(const ari_case *c, size_t sample, size_t position)
{
    return c->grid.d->documents[sample * c->grid.d->seq + position];
}

/* The position in its row at which a position's document begins. */
static size_t start_of(const ari_case *c, size_t sample, size_t position)
{
    const int own = document_of(c, sample, position);
    while (position > 0 && document_of(c, sample, position - 1) == own)
        position--;
    return position;
}

/* Which dimension of an activation is the position of what is computed; -1: none, or rows are no documents. */
static int position_dim(const ari_case *c)
{
    const ari_grid *g = &c->grid;
    if (!g->d->documents || !ari_is_activation(g->d) || g->nd < 3 || g->shape[0] != g->d->batch || c->start > 0 ||
        c->step || c->inner)
        return -1;
    for (int dim = 1; dim < g->nd; dim++) {
        const char *name = ari_dim_name(g, dim, false);
        if (strcmp(name, "token") == 0 || strcmp(name, "query") == 0)
            return g->shape[dim] == g->d->seq ? dim : -1;
    }
    return -1;
}

int ari_first_document(const ari_case *c)
{
    const ari_grid *g = &c->grid;
    const int dim = position_dim(c);
    int first = -1, last = 0;
    for (size_t row = 0; dim > 0 && row < g->rows; row++) {
        const size_t at = row * g->cols;
        const int own = document_of(c, ari_grid_index(g, at, 0), ari_grid_index(g, at, dim));
        last = own > last ? own : last;
        if (ari_row_differs(c, row))
            first = first < 0 || own < first ? own : first;
    }
    return last > 0 ? first : -1;
}

/* --- positions that run on ---------------------------------------------------------------------------------------- */

/* Of a row of heads: by how much the fastest pair of all heads is turned from the reference, as cosine and sine; false
 * where it does not keep its length. */
static bool turn_of(double turn[2], const ari_case *c, size_t row, size_t head, size_t apart)
{
    double length = 0.0;
    turn[0] = turn[1] = 0.0;
    for (size_t at = row * c->grid.cols; at < (row + 1) * c->grid.cols; at += head) {
        const double r[2] = {(double)c->ref[at], (double)c->ref[at + apart]};
        const double v[2] = {(double)c->val[at], (double)c->val[at + apart]};
        turn[0] += v[0] * r[0] + v[1] * r[1];
        turn[1] += v[1] * r[0] - v[0] * r[1];
        length += hypot(v[0], v[1]) * hypot(r[0], r[1]);
    }
    return hypot(turn[0], turn[1]) >= 0.999 * length;
}

/* Whether each row is turned by as many positions as stand before its document. */
static bool turns_run_on(const ari_case *c, size_t head, size_t apart)
{
    const ari_grid *g = &c->grid;
    const double sign = g->d->pass == 'b' ? -1.0 : 1.0;
    size_t turned = 0;
    for (size_t row = 0; row < g->rows; row++) {
        const size_t at = row * g->cols;
        const double by = sign * (double)start_of(c, ari_grid_index(g, at, 0), ari_grid_index(g, at, 1));
        double turn[2];
        if (!ari_row_differs(c, row))
            continue;
        if (by == 0.0 || !turn_of(turn, c, row, head, apart) ||
            fabs(remainder(atan2(turn[1], turn[0]) - by, 6.283185307179586)) > 0.02)
            return false;
        turned++;
    }
    return turned > 0;
}

/* Whether each wrong row has the table's row of its place in the row added, and that of its place in the document taken
 * away. */
static bool rows_run_on(const ari_case *c, const ari_lookup_table *table)
{
    const ari_grid *g = &c->grid;
    size_t moved = 0;
    for (size_t row = 0; row < g->rows; row++) {
        const size_t at = row * g->cols, position = ari_grid_index(g, at, 1);
        const size_t own = position - start_of(c, ari_grid_index(g, at, 0), position);
        if (!ari_row_differs(c, row))
            continue;
        for (size_t i = 0; i < g->cols; i++) {
            const double by = (double)table->at[position * g->cols + i] - (double)table->at[own * g->cols + i];
            const double off = (double)c->val[at + i] - (double)c->ref[at + i] - by;
            if (own == position || !(fabs(off) <= c->absolute + 0x1p-20 * c->max_ref))
                return false;
        }
        moved++;
    }
    return moved > 0;
}

static ar_status measure_table(bool *runs_on, const ari_case *c)
{
    ari_lookup_table table;
    AR_TRY(ari_lookup_table_read(&table, c, ARI_POSITIONS, c->grid.rows));
    *runs_on = table.at && table.cols == c->grid.cols && table.rows >= c->grid.d->seq && rows_run_on(c, &table);
    ari_lookup_table_fini(&table);
    return AR_OK;
}

/* --- attention over the end of a document ------------------------------------------------------------------------- */

/* Scores that are seen here and not in the reference, or the other way round. */
typedef struct other_scores {
    size_t gained, lost;   /* of one document: neither side's boundaries are the other's */
    size_t across, within; /* gained with a key of another document, and of the query's own */
} other_scores;

static other_scores compare_masks(const ari_case *c)
{
    const ari_grid *g = &c->grid;
    other_scores n = {0};
    for (size_t i = 0; i < c->count; i++) {
        const size_t key = i % g->cols, query = ari_grid_index(g, i, 2), sample = ari_grid_index(g, i, 0);
        const bool here = fabs((double)c->val[i]) > g->d->noise, there = fabs((double)c->ref[i]) > g->d->noise;
        const bool own = document_of(c, sample, key) == document_of(c, sample, query);
        if (!ari_off(c, i) || here == there)
            continue;
        n.lost += there;
        n.gained += here;
        n.across += here && !own;
        n.within += here && own;
    }
    return n;
}

static void measure_scores(ari_trace *t, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    if (g->nd != 4 || g->shape[2] != g->shape[3] || !(ari_name_is(g->d->name) & ARI_IS_PROBS) || g->d->pass != 'f')
        return;
    const other_scores n = compare_masks(c);
    if (n.across < 2 || n.within > 0)
        return;
    ari_found(t, ARI_FOUND_DOCUMENTS, ARI_IF(CUT) | (n.lost > 0 ? ARI_IF(SHIFT) : 0));
    ari_count(t, "gained", n.gained);
    ari_count(t, "lost", n.lost);
}

ar_status ari_measure_documents(ari_trace *t, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    const size_t head = g->d->head_dim > 0 ? g->d->head_dim : g->nd == 3 ? ari_head_size(c, 2) : 0;
    bool runs_on = false;
    if (!c->val || position_dim(c) < 0 || c->survey.total.nan > 0)
        return AR_OK;
    measure_scores(t, c);
    if (g->nd != 3 || ari_first_document(c) < 1)
        return AR_OK;
    if (head >= 4 && g->cols % head == 0)
        runs_on = turns_run_on(c, head, head / 2) || turns_run_on(c, head, 1);
    if (!runs_on && g->d->pass == 'f' && c->known->reference)
        AR_TRY(measure_table(&runs_on, c));
    if (runs_on)
        ari_found(t, ARI_FOUND_DOCUMENTS, 0);
    return AR_OK;
}

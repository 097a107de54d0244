/* SPDX-License-Identifier: Apache-2.0 */
/* Positions counted otherwise, and keys that are others: documents that share a row, whose positions run on or whose ends
 * a mask does not know; chunks of context-parallel ranks in another order, or the own one in place of all. */
#include "anyrank/parallel.h"
#include "verify/diagnose/case.h"
#include "verify/diagnose/hypothesis.h"
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

/* --- rings -------------------------------------------------------------------------------------------------------- */

size_t ari_place_in_ring(size_t *index, size_t seq, size_t n, bool zigzag, size_t at)
{
    const size_t chunk = seq / (zigzag ? 2 * n : n), k = at / chunk;
    *index = at % chunk + (zigzag && k >= n ? chunk : 0);
    return zigzag && k >= n ? 2 * n - 1 - k : k;
}

static size_t at_in_ring(size_t place, size_t index, size_t seq, size_t n, bool zigzag)
{
    const ar_positions own = ar_ring_positions(n, zigzag, seq, place);
    return ar_positions_at(&own, index);
}

/* Where a position of a zigzag is taken to be if its chunks are put down as contiguous ones, or the other way round. */
static size_t recut(size_t seq, size_t n, bool zigzag, size_t at)
{
    size_t index;
    const size_t place = ari_place_in_ring(&index, seq, n, zigzag, at);
    return at_in_ring(place, index, seq, n, !zigzag);
}

/* --- positions counted otherwise ---------------------------------------------------------------------------------- */

/* What the tokens of a row count as: in the reference, and by one mistake. */
typedef struct counting {
    const ari_case *c;
    size_t places; /* of a ring whose zigzag is taken for contiguous chunks; 0: positions run on over documents */
} counting;

static size_t right_position(const counting *n, size_t sample, size_t at)
{
    return n->c->grid.d->documents ? at - start_of(n->c, sample, at) : at;
}

static size_t wrong_position(const counting *n, size_t sample, size_t at)
{
    return n->places ? right_position(n, sample, recut(n->c->grid.shape[1], n->places, true, at)) : at;
}

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

/* Whether each row is turned by as many positions as it is off, and right where it is not. */
static bool turns_by(const counting *n, size_t head, size_t apart)
{
    const ari_grid *g = &n->c->grid;
    const double sign = g->d->pass == 'b' ? -1.0 : 1.0;
    size_t turned = 0;
    for (size_t row = 0; row < g->rows; row++) {
        const size_t sample = ari_grid_index(g, row * g->cols, 0), at = ari_grid_index(g, row * g->cols, 1);
        const double by = (double)wrong_position(n, sample, at) - (double)right_position(n, sample, at);
        double turn[2];
        if (!ari_row_differs(n->c, row))
            continue;
        if (by == 0.0 || !turn_of(turn, n->c, row, head, apart) ||
            fabs(remainder(atan2(turn[1], turn[0]) - sign * by, 6.283185307179586)) > 0.02)
            return false;
        turned++;
    }
    return turned > 0;
}

/* Whether each wrong row has the table's row of the wrong position added, and that of the right one taken away. */
static bool moves_rows(const counting *n, const ari_lookup_table *table)
{
    const ari_case *c = n->c;
    const ari_grid *g = &c->grid;
    size_t moved = 0;
    for (size_t row = 0; row < g->rows; row++) {
        const size_t first = row * g->cols, at = ari_grid_index(g, first, 1);
        const size_t sample = ari_grid_index(g, first, 0);
        const size_t right = right_position(n, sample, at), wrong = wrong_position(n, sample, at);
        if (!ari_row_differs(c, row))
            continue;
        for (size_t i = 0; i < g->cols; i++) {
            const double by = (double)table->at[wrong * g->cols + i] - (double)table->at[right * g->cols + i];
            const double off = (double)c->val[first + i] - (double)c->ref[first + i] - by;
            if (right == wrong || !(fabs(off) <= c->absolute + 2.0 * ARI_ROUNDINGS * c->max_ref))
                return false;
        }
        moved++;
    }
    return moved > 0;
}

/* Positions over documents, then those of a zigzag of so many places. */
static bool counts_so(const counting *n, const ari_lookup_table *table, size_t head)
{
    if (head > 0 && (turns_by(n, head, head / 2) || turns_by(n, head, 1)))
        return true;
    return table->at && moves_rows(n, table);
}

static ar_status measure_counting(ari_trace *t, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    const size_t seq = g->shape[1], size = g->d->head_dim > 0 ? g->d->head_dim : ari_head_size(c, 2);
    const size_t head = size >= 4 && g->cols % size == 0 ? size : 0;
    ari_lookup_table table = {.at = NULL};
    counting n = {.c = c};
    if (g->d->pass == 'f' && c->known->reference && c->reference)
        AR_TRY(ari_lookup_table_read(&table, c, ARI_POSITIONS, g->rows));
    if (table.at && (table.cols != g->cols || table.rows < seq)) {
        ari_lookup_table_fini(&table);
        table.at = NULL;
    }
    if (g->d->documents && counts_so(&n, &table, head))
        ari_found(t, ARI_FOUND_DOCUMENTS, 0);
    for (n.places = 2; n.places <= ARI_MOST_RANKS && 2 * n.places <= seq && t->kind == ARI_FOUND_NOTHING; n.places++) {
        if (seq % (2 * n.places) != 0 || !counts_so(&n, &table, head))
            continue;
        ari_found(t, ARI_FOUND_ZIGZAG, ARI_IF(COUNT));
        ari_count(t, "places", n.places);
    }
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

/* The first key that a row of scores sees; the number of keys: none. */
static size_t first_seen(const ari_case *c, const float *scores, size_t row)
{
    size_t key = 0;
    while (key < c->grid.cols && !(fabs((double)scores[row * c->grid.cols + key]) > c->grid.d->noise))
        key++;
    return key;
}

/* Whether wrong rows lack the first keys that they should see, and queries one after the other begin at the same key, as
 * in a document that is cut in two. A window's begin would move with the query. */
static bool begins_within(const ari_case *c)
{
    const ari_grid *g = &c->grid;
    size_t together = 0;
    for (size_t row = 0; row < g->rows; row++) {
        const size_t query = ari_grid_index(g, row * g->cols, 2), here = first_seen(c, c->val, row);
        if (!ari_row_differs(c, row))
            continue;
        if (here <= first_seen(c, c->ref, row) || here > query)
            return false;
        for (size_t key = here; key <= query; key++) {
            const size_t at = row * g->cols + key;
            if ((fabs((double)c->val[at]) > g->d->noise) != (fabs((double)c->ref[at]) > g->d->noise))
                return false;
        }
        together += query > 0 && ari_row_differs(c, row - 1) && first_seen(c, c->val, row - 1) == here;
    }
    return together > 0;
}

static void measure_boundaries(ari_trace *t, const ari_case *c)
{
    const other_scores n = compare_masks(c);
    if (n.within > 0 || (n.across < 2 && !(n.across == 0 && begins_within(c))))
        return;
    ari_found(t, ARI_FOUND_DOCUMENTS, ARI_IF(CUT) | (n.lost > 0 ? ARI_IF(SHIFT) : 0));
    ari_count(t, "gained", n.gained);
    ari_count(t, "lost", n.lost);
}

/* --- other keys --------------------------------------------------------------------------------------------------- */

/* The key of the reference whose score stands at a key here. */
typedef size_t (*other_key)(const ari_case *c, size_t n, size_t query, size_t key);

/* Chunks of a zigzag of n places put down as contiguous ones. */
static size_t out_of_zigzag(const ari_case *c, size_t n, size_t query, size_t key)
{
    (void)query;
    return recut(c->grid.cols, n, false, key);
}

/* Contiguous chunks put down as those of a zigzag. */
static size_t into_zigzag(const ari_case *c, size_t n, size_t query, size_t key)
{
    (void)query;
    return recut(c->grid.cols, n, true, key);
}

/* In each place the own chunk's keys, whichever chunk's should be there. */
static size_t own_key(const ari_case *c, size_t n, size_t query, size_t key, bool zigzag)
{
    size_t index, unused;
    (void)ari_place_in_ring(&index, c->grid.cols, n, zigzag, key);
    return at_in_ring(ari_place_in_ring(&unused, c->grid.cols, n, zigzag, query), index, c->grid.cols, n, zigzag);
}

static size_t own_contiguous(const ari_case *c, size_t n, size_t query, size_t key)
{
    return own_key(c, n, query, key, false);
}

static size_t own_of_zigzag(const ari_case *c, size_t n, size_t query, size_t key)
{
    return own_key(c, n, query, key, true);
}

/* Whether the values of a row are the reference's at other keys: as they are, or (log) as logarithms but for one number,
 * which a softmax's denominator is. Where either is zero, masks may be the reason. */
static bool holds_keys(size_t *seen, const ari_case *c, size_t n, size_t row, other_key from, bool log_of)
{
    const ari_grid *g = &c->grid;
    const float *r = c->ref + row * g->cols, *v = c->val + row * g->cols;
    double first = NAN;
    for (size_t key = 0; key < g->cols; key++) {
        const size_t other = from(c, n, row % g->shape[2], key);
        if (r[other] == 0.0f || v[key] == 0.0f)
            continue;
        const double apart = log_of ? log((double)v[key]) - log((double)r[other]) : (double)v[key] - (double)r[other];
        first = log_of && isnan(first) ? apart : log_of ? first : 0.0;
        if (!(fabs(apart - first) <=
              (log_of ? ARI_SEEN + 4.0 * c->relative : c->absolute + 2.0 * ARI_ROUNDINGS * fabs((double)r[other]))))
            return false;
        *seen += other != key && ari_off(c, row * g->cols + key);
    }
    return true;
}

/* Whether all rows with a difference do, and most of what differs is so. */
static bool all_hold_keys(const ari_case *c, size_t n, other_key from, bool log_of)
{
    size_t seen = 0;
    for (size_t row = 0; row < c->grid.rows; row++) {
        if (ari_row_differs(c, row) && !holds_keys(&seen, c, n, row, from, log_of))
            return false;
    }
    return seen >= 16 && seen * 4 >= c->survey.different;
}

static void measure_keys(ari_trace *t, const ari_case *c)
{
    static const struct {
        other_key from;
        size_t unit; /* chunks of a place */
        char pass;
        ari_properties is;
    } ways[] = {{out_of_zigzag, 2, 'f', ARI_IF(HEADS)},
                {into_zigzag, 2, 'f', ARI_IF(HEADS)},
                {own_contiguous, 1, 'b', ARI_IF(OF_CP)},
                {own_of_zigzag, 2, 'b', ARI_IF(OF_CP)}};
    const size_t seq = c->grid.cols;
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        for (size_t n = 2; n <= ARI_MOST_RANKS && ways[i].unit * n < seq; n++) {
            if (c->grid.d->pass != ways[i].pass || seq % (ways[i].unit * n) != 0 ||
                !all_hold_keys(c, n, ways[i].from, ways[i].pass == 'f'))
                continue;
            ari_found(t, ARI_FOUND_ZIGZAG, ways[i].is);
            ari_count(t, "places", n);
            return;
        }
    }
}

ar_status ari_measure_positions(ari_trace *t, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    const bool scores = g->nd == 4 && g->shape[2] == g->shape[3] && (ari_name_is(g->d->name) & ARI_IS_PROBS);
    if (scores && g->d->pass == 'f' && position_dim(c) > 0)
        measure_boundaries(t, c);
    if (scores && t->kind == ARI_FOUND_NOTHING)
        measure_keys(t, c);
    return g->nd == 3 && strcmp(ari_dim_name(g, 1, false), "token") == 0 ? measure_counting(t, c) : AR_OK;
}

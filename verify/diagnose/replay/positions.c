/* SPDX-License-Identifier: Apache-2.0 */
/* Other positions and other keys: documents that share a row, whose positions continue or whose ends a mask ignores;
 * chunks of context-parallel ranks in another order, or the rank's own chunk instead of all. */
#include "anyrank/parallel.h"
#include "ref/placement/parallel_private.h"
#include "verify/diagnose/hypothesis.h"
#include "verify/diagnose/replay/replay.h"

/* --- places ------------------------------------------------------------------------------------------------------- */

static int document_of(const ari_case *c, size_t sample, size_t position)
{
    return c->d->documents[sample * c->d->seq + position];
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
    const ar_positions own = ari_positions_ring(n, zigzag, seq, place);
    return ari_positions_at(&own, index);
}

/* The position at which a zigzag's position lands if its chunks are laid down as contiguous ones, or the inverse. */
static size_t recut(size_t seq, size_t n, bool zigzag, size_t at)
{
    size_t index;
    const size_t place = ari_place_in_ring(&index, seq, n, zigzag, at);
    return at_in_ring(place, index, seq, n, !zigzag);
}

/* --- other positions ---------------------------------------------------------------------------------------------- */

/* Positions of a row's tokens: the reference's, and those of one fault. */
typedef struct counting {
    const ari_case *c;
    size_t places; /* of a ring whose zigzag is taken for contiguous chunks; 0: positions run on over documents */
    size_t head;   /* features of one; 0: not known */
    ari_lookup_table table;
} counting;

/* Which features of a head are its fastest pair. */
typedef struct pair {
    size_t first, apart;
} pair;

/* True if that pair of every head of a row is rotated by this many positions, and keeps its length. */
static bool is_turned(const counting *n, size_t row, double by, const pair *p)
{
    const ari_case *c = n->c;
    double length = 0.0, x = 0.0, y = 0.0;
    for (size_t at = row * c->grid.cols + p->first; at < (row + 1) * c->grid.cols; at += n->head) {
        const double r[2] = {(double)c->ref[at], (double)c->ref[at + p->apart]};
        const double v[2] = {(double)c->val[at], (double)c->val[at + p->apart]};
        x += v[0] * r[0] + v[1] * r[1];
        y += v[1] * r[0] - v[0] * r[1];
        length += hypot(v[0], v[1]) * hypot(r[0], r[1]);
    }
    const double angle = c->d->pass == 'b' ? atan2(-y, x) : atan2(y, x);
    return hypot(x, y) >= 0.999 * length && fabs(remainder(angle - by, 6.283185307179586)) <= 0.02;
}

/* True if the table's row of the wrong position is added, and that of the right one subtracted. */
static bool is_moved(const counting *n, size_t row, size_t right, size_t wrong)
{
    const ari_case *c = n->c;
    const size_t cols = c->grid.cols;
    for (size_t i = 0; i < cols; i++) {
        const double by = (double)n->table.at[wrong * cols + i] - (double)n->table.at[right * cols + i];
        const double off = (double)c->val[row * cols + i] - (double)c->ref[row * cols + i] - by;
        if (!(fabs(off) <= c->absolute + 2.0 * ARI_ROUNDINGS * c->max_ref))
            return false;
    }
    return true;
}

enum { PAIRS = 4 };

/* True if all differing rows are those of the wrong position, as rotary pairs or rows of the table. */
static bool counts_so(const counting *n)
{
    const ari_grid *g = &n->c->grid;
    const size_t seq = g->shape[1], *hits = n->c->survey.hits[2];
    size_t first = n->head, end = 0; /* features of a head that differ, where others are not turned */
    bool turned[PAIRS], may = true;
    for (size_t i = 0; n->head > 0 && i < g->cols; i++) {
        first = hits[i] > 0 && i % n->head < first ? i % n->head : first;
        end = hits[i] > 0 && i % n->head >= end ? i % n->head + 1 : end;
    }
    /* Halves or neighbours, of whole heads or of those. */
    const pair pairs[PAIRS] = {{0, n->head / 2}, {0, 1}, {first, (end - first) / 2}, {first, 1}};
    for (size_t k = 0; k < PAIRS; k++)
        turned[k] = n->head > 0 && pairs[k].apart > 0 && pairs[k].first + pairs[k].apart < n->head;
    bool table = n->table.at && n->table.cols == g->cols && n->table.rows >= seq;
    for (size_t row = 0; row < g->rows && may; row++) {
        const size_t sample = row / seq, at = row % seq, other = n->places ? recut(seq, n->places, true, at) : at;
        const size_t right = g->d->documents ? at - start_of(n->c, sample, at) : at;
        const size_t wrong = n->places && g->d->documents ? other - start_of(n->c, sample, other) : other;
        const double by = (double)wrong - (double)right;
        if (!ari_row_differs(n->c, row))
            continue;
        may = table = table && by != 0.0 && is_moved(n, row, right, wrong);
        for (size_t k = 0; k < PAIRS; k++) {
            turned[k] = turned[k] && by != 0.0 && is_turned(n, row, by, &pairs[k]);
            may = may || turned[k];
        }
    }
    return may;
}

/* Positions over documents, then those of a zigzag of so many places. */
static ar_status measure_counting(ari_trace *t, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    const size_t seq = g->shape[1], size = g->d->head_dim > 0 ? g->d->head_dim : ari_head_size(c, 2);
    counting n = {.c = c, .head = size >= 4 && g->cols % size == 0 ? size : 0};
    if (g->d->pass == 'f' && c->known->reference && c->reference)
        AR_TRY(ari_lookup_table_read(&n.table, c, ARI_POSITIONS, g->rows));
    if (g->d->documents && counts_so(&n))
        ari_trace_set(t, ARI_FOUND_DOCUMENTS, 0);
    for (n.places = 2; n.places <= ARI_MOST_RANKS && 2 * n.places <= seq && t->kind == ARI_FOUND_NOTHING; n.places++) {
        if (seq % (2 * n.places) != 0 || !counts_so(&n))
            continue;
        ARI_FINDING(t, ARI_FOUND_ZIGZAG, ARI_IF(COUNT), {"places", .count = n.places});
    }
    return AR_OK;
}

/* --- attention over the end of a document ------------------------------------------------------------------------- */

/* Scores that are seen here and not in the reference, or the other way round. */
typedef struct other_scores {
    size_t gained, lost;   /* of one document: neither side's boundaries are the other's */
    size_t across, within; /* gained with a key of another document, and of the query's own */
    /* True if wrong rows lack only the first keys that they should see; and the number of rows that begin at the same
     * key as the one before, as in a document cut in two. A window's begin would move with the query. */
    bool begins;
    size_t together;
} other_scores;

/* Returns the first key that the row sees here; the number of keys: none, or it is right. */
static size_t compare_row(other_scores *n, const ari_case *c, size_t row)
{
    const ari_grid *g = &c->grid;
    const size_t query = ari_grid_index(g, row * g->cols, 2), sample = ari_grid_index(g, row * g->cols, 0);
    const int own = document_of(c, sample, query);
    size_t first = g->cols, lost = n->lost;
    if (!ari_row_differs(c, row))
        return first;
    for (size_t key = 0, i = row * g->cols; key < g->cols; key++, i++) {
        const bool here = fabs((double)c->val[i]) > g->d->noise, there = fabs((double)c->ref[i]) > g->d->noise;
        first = here && first == g->cols ? key : first;
        n->begins = n->begins && !(here && !there) && !(there && !here && first < g->cols);
        if (!ari_off(c, i) || here == there)
            continue;
        n->lost += there;
        n->gained += here;
        n->across += here && document_of(c, sample, key) != own;
        n->within += here && document_of(c, sample, key) == own;
    }
    n->begins = n->begins && n->lost > lost && first <= query;
    return first;
}

static void measure_boundaries(ari_trace *t, const ari_case *c)
{
    other_scores n = {.begins = true};
    for (size_t row = 0, before = c->grid.cols; row < c->grid.rows; row++) {
        const size_t first = compare_row(&n, c, row);
        n.together += row % c->grid.cols > 0 && first < c->grid.cols && first == before;
        before = first;
    }
    if (n.within > 0 || (n.across < 2 && !(n.across == 0 && n.begins && n.together > 0)))
        return;
    ARI_FINDING(t, ARI_FOUND_DOCUMENTS, ARI_IF(CUT) | (n.lost > 0 ? ARI_IF(SHIFT) : 0), {"gained", .count = n.gained},
                {"lost", .count = n.lost});
}

/* --- other keys --------------------------------------------------------------------------------------------------- */

/* Keys of a ring of n places: in the forward pass of a zigzag's chunks put down as contiguous ones, or the other way
 * round; in the backward pass in each place the own chunk's, whichever chunk's should be there. */
typedef struct ring {
    size_t n;
    bool zigzag, own;
} ring;

/* The key of the reference whose score is at a key here. */
static size_t other_key(const ring *r, size_t seq, size_t query, size_t key)
{
    size_t index, unused;
    if (!r->own)
        return recut(seq, r->n, r->zigzag, key);
    (void)ari_place_in_ring(&index, seq, r->n, r->zigzag, key);
    return at_in_ring(ari_place_in_ring(&unused, seq, r->n, r->zigzag, query), index, seq, r->n, r->zigzag);
}

/* True if the values of a row are the reference's at other keys: as they are or, for a softmax with another
 * denominator, as logarithms up to one number. A zero on either side may be due to masks. */
static bool holds_keys(size_t *seen, const ari_case *c, const ring *by, size_t row)
{
    const ari_grid *g = &c->grid;
    const bool log_of = !by->own;
    const float *r = c->ref + row * g->cols, *v = c->val + row * g->cols;
    double first = log_of ? (double)NAN : 0.0;
    for (size_t key = 0; key < g->cols; key++) {
        const size_t other = other_key(by, g->cols, row % g->shape[2], key);
        if (r[other] == 0.0f || v[key] == 0.0f)
            continue;
        const double apart = log_of ? log((double)v[key]) - log((double)r[other]) : (double)v[key] - (double)r[other];
        first = isnan(first) ? apart : first;
        if (!(fabs(apart - first) <=
              (log_of ? ARI_SEEN + 4.0 * c->relative : c->absolute + 2.0 * ARI_ROUNDINGS * fabs((double)r[other]))))
            return false;
        *seen += other != key && ari_off(c, row * g->cols + key);
    }
    return true;
}

/* True if all rows with a difference hold the other keys' values, which explain most of the difference. */
static bool all_hold_keys(const ari_case *c, const ring *by)
{
    size_t seen = 0;
    for (size_t row = 0; row < c->grid.rows; row++) {
        if (ari_row_differs(c, row) && !holds_keys(&seen, c, by, row))
            return false;
    }
    return seen >= 16 && seen * 4 >= c->survey.different;
}

static void measure_keys(ari_trace *t, const ari_case *c)
{
    const size_t seq = c->grid.cols;
    for (size_t i = 0; i < 2 * (size_t)ARI_MOST_RANKS; i++) {
        const ring by = {.n = i % ARI_MOST_RANKS + 1, .zigzag = i >= ARI_MOST_RANKS, .own = c->d->pass == 'b'};
        const size_t chunks = by.own && !by.zigzag ? by.n : 2 * by.n;
        if (by.n < 2 || chunks >= seq || seq % chunks != 0 || !all_hold_keys(c, &by))
            continue;
        ARI_FINDING(t, ARI_FOUND_ZIGZAG, by.own ? ARI_IF(OF_CP) : ARI_IF(HEADS), {"places", .count = by.n});
        return;
    }
}

ar_status ari_measure_positions(ari_trace *t, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    const bool scores = g->nd == 4 && g->shape[2] == g->shape[3] && (c->is & ARI_IS_PROBS);
    if (scores && g->d->pass == 'f' && position_dim(c) > 0)
        measure_boundaries(t, c);
    if (scores && t->kind == ARI_FOUND_NOTHING)
        measure_keys(t, c);
    return g->nd == 3 && strcmp(ari_dim_name(g, 1, false), "token") == 0 ? measure_counting(t, c) : AR_OK;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Tables: rows of an embedding that were looked up, with the table in a dump, and cosines of positions. */
#include <stdio.h>

#include "verify/diagnose/hypothesis.h"
#include "verify/diagnose/replay/replay.h"

enum { MOST_ROWS = 1 << 16 };

/* --- rows of a table ---------------------------------------------------------------------------------------------- */

/* Rows of the table that were looked up: id[row] in the reference, other[row] here; table->rows: no row of the table.
 * */
typedef struct lookups {
    const ari_case *c;
    ari_lookup_table table;
    size_t *id, *other;
    bool own;          /* the table is the reference's first rows; further ones are unknown */
    ari_properties of; /* which table it is */
} lookups;

/* Which row of the table these values are; of the reference's own to rounding. */
static size_t row_of(const lookups *l, const float *row)
{
    size_t at = 0, i = 0;
    if (!l->own)
        return ari_lookup_table_row(&l->table, row);
    for (; at < l->table.rows && i < l->table.cols; at += i < l->table.cols) {
        const float *there = l->table.at + at * l->table.cols;
        for (i = 0; i < l->table.cols && fabs((double)row[i] - (double)there[i]) <= ARI_SUMS + l->c->relative;)
            i++;
    }
    return at;
}

/* Looks up the first rows. */
static ar_status look_up(lookups *l, size_t rows)
{
    const size_t cols = l->c->grid.cols;
    AR_TRY(ARI_TAKE(&l->id, l->c->arena, rows, "ids"));
    AR_TRY(ARI_TAKE(&l->other, l->c->arena, rows, "ids"));
    for (size_t row = 0; row < rows; row++) {
        l->id[row] = l->own ? row : row_of(l, l->c->ref + row * cols);
        l->other[row] = row_of(l, l->c->val + row * cols);
    }
    return AR_OK;
}

/* True if an unnamed table is one of positions: the first rows are looked up in order. */
static bool counts_on(const lookups *l)
{
    size_t row = 0;
    while (row < l->c->grid.rows && row < 4 && l->id[row] == row)
        row++;
    return row == 4;
}

/* True if the reference's positions restart within a row, while here they continue. */
static bool runs_on(const lookups *l)
{
    const ari_grid *g = &l->c->grid;
    const size_t seq = g->nd == 3 && g->shape[0] > 1 ? g->shape[1] : 0;
    bool again = false;
    for (size_t row = 0; seq > 0 && row < g->rows; row++) {
        if (l->other[row] != row % seq)
            return false;
        again = again || (row % seq > 0 && l->id[row] == 0);
    }
    return again;
}

/* Of a table that is cut into as many as ranks, where the offset is a whole one of these: no offset of ids is as large.
 * 0: it is not. */
static size_t shards_of(long rows, long by)
{
    enum { MOST_IDS = 4, MOST_SHARDS = 16 };
    const bool whole = labs(by) > MOST_IDS && rows % by == 0 && labs(rows / by) <= MOST_SHARDS;
    return whole ? (size_t)labs(rows / by) : 0;
}

/* The same offset everywhere, or positions counted again from 0 at the first that is wrong. */
static void find_offset(ari_trace *t, const lookups *l, bool positions)
{
    const ari_case *c = l->c;
    const long rows = (long)l->table.rows;
    size_t first = SIZE_MAX;
    bool offset = true, restart = true;
    long by = 0;
    for (size_t row = 0; row < (l->own ? l->table.rows : c->grid.rows); row++) {
        const long id = (long)l->id[row], other = (long)l->other[row];
        if (!ari_row_differs(c, row))
            continue;
        if (other >= rows && l->own && by > 0 && id + by >= rows)
            continue;
        if (id >= rows || other >= rows)
            return;
        by = first == SIZE_MAX ? other - id : by;
        first = first == SIZE_MAX ? (size_t)id : first;
        offset =
            offset && (other - id == by || (!positions && shards_of(rows, by) > 0 && (other - id - by) % rows == 0));
        restart = restart && first > 0 && (size_t)other == (size_t)id % first;
    }
    if (first == SIZE_MAX || (!offset && !(restart && positions)))
        return;
    ARI_FINDING(t, ARI_FOUND_POSITIONS,
                l->of | (!positions ? ARI_IF(IDS) | (shards_of(rows, by) > 0 ? ARI_IF(BLOCKS) : 0)
                         : restart && !(offset && first == 0) ? ARI_IF(SOME)
                                                              : ARI_IF(SHIFT)),
                {"first", .count = first}, {"by", .number = (double)by}, {"shards", .count = shards_of(rows, by)});
}

/* True if each of n shards adds a row of its own for ids that it does not own: the first row, or the nearest. */
static bool is_unmasked(const lookups *l, size_t n, bool nearest)
{
    const size_t size = l->table.rows / n, cols = l->table.cols;
    for (size_t at = 0; at < l->c->count; at++) {
        const size_t id = l->id[at / cols], own = id / size;
        double sum = 0.0;
        for (size_t shard = 0; shard < n; shard++) {
            const size_t row = shard == own ? id : nearest && shard < own ? (shard + 1) * size - 1 : shard * size;
            sum += (double)l->table.at[row * cols + at % cols];
        }
        if (!ari_holds(l->c, l->c->val[at], sum))
            return false;
    }
    return true;
}

static void find_mask(ari_trace *t, const lookups *l)
{
    for (size_t row = 0; row < l->c->grid.rows; row++) {
        if (l->id[row] >= l->table.rows)
            return;
    }
    for (size_t n = 2; n <= ARI_MOST_RANKS && n < l->table.rows; n++) {
        if (l->table.rows % n || !(is_unmasked(l, n, true) || is_unmasked(l, n, false)))
            continue;
        ARI_FINDING(t, ARI_FOUND_POSITIONS, ARI_IF(OF_SHARDS), {"shards", .count = n});
        return;
    }
}

/* The ids of an earlier step of the reference, whose table may be another. */
static ar_status find_step(ari_trace *t, const lookups *l)
{
    const ari_case *c = l->c;
    char weight[512];
    const int n = snprintf(weight, sizeof weight, "%.*s.weight", (int)c->own.stem, c->reference->name);
    for (int step = c->own.step - 1; step > 0 && n < (int)sizeof weight && t->kind == ARI_FOUND_NOTHING; step--) {
        const ar_dump_tensor *was = ari_tensor_of_step(c->known->reference, weight, c->own.stem, "fwd", step);
        const ar_dump_tensor *w = ari_weight_before(c->known->reference, weight, (size_t)n, step);
        ari_lookup_table table = l->table;
        float *rows = NULL;
        size_t at = 0, id = 0;
        if (!was || !w || was->count != c->count || w->count != table.rows * table.cols)
            continue;
        AR_TRY(ari_read_values(&table.at, w, c->arena));
        AR_TRY(ari_read_values(&rows, was, c->arena));
        for (; at < c->count && id < table.rows; at++) {
            id = at % table.cols == 0 ? ari_lookup_table_row(&table, rows + at) : id;
            if (id < table.rows && !ari_holds(c, c->val[at], (double)l->table.at[id * table.cols + at % table.cols]))
                break;
        }
        if (at < c->count)
            continue;
        ARI_FINDING(t, ARI_FOUND_POSITIONS, ARI_IF(OF_STEP), {"of_step", .count = (size_t)step},
                    {"step", .count = (size_t)c->own.step});
    }
    return AR_OK;
}

ar_status ari_measure_lookup(ari_trace *t, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    lookups l = {.c = c};
    if (g->nd < 2 || g->rows > MOST_ROWS ||
        (c->role != ARI_TOKENS && c->role != ARI_POSITIONS && c->role != ARI_NO_ROLE))
        return AR_OK;
    AR_TRY(ari_lookup_table_read(&l.table, c, c->role, g->rows));
    if (!l.table.at || l.table.cols != g->cols)
        return AR_OK;
    AR_TRY(look_up(&l, g->rows));
    const bool positions = c->role == ARI_POSITIONS || counts_on(&l);
    if (positions && runs_on(&l))
        ari_trace_set(t, ARI_FOUND_DOCUMENTS, 0);
    else
        find_offset(t, &l, positions);
    if (!positions && t->kind == ARI_FOUND_NOTHING)
        find_mask(t, &l);
    return !positions && t->kind == ARI_FOUND_NOTHING ? find_step(t, &l) : AR_OK;
}

/* --- cosines of positions ----------------------------------------------------------------------------------------- */

/* True if each column is s cos(p f) of rows p = 0, 1, ..: cos((p+1) f) = 2 cos(f) cos(p f) - cos((p-1) f). The scale s
 * of all columns is YaRN's of attention, or 1. */
static bool is_cosine(const ari_case *c, const float *x, size_t rows)
{
    const size_t cols = c->grid.cols;
    const double scale = (double)x[0];
    for (size_t i = 0; i < cols; i++) {
        const double one = (double)x[cols + i] / scale;
        if (!(fabs((double)x[i] - scale) <= (1e-6 + c->relative) * scale))
            return false;
        for (size_t p = 1; p + 1 < rows; p++) {
            const double next = 2.0 * one * (double)x[p * cols + i] - (double)x[(p - 1) * cols + i];
            if (!(fabs((double)x[(p + 1) * cols + i] - next) <= (ARI_SUMS + 4.0 * c->relative) * scale))
                return false;
        }
    }
    return true;
}

/* True if a scale of all is not what the tables differ by alone. */
static bool has_other_angles(const ari_case *c, double scale)
{
    size_t i = 0;
    while (i < c->count && ari_holds(c, c->val[i], scale * (double)c->ref[i]))
        i++;
    return i < c->count;
}

ar_status ari_measure_rotary(ari_trace *t, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    const size_t rows = g->nd > 1 ? g->shape[g->nd - 2] : 0;
    if (rows < 5 || g->cols < 2 || !is_cosine(c, c->ref, rows) || !isfinite(c->val[g->cols]))
        return AR_OK;
    const double scale = (double)c->val[0] / (double)c->ref[0];
    const double wanted = acos((double)c->ref[g->cols] / (double)c->ref[0]);
    const double fastest = acos((double)c->val[g->cols] / (double)c->val[0]);
    if (is_cosine(c, c->val, rows) && fastest > 1e-6 && wanted > 1e-6 && has_other_angles(c, scale)) {
        const bool stretched = !ari_is_near(fastest, wanted, ARI_KNOWN + c->relative);
        ARI_FINDING(t, ARI_FOUND_POSITIONS, ARI_IF(OF_THETA) | (stretched ? ARI_IF(FRACTION) : 0),
                    {"factor", .number = wanted / fastest});
        ari_text text = ari_list(t, "scale");
        if (!ari_is_near(scale, 1.0, ARI_KNOWN + c->relative))
            ari_say(&text, ", and all of them times %.4g (YaRN's scale of attention)", scale);
        return AR_OK;
    }
    lookups l = {.c = c, .own = true, .of = ARI_IF(PAIRS)};
    l.table = (ari_lookup_table){.at = (float *)(uintptr_t)c->ref, .rows = rows, .cols = g->cols};
    AR_TRY(look_up(&l, rows));
    find_offset(t, &l, true);
    return AR_OK;
}

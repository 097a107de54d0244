/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>

#include "ref/core/size.h"
#include "ref/io/safetensors.h"
#include "verify/dumps/verify_impl.h"

/* What two shapes have to do with each other: a transposition, a part of a dimension, padding, a reshape. A guess from
 * the shapes is held against the values, of which a sample is enough to tell. */

typedef struct shapes {
    const ar_dump_tensor *a, *b; /* reference, other */
} shapes;

/* Where element i of the other stands in the reference; SIZE_MAX: nowhere. */
typedef struct guess {
    enum { TRANSPOSED, PART, PADDED, RESHAPED } kind;
    int dim;
    size_t offset; /* of a part */
} guess;

static bool same_but(const shapes *s, int dim)
{
    for (int d = 0; d < s->a->ndim; d++) {
        if (d != dim && s->a->shape[d] != s->b->shape[d])
            return false;
    }
    return true;
}

static size_t inner_of(const ar_dump_tensor *t, int dim)
{
    size_t inner = 1;
    for (int d = dim + 1; d < t->ndim; d++)
        inner *= t->shape[d];
    return inner;
}

static size_t place_of(const shapes *s, const guess *g, size_t i)
{
    if (g->kind == RESHAPED)
        return i;
    if (g->kind == TRANSPOSED) {
        const size_t rows = s->a->shape[s->a->ndim - 2], cols = s->a->shape[s->a->ndim - 1], matrix = rows * cols;
        const size_t at = i % matrix, r = at / rows, c = at % rows;
        return i / matrix * matrix + c * cols + r;
    }
    const size_t inner = inner_of(s->b, g->dim), n = s->b->shape[g->dim], m = s->a->shape[g->dim];
    const size_t outer = i / (inner * n), at = i / inner % n + g->offset;
    return at < m ? (outer * m + at) * inner + i % inner : SIZE_MAX;
}

/* Whether the values are those of the guess, or nearly: 0 no, 1 yes. Of at most SAMPLES elements, spread evenly. */
static ar_status agrees(const shapes *s, const guess *g, bool *yes)
{
    enum { SAMPLES = 512 };
    const size_t n = s->b->count, step = n > SAMPLES ? n / SAMPLES + 1 : 1;
    size_t same = 0, seen = 0;
    for (size_t i = 0; i < n && seen - same <= SAMPLES / 16; i += step) {
        const size_t from = place_of(s, g, i);
        double x = 0.0, y = 0.0;
        if (from == SIZE_MAX)
            continue;
        AR_TRY(ar_dump_read_f64(s->a, from, 1, &x));
        AR_TRY(ar_dump_read_f64(s->b, i, 1, &y));
        const double size = x < 0 ? -x : x, apart = y < x ? x - y : y - x;
        same += apart <= 1e-3 * size;
        seen++;
    }
    *yes = seen > 0 && same >= seen - seen / 16;
    return AR_OK;
}

static ar_status guess_transposed(ar_verify_row *row, const shapes *s)
{
    const int n = s->a->ndim;
    const guess g = {.kind = TRANSPOSED};
    bool yes = false;
    for (int d = 0; d < n - 2; d++) {
        if (s->a->shape[d] != s->b->shape[d])
            return AR_OK;
    }
    if (n < 2 || s->a->shape[n - 1] != s->b->shape[n - 2] || s->a->shape[n - 2] != s->b->shape[n - 1])
        return AR_OK;
    AR_TRY(agrees(s, &g, &yes));
    snprintf(row->pattern, sizeof row->pattern, "the reference's shape with its last two dimensions exchanged; %s",
             yes ? "the values are the reference's, transposed" : "the values are not the reference's transposed ones");
    snprintf(row->hint, sizeof row->hint,
             "looks like: a weight stored [in, out] against [out, in], as GPT-2's Conv1D and a Linear are; a rule "
             "{\"match\": ..., \"transpose\": true} in a --map file transposes it");
    return AR_OK;
}

/* Which of n parts it is; n: none. */
static ar_status find_part(const shapes *s, int dim, size_t n, size_t *part)
{
    enum { MOST_PARTS = 1024 };
    for (*part = 0; *part < n && n <= MOST_PARTS; ++*part) {
        const guess g = {.kind = PART, .dim = dim, .offset = *part * s->b->shape[dim]};
        bool yes = false;
        AR_TRY(agrees(s, &g, &yes));
        if (yes)
            return AR_OK;
    }
    *part = n;
    return AR_OK;
}

static ar_status guess_part(ar_verify_row *row, const shapes *s, int dim)
{
    const size_t whole = s->a->shape[dim], has = s->b->shape[dim], n = has ? whole / has : 0;
    size_t part = 0;
    if (has == 0 || whole % has != 0 || n < 2)
        return AR_OK;
    AR_TRY(find_part(s, dim, n, &part));
    if (part < n)
        snprintf(row->pattern, sizeof row->pattern,
                 "1/%zu of the reference along dimension %d: shard %zu of %zu (from 0)", n, dim, part, n);
    else
        snprintf(row->pattern, sizeof row->pattern,
                 "1/%zu of the reference's dimension %d, but no such part has these values", n, dim);
    snprintf(row->hint, sizeof row->hint,
             "looks like: one rank's shard over %zu ranks, not gathered; give the folder with all ranks' files, or a "
             "--map file that says how they fit",
             n);
    return AR_OK;
}

static ar_status guess_padded(ar_verify_row *row, const shapes *s, int dim)
{
    const size_t whole = s->a->shape[dim], has = s->b->shape[dim];
    const guess g = {.kind = PADDED, .dim = dim};
    const size_t most = has > whole ? has : whole, least = has > whole ? whole : has;
    bool yes = false;
    if (least == 0)
        return AR_OK;
    AR_TRY(agrees(s, &g, &yes));
    const char *longer = has > whole ? "other" : "reference";
    snprintf(row->pattern, sizeof row->pattern, "dimension %d is %zu longer in the %s; the first %zu %s", dim,
             most - least, longer, least, yes ? "are the same" : "have other values");
    if (has > whole && most % 8 == 0)
        snprintf(row->hint, sizeof row->hint,
                 "looks like: a dimension padded to a multiple (a vocabulary of %zu rows as %zu); compare without the "
                 "padding",
                 least, most);
    else
        snprintf(row->hint, sizeof row->hint, "looks like: %s", yes ? "a dimension cut short" : "another model");
    return AR_OK;
}

static ar_status guess_reshaped(ar_verify_row *row, const shapes *s)
{
    const guess g = {.kind = RESHAPED};
    bool yes = false;
    AR_TRY(agrees(s, &g, &yes));
    snprintf(row->pattern, sizeof row->pattern, "as many elements in another shape; in row-major order %s",
             yes ? "they are the same" : "they are others");
    snprintf(row->hint, sizeof row->hint, "looks like: %s",
             yes ? "a reshape: dimensions folded together or apart, no value moved"
                 : "dimensions in another order, or another tensor");
    return AR_OK;
}

static ar_status guess_all(ar_verify_row *row, const shapes *s)
{
    int other_dim = -1;
    if (s->a->ndim == s->b->ndim) {
        AR_TRY(guess_transposed(row, s));
        for (int d = 0; d < s->a->ndim && other_dim < 0; d++)
            other_dim = s->a->shape[d] != s->b->shape[d] && same_but(s, d) ? d : -1;
        if (!row->pattern[0] && other_dim >= 0)
            AR_TRY(guess_part(row, s, other_dim));
        if (!row->pattern[0] && other_dim >= 0)
            AR_TRY(guess_padded(row, s, other_dim));
    }
    if (!row->pattern[0] && s->a->count == s->b->count && s->a->count > 0)
        AR_TRY(guess_reshaped(row, s));
    return AR_OK;
}

ar_status ari_verify_shape(ar_verify_row *row, const ar_dump_tensor *reference, const ar_dump_tensor *other)
{
    const shapes s = {reference, other};
    const ar_status st = guess_all(row, &s);
    if (st == AR_ERR_DTYPE)
        return AR_OK; /* values that cannot be read as numbers: the shapes speak for themselves */
    return st;
}

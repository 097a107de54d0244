/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>

#include "ref/core/size.h"
#include "ref/io/safetensors.h"
#include "verify/dump/dump_private.h"
#include "verify/dumps/verify_impl.h"

/* Relation of two shapes: a transposition, a part of a dimension, padding, a reshape. A guess from the shapes is tested
 * on a sample of the values. */

typedef struct shapes {
    const ar_dump_tensor *a, *b, *next; /* reference, other, the other of the next step */
} shapes;

/* The reference's index of element i of the other; SIZE_MAX: none. */
typedef struct guess {
    enum { TRANSPOSED, PART, PADDED, RESHAPED, COPIED, ASIDE } kind;
    int dim;
    int cut;             /* ASIDE: the reference's dimension whose parts stand one after the other along `dim` */
    size_t offset;       /* of a part */
    size_t unit, copies; /* COPIED: so many elements of the dimension, so many times one after the other */
} guess;

static bool same_but(const shapes *s, int dim)
{
    for (int d = 0; d < s->a->ndim; d++) {
        if (d != dim && s->a->shape[d] != s->b->shape[d])
            return false;
    }
    return true;
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
    if (g->kind == ASIDE) {
        size_t at[AR_ST_MAX_DIMS], index = 0;
        for (int d = s->b->ndim - 1; d >= 0; d--) {
            at[d] = i % s->b->shape[d];
            i /= s->b->shape[d];
        }
        at[g->cut] += at[g->dim] / s->a->shape[g->dim] * s->b->shape[g->cut];
        at[g->dim] %= s->a->shape[g->dim];
        for (int d = 0; d < s->a->ndim; d++)
            index = index * s->a->shape[d] + at[d];
        return index;
    }
    const size_t inner = ari_volume(s->b->shape + g->dim + 1, s->b->ndim - g->dim - 1), n = s->b->shape[g->dim],
                 m = s->a->shape[g->dim];
    const size_t outer = i / (inner * n), along = i / inner % n;
    const size_t at = g->kind == COPIED ? along / (g->unit * g->copies) * g->unit + along % g->unit : along + g->offset;
    return at < m ? (outer * m + at) * inner + i % inner : SIZE_MAX;
}

enum { SAMPLES = 512 };

/* Spread evenly over the elements. */
static size_t sample_step(size_t n)
{
    return n > SAMPLES ? n / SAMPLES + 1 : 1;
}

/* Tests a guess on at most SAMPLES elements, spread evenly: 1 if the values agree, or nearly, else 0. */
static ar_status agrees(const shapes *s, const guess *g, bool *yes)
{
    const size_t n = s->b->count, step = sample_step(n);
    size_t same = 0, seen = 0;
    for (size_t i = 0; i < n && seen - same <= SAMPLES / 16; i += step) {
        const size_t from = place_of(s, g, i);
        double x = 0.0, y = 0.0;
        if (from == SIZE_MAX)
            continue;
        AR_TRY(ari_dump_read_f64(s->a, from, 1, &x));
        AR_TRY(ari_dump_read_f64(s->b, i, 1, &y));
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
             "{\"match\": ..., \"transpose\": true} in a map transposes it");
    return AR_OK;
}

#define LACKING "; or ranks without a part of it: a module that they did not call, or to which no gradient came"

static bool of_ranks(const ar_dump_tensor *t)
{
    return t->parts > 0 && t->part[0].rank >= 0;
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
    size_t part = 0, next = n;
    if (has == 0 || whole % has != 0 || n < 2)
        return AR_OK;
    AR_TRY(find_part(s, dim, n, &part));
    if (dim == 0 && part == 0 && s->next && s->next->count == s->b->count)
        AR_TRY(find_part(&(shapes){s->a, s->next, NULL}, dim, n, &next));
    if (next == 1) {
        row->evidence = (ar_evidence){.cause = "one_micro_batch"};
        snprintf(row->pattern, sizeof row->pattern,
                 "the first of %zu parts of the reference's samples; the next step has the second", n);
        snprintf(row->hint, sizeof row->hint,
                 "each step is of one micro-batch: gradients are clipped, or a step is taken, within the loop over "
                 "micro-batches, and not once after it (`clip_grad_norm_` is where a step's gradients are complete)");
        return AR_OK;
    }
    if (part < n)
        snprintf(row->pattern, sizeof row->pattern,
                 "1/%zu of the reference along dimension %d: shard %zu of %zu (from 0)", n, dim, part, n);
    else
        snprintf(row->pattern, sizeof row->pattern,
                 "1/%zu of the reference's dimension %d, but no such part has these values", n, dim);
    snprintf(
        row->hint, sizeof row->hint,
        "looks like: one rank's shard over %zu ranks, not gathered; give the folder with all ranks' files, or say how "
        "they fit, in a map or the shard of capture's spec%s",
        n, of_ranks(s->b) ? LACKING : "");
    return AR_OK;
}

/* Fewer KV heads than tensor-parallel ranks: neighbours hold copies of a head, and what they have was put together as
 * if each had its own. The head's size is the largest that divides the dimension and has the values. */
static ar_status guess_copied(ar_verify_row *row, const shapes *s, int dim)
{
    enum { MOST_HEADS = 1024 };
    const size_t whole = s->a->shape[dim], has = s->b->shape[dim];
    guess g = {.kind = COPIED, .dim = dim};
    bool yes = false;
    if (whole == 0 || has % whole != 0)
        return AR_OK;
    g.copies = has / whole;
    for (size_t heads = 1; heads <= MOST_HEADS && heads < whole && !yes; heads++) {
        if (whole % heads != 0)
            continue;
        g.unit = whole / heads;
        AR_TRY(agrees(s, &g, &yes));
    }
    if (!yes)
        return AR_OK;
    if (dim == 0 && g.unit == whole && strchr("fb", row->pass)) {
        row->evidence = (ar_evidence){.cause = "same_samples"};
        snprintf(row->pattern, sizeof row->pattern, "the reference's samples %zu times, one after the other", g.copies);
        snprintf(
            row->hint, sizeof row->hint,
            "every data-parallel rank worked on the whole batch: each needs a part of its own (DistributedSampler, "
            "or a slice by its rank); if that is meant, \"dp\": null in the shard of capture's spec says so");
        return AR_OK;
    }
    snprintf(row->pattern, sizeof row->pattern,
             "every %zu of the reference's dimension %d stand %zu times one after the other", g.unit, dim, g.copies);
    snprintf(row->hint, sizeof row->hint,
             "looks like: %s: neighbouring ranks hold copies, which were put together as parts; a rule {\"shard\": "
             "{\"tp\": %d}, \"blocks\": [%zu], \"unit\": %zu} in a map, or \"copies\": %zu in the shard of "
             "capture's spec, says so",
             ari_role_place_of(ari_module_within(row->name).role)->is & ARI_IS_KV_HEADS
                 ? "KV heads copied, fewer than tensor-parallel ranks"
                 : "parts copied",
             dim, whole / g.unit, g.unit, g.copies);
    return AR_OK;
}

/* A vocabulary is padded where ids are counted, and nowhere else. */
static bool counts_ids(const char *name, int dim, int ndim)
{
    const unsigned is = ari_name_is(name);
    if (is & ARI_IS_LOGITS)
        return dim == ndim - 1;
    return (is & (ARI_IS_EMBEDDING | ARI_IS_HEAD)) != 0;
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
    if (has > whole && most % 8 == 0 && counts_ids(row->name, dim, s->a->ndim))
        snprintf(row->hint, sizeof row->hint,
                 "looks like: a vocabulary of %zu padded to %zu; a rule with \"shape\" in a map drops the padding",
                 least, most);
    else if (has > whole && yes)
        snprintf(row->hint, sizeof row->hint, "looks like: a dimension padded from %zu to %zu", least, most);
    else if (whole > 0 && has % whole == 0 && has > whole)
        snprintf(row->hint, sizeof row->hint,
                 "looks like: %zu times as many: each rank's whole tensor taken for its own part, such as KV heads of "
                 "which ranks hold copies; or another model",
                 has / whole);
    else
        snprintf(row->hint, sizeof row->hint, "looks like: %s%s", yes ? "a dimension cut short" : "another model",
                 has < whole && of_ranks(s->b) ? LACKING : "");
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

/* Parts along one dimension that were put together along another, as where a spec names the wrong one. */
static ar_status guess_aside(ar_verify_row *row, const shapes *s)
{
    guess g = {.kind = ASIDE, .dim = -1, .cut = -1};
    bool yes = false;
    for (int d = 0; d < s->a->ndim; d++) {
        const size_t whole = s->a->shape[d], has = s->b->shape[d];
        if (whole == has)
            continue;
        int *which = whole > has ? &g.cut : &g.dim;
        if (*which >= 0 || has == 0 || whole == 0 || (whole > has ? whole % has : has % whole) != 0)
            return AR_OK;
        *which = d;
    }
    if (g.dim < 0 || g.cut < 0 || s->a->count != s->b->count)
        return AR_OK;
    AR_TRY(agrees(s, &g, &yes));
    if (!yes)
        return AR_OK;
    snprintf(row->pattern, sizeof row->pattern,
             "the reference's %zu parts along dimension %d, side by side along dimension %d",
             s->b->shape[g.dim] / s->a->shape[g.dim], g.cut, g.dim);
    snprintf(row->hint, sizeof row->hint,
             "looks like: another dimension is divided than the files say: in the shard of capture's spec (the first "
             "glob that matches counts), or in a map, it is dimension %d of this tensor, not %d",
             g.cut, g.dim);
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
            AR_TRY(guess_copied(row, s, other_dim));
        if (!row->pattern[0] && other_dim >= 0)
            AR_TRY(guess_padded(row, s, other_dim));
        if (!row->pattern[0] && other_dim < 0)
            AR_TRY(guess_aside(row, s));
    }
    if (!row->pattern[0] && s->a->count == s->b->count && s->a->count > 0)
        AR_TRY(guess_reshaped(row, s));
    return AR_OK;
}

/* --- one for many ------------------------------------------------------------------------------------------------- */

/* Element i of the larger tensor at index 0 of the dimensions that the other has one index of. */
static size_t first_of(const ar_dump_tensor *large, const ar_dump_tensor *small, size_t i)
{
    size_t at = 0, stride = 1;
    for (int d = large->ndim - 1; d >= 0; d--) {
        at += small->shape[d] == 1 ? 0 : i % large->shape[d] * stride;
        i /= large->shape[d];
        stride *= large->shape[d];
    }
    return at;
}

ar_status ari_verify_repeats(int *which, const ar_dump_tensor *reference, const ar_dump_tensor *other)
{
    const int small = other->count < reference->count;
    const ar_dump_tensor *a = small ? other : reference, *b = small ? reference : other;
    *which = -1;
    if (a->ndim != b->ndim || a->count == b->count || a->parts == 0 || ar_dtype_bytes(a->dtype) == 0)
        return AR_OK;
    for (int d = 0; d < a->ndim; d++) {
        if (a->shape[d] != b->shape[d] && a->shape[d] != 1)
            return AR_OK;
    }
    for (size_t i = 0; i < b->count; i += sample_step(b->count)) {
        double x = 0.0, y = 0.0;
        const size_t from = first_of(b, a, i);
        ar_status st = ari_dump_read_f64(b, i, 1, &x);
        st = st == AR_OK ? ari_dump_read_f64(b, from, 1, &y) : st;
        if (st == AR_ERR_DTYPE || (st == AR_OK && x != y))
            return AR_OK;
        AR_TRY(st);
    }
    *which = small;
    return AR_OK;
}

ar_status ari_verify_shape(ar_verify_row *row, const ar_dump *of, const ar_dump_tensor *reference,
                           const ar_dump_tensor *other)
{
    const ari_order_key key = ari_order_of(other->name, NULL);
    const ar_dump_tensor *next =
        key.pass == 'f' ? ari_tensor_of_step(of, other->name, key.stem, "fwd", key.step + 1) : NULL;
    const shapes s = {reference, other, next};
    const ar_status st = guess_all(row, &s);
    if (st == AR_ERR_DTYPE)
        return AR_OK; /* values that cannot be read as numbers: the shapes speak for themselves */
    return st;
}

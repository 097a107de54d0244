/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/read/dump.h"

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/io/safetensors.h"
#include "verify/read/dump_private.h"

/* Returns the elements of a part if one of its boxes is the whole tensor in row-major order, otherwise NULL. */
static const void *whole_data(const ar_dump_tensor *t, const ar_dump_part *p)
{
    const bool is_full =
        p->boxes == 1 && !p->partial && memcmp(p->box->extent, t->shape, (size_t)t->ndim * sizeof *t->shape) == 0;
    return is_full ? ari_dump_box_data(t, p, p->box) : NULL;
}

/* --- the full shape ----------------------------------------------------------------------------------------------- */
static ar_status differ(const ar_dump *d, const ari_piece *a, const ari_piece *b)
{
    const bool assumed = !a->is_placed && !b->is_placed;
    return ar_error_set(AR_ERR_FORMAT, "InvalidPlacement: tensor '%s': %s %s by %s, %s %s by %s%s", ARI_SHOW(a->name),
                        ar_dtype_name(a->entry->dtype), ARI_SHOW_SHAPE(a->ndim, a->shape),
                        ARI_SHOW(d->file[a->file].path), ar_dtype_name(b->entry->dtype),
                        ARI_SHOW_SHAPE(b->ndim, b->shape), ARI_SHOW(d->file[b->file].path),
                        assumed ? "; parts of a tensor need a placement or a mapping that says so" : "");
}

/* Computes the shape as the largest end over all pieces, which lies within any stated shape. */
static ar_status find_shape(const ar_dump *d, ar_dump_tensor *t, const ari_piece *piece)
{
    const ari_piece *first_shaped = NULL;
    for (size_t i = 0; i < t->parts; i++) {
        const ari_piece *p = &piece[i];
        if (p->ndim != t->ndim || p->entry->dtype != t->dtype)
            return differ(d, piece, p);
        if (p->has_shape && first_shaped != NULL && memcmp(p->shape, first_shaped->shape, sizeof p->shape) != 0)
            return differ(d, first_shaped, p);
        first_shaped = p->has_shape && first_shaped == NULL ? p : first_shaped;
        for (int k = 0; k < t->ndim; k++)
            t->shape[k] = p->shape[k] > t->shape[k] ? p->shape[k] : t->shape[k];
    }
    for (size_t i = 0; first_shaped != NULL && i < t->parts; i++)
        if (memcmp(t->shape, first_shaped->shape, sizeof t->shape) != 0 && !piece[i].has_shape)
            for (int k = 0; k < t->ndim; k++)
                if (piece[i].shape[k] > first_shaped->shape[k])
                    return differ(d, first_shaped, &piece[i]);
    return AR_OK;
}

static ar_status count_elements(ar_dump_tensor *t, const char *path)
{
    uint64_t count = 0;
    if (!ari_st_count(&count, t->ndim, t->shape) || count > SIZE_MAX / 64)
        return ar_error_set(AR_ERR_FORMAT, "InvalidPlacement: %s: tensor '%s': its full shape has too many elements",
                            ARI_SHOW(path), ARI_SHOW(t->name));
    t->count = (size_t)count;
    return AR_OK;
}

/* --- whether the parts make a whole: every element in one box, or in copies and summands as told ------------------ */
/* A box and its owner. */
typedef struct holder {
    ar_dump_box *box;
    const ari_piece *piece;
} holder;

static int replica_of(const ari_piece *p)
{
    return p->replicas > 0 ? p->replica : -1;
}

/* Orders pieces by box, then copies by their recorded numbers and summands by their index, then by rank. */
static int compare_holders(const void *a, const void *b)
{
    const holder *x = a, *y = b;
    int order = memcmp(x->box->global, y->box->global, sizeof x->box->global);
    if (order == 0)
        order = memcmp(x->box->extent, y->box->extent, sizeof x->box->extent);
    if (order == 0)
        order = (replica_of(x->piece) > replica_of(y->piece)) - (replica_of(x->piece) < replica_of(y->piece));
    if (order == 0)
        order = (x->piece->term > y->piece->term) - (x->piece->term < y->piece->term);
    return order != 0 ? order : (x->piece > y->piece) - (x->piece < y->piece);
}

static bool same_box(const holder *x, const holder *y)
{
    return memcmp(x->box->global, y->box->global, sizeof x->box->global) == 0 &&
           memcmp(x->box->extent, y->box->extent, sizeof x->box->extent) == 0;
}

static const char *rank_text(char text[24], int rank)
{
    if (rank < 0)
        return "a file of no rank";
    snprintf(text, 24, "rank %d", rank);
    return text;
}

static const char *box_text(char text[ARI_REGION_TEXT], const ar_dump_tensor *t, const holder *h)
{
    return ari_region_text(text, t->ndim, h->box->global, h->box->extent);
}

static ar_status overlapping(const ar_dump *d, const ar_dump_tensor *t, const char *region, const ari_piece *a,
                             const ari_piece *b, const char *why)
{
    char first_holder[24], second[24];
    return ar_error_set(AR_ERR_FORMAT, "OverlappingShards: %s: tensor '%s': %s and %s both hold %s%s",
                        ARI_SHOW(d->path), ARI_SHOW(t->name), rank_text(first_holder, a->rank),
                        rank_text(second, b->rank), region, why);
}

/* Writes text such as "; no file of rank 2 and 5 more", if the number of ranks is known. */
static void absent_ranks(char *text, size_t cap, const ar_dump *d)
{
    size_t n = 0, missing = 0;
    int64_t expected_rank = 0; /* the last rank may be the largest int */
    text[0] = '\0';
    for (int i = 0; i <= d->ranks && d->world > 0; i++) {
        const int found = i < d->ranks ? d->rank[i] : d->world;
        for (; expected_rank < found && missing < 4; expected_rank++, missing++)
            n += (size_t)snprintf(text + n, cap - n, "%s %" PRId64, missing == 0 ? "; no file of rank" : ",",
                                  expected_rank);
        expected_rank = (int64_t)found + 1;
    }
    if (missing > 0 && d->world - d->ranks > (int)missing)
        snprintf(text + n, cap - n, " and %d more", d->world - d->ranks - (int)missing);
}

static ar_status missing_shard(const ar_dump *d, const ar_dump_tensor *t, const char *problem)
{
    char ranks[160];
    absent_ranks(ranks, sizeof ranks, d);
    return ar_error_set(AR_ERR_FORMAT, "MissingShard: %s: tensor '%s': %s%s", ARI_SHOW(d->path), ARI_SHOW(t->name),
                        problem, ranks);
}

static ar_status few_copies(const ar_dump *d, const ar_dump_tensor *t, const holder *h, size_t copy, size_t copies)
{
    char region[ARI_REGION_TEXT], problem[ARI_REGION_TEXT + 64];
    snprintf(problem, sizeof problem, "copy %zu of %zu of %s is in no file", copy, copies, box_text(region, t, h));
    return missing_shard(d, t, problem);
}

/* Refuses two boxes of the same rank, which are not copies. */
static ar_status check_ranks(const ar_dump *d, const ar_dump_tensor *t, const holder *h, size_t n)
{
    char region[ARI_REGION_TEXT];
    for (size_t i = 1; i < n; i++) {
        const ari_piece *a = h[i - 1].piece, *b = h[i].piece;
        if (a->partial != b->partial)
            return ar_error_set(
                AR_ERR_FORMAT,
                "InvalidPlacement: %s: tensor '%s': rank %d says that it is to be summed, rank %d does not",
                ARI_SHOW(d->path), ARI_SHOW(t->name), a->partial ? a->rank : b->rank, a->partial ? b->rank : a->rank);
        if ((a->rank == b->rank && a->rank >= 0) || a->file == b->file)
            return overlapping(d, t, box_text(region, t, &h[i]), a, b,
                               a->file == b->file ? ", twice in one file" : ", in two files");
    }
    return AR_OK;
}

/* Returns true if all pieces state the same number of copies, or none states a number: *copies. Pieces without a
 * statement are accepted. */
static ar_status given_copies(int *copies, const ar_dump *d, const ar_dump_tensor *t, const holder *h, size_t n)
{
    const ari_piece *last_piece = h[n - 1].piece; /* pieces that state a number are sorted last */
    *copies = replica_of(h[0].piece) < 0 ? 0 : last_piece->replicas;
    for (size_t i = 0; i < n; i++)
        if (h[i].piece->replicas != last_piece->replicas && h[i].piece->replicas > 0)
            return ar_error_set(AR_ERR_FORMAT,
                                "InvalidPlacement: %s: tensor '%s': rank %d tells of %d copies, rank %d of %d",
                                ARI_SHOW(d->path), ARI_SHOW(t->name), h[i].piece->rank, h[i].piece->replicas,
                                last_piece->rank, last_piece->replicas);
    return AR_OK;
}

/* Checks that each copy number occurs equally often: once, unless the boxes are summands or state more. */
static ar_status check_numbers(const ar_dump *d, const ar_dump_tensor *t, const holder *h, size_t n, int copies)
{
    const bool once = !h[0].piece->partial && !h[0].piece->more_copies;
    const size_t occurrences = once ? 1 : (n + (size_t)copies - 1) / (size_t)copies;
    char region[ARI_REGION_TEXT];
    for (size_t i = 0; i < n; i++) {
        const size_t number = (size_t)h[i].piece->replica;
        if (number > i / occurrences)
            return few_copies(d, t, &h[i], i / occurrences, (size_t)copies);
        if (number < i / occurrences)
            return overlapping(d, t, box_text(region, t, &h[i]), h[i - 1].piece, h[i].piece,
                               copies == 1 ? ", each as the only one" : ", as the same copy");
    }
    if (n % (size_t)copies != 0)
        return few_copies(d, t, &h[0], occurrences == 1 ? n : (size_t)h[n - 1].piece->replica, (size_t)copies);
    return AR_OK;
}

static void number_copies(const holder *h, size_t i, size_t copy, size_t copies)
{
    h[i].box->replica = (int)copy;
    h[i].box->replicas = (int)copies;
}

/* Summands: of the same number of copies each, and as many as there are ranks along the dimension. */
static ar_status number_terms(const ar_dump *d, const ar_dump_tensor *t, const holder *h, size_t n, size_t numbered)
{
    const size_t expected = h[0].piece->terms;
    char region[ARI_REGION_TEXT], problem[ARI_REGION_TEXT + 96];
    size_t terms = numbered > 0 ? n / numbered : 0;
    for (size_t i = 0; numbered == 0 && i < n; i++)
        terms += i == 0 || h[i].piece->term != h[i - 1].piece->term;
    const size_t copies = n / terms;
    bool even = n % terms == 0;
    for (size_t i = 0; numbered == 0 && even && i < n; i++)
        even = h[i].piece->term == h[i - i % copies].piece->term;
    if (!even || (expected > 0 && terms != expected)) {
        snprintf(problem, sizeof problem, "%zu ranks hold summands of %s, expected %zu in each of %zu copies", n,
                 box_text(region, t, &h[0]), expected > 0 ? expected : terms, copies);
        return missing_shard(d, t, problem);
    }
    for (size_t i = 0; i < n; i++)
        number_copies(h, i, numbered > 0 ? i / terms : i % copies, copies);
    return AR_OK;
}

static ar_status check_copies(const ar_dump *d, const ar_dump_tensor *t, const holder *h, size_t n)
{
    AR_TRY(check_ranks(d, t, h, n));
    int copies = 0;
    AR_TRY(given_copies(&copies, d, t, h, n));
    if (copies > 0)
        AR_TRY(check_numbers(d, t, h, n, copies));
    if (h[0].piece->partial)
        return number_terms(d, t, h, n, (size_t)copies);
    for (size_t i = 0; i < n; i++)
        number_copies(h, i, i, n);
    return AR_OK;
}

static ar_status check_cover(const ar_dump *d, const ar_dump_tensor *t, const ari_piece *piece, ari_cover_box *box,
                             size_t n)
{
    ari_cover result = {.fault = ARI_COVERED};
    char region[ARI_REGION_TEXT], problem[ARI_REGION_TEXT + 64];
    ari_cover_check(&result, t->ndim, t->shape, box, n);
    ari_region_text(region, t->ndim, result.start, result.extent);
    switch (result.fault) {
    case ARI_COVER_GAP:
        snprintf(problem, sizeof problem, "no rank holds %s%s", result.is_full ? "" : "some elements of ", region);
        return missing_shard(d, t, problem);
    case ARI_COVER_OVERLAP:
        return overlapping(d, t, region, &piece[result.owner[0]], &piece[result.owner[1]],
                           ", in boxes that are not the same");
    case ARI_COVER_IRREGULAR:
        return ar_error_set(AR_ERR_UNSUPPORTED, "%s: tensor '%s': %zu boxes lie too irregularly to be checked",
                            ARI_SHOW(d->path), ARI_SHOW(t->name), n);
    case ARI_COVERED:
    default:
        return AR_OK;
    }
}

static ar_status check_holders(const ar_dump *d, ari_arena *a, const ar_dump_tensor *t, const ari_piece *piece,
                               holder *h, size_t n)
{
    ari_cover_box *box = NULL;
    size_t boxes = 0;
    AR_TRY(ARI_TAKE(&box, a, n, "boxes of a dump"));
    ARI_SORT(h, n, compare_holders);
    for (size_t i = 0, group_size = 0; i < n; i += group_size) {
        for (group_size = 1; i + group_size < n && same_box(&h[i], &h[i + group_size]);)
            group_size++;
        box[boxes++] = (ari_cover_box){h[i].box, (size_t)(h[i].piece - piece)};
        AR_TRY(check_copies(d, t, &h[i], group_size));
    }
    return check_cover(d, t, piece, box, boxes);
}

static ar_status check_parts(const ar_dump *d, const ar_dump_tensor *t, const ari_piece *piece)
{
    ARI_ENDED(ari_arena_free) ari_arena scratch = {NULL};
    holder *h = NULL;
    size_t max_boxes = 0, n = 0;
    for (size_t i = 0; i < t->parts; i++)
        max_boxes += piece[i].boxes;
    AR_TRY(ARI_TAKE(&h, &scratch, max_boxes, "boxes of a dump"));
    for (size_t i = 0; i < t->parts; i++)
        for (size_t k = 0; k < piece[i].boxes; k++) {
            piece[i].box[k].replicas = 1;
            if (ari_dump_box_count(t->ndim, &piece[i].box[k]) > 0)
                h[n++] = (holder){&piece[i].box[k], &piece[i]};
        }
    return t->count == 0 ? AR_OK : check_holders(d, &scratch, t, piece, h, n);
}

/* --- tensors ------------------------------------------------------------------------------------------------------ */
static ar_dump_part part_of(const ar_dump *d, const ari_piece *p)
{
    ar_dump_part o = {.rank = p->rank,
                      .file = d->file[p->file].path,
                      .entry = p->entry,
                      .boxes = p->boxes,
                      .box = p->box,
                      .replica = p->boxes > 0 ? p->box[0].replica : 0,
                      .replicas = 1,
                      .partial = p->partial};
    for (size_t k = 0; k < p->boxes; k++) {
        o.replica = p->box[k].replica < o.replica ? p->box[k].replica : o.replica;
        o.replicas = p->box[k].replicas > o.replicas ? p->box[k].replicas : o.replicas;
    }
    return o;
}

ar_status ari_parts_shape(ar_dump_tensor *t, const ar_dump *d, const ari_piece *piece, size_t n)
{
    *t = (ar_dump_tensor){
        .name = piece->name, .dtype = piece->entry->dtype, .ndim = piece->ndim, .order = SIZE_MAX, .parts = n};
    AR_TRY(find_shape(d, t, piece));
    return count_elements(t, d->path);
}

/* True if box b continues a in the full tensor and in the file. */
static bool continues(const ar_dump_box *a, const ar_dump_box *b, int ndim, int along)
{
    if (b->offset != a->offset + a->extent[along] * a->stride[along])
        return false;
    for (int k = 0; k < ndim; k++) {
        const size_t start = a->global[k] + (k == along ? a->extent[k] : 0);
        if (b->global[k] != start || b->stride[k] != a->stride[k] || (k != along && b->extent[k] != a->extent[k]))
            return false;
    }
    return true;
}

/* Merges the boxes of a single rank's packed blocks into one box if together they are the full tensor. */
static void join_boxes_of(ari_piece *p, const ar_dump_tensor *t)
{
    if (p->boxes < 2 || p->entry->count != t->count || t->count == 0)
        return;
    ar_dump_box joined = p->box[0];
    for (size_t i = 1; i < p->boxes; i++) {
        int k = 0;
        while (k < t->ndim && !continues(&joined, &p->box[i], t->ndim, k))
            k++;
        if (k == t->ndim)
            return;
        joined.extent[k] += p->box[i].extent[k];
    }
    if (memcmp(joined.extent, t->shape, (size_t)t->ndim * sizeof *t->shape) != 0)
        return;
    p->box[0] = joined;
    p->boxes = 1;
}

/* If every rank has the whole tensor, merges blocks that are ordered as in the full tensor into one box. Otherwise a
 * block may be another rank's copy, and the boxes stay separate. */
static void join_boxes(const ar_dump_tensor *t, ari_piece *piece, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (piece[i].entry->count != t->count)
            return;
    for (size_t i = 0; i < n; i++)
        join_boxes_of(&piece[i], t);
}

size_t ari_piece_group(const ari_piece *p, size_t n)
{
    size_t group_size = 1;
    while (group_size < n && strcmp(p[0].name, p[group_size].name) == 0)
        group_size++;
    return group_size;
}

/* Finds a piece that cannot be part of the tensor: its file says so, or it is a value or gradient whose other extents
 * differ from the first piece's while files describe only one dimension. Returns NULL if all pieces form a tensor. */
static const ari_piece *find_ragged(const ari_piece *p, size_t n)
{
    const ari_piece *ragged_piece = NULL;
    bool differs[AR_ST_MAX_DIMS] = {false};
    int dimensions = 0;
    for (size_t i = 0; i < n; i++) {
        if (p[i].left_out)
            return &p[i];
    }
    for (size_t i = 0; i < n; i++) {
        if (!p[i].has_shape || !p[i].is_placed || p[i].ndim != p->ndim || p[i].entry->dtype != p->entry->dtype)
            return NULL;
        for (int k = 0; k < p->ndim; k++) {
            differs[k] = differs[k] || p[i].shape[k] != p->shape[k];
            ragged_piece = p[i].shape[k] != p->shape[k] ? &p[i] : ragged_piece;
        }
    }
    for (int k = 0; k < p->ndim; k++)
        dimensions += differs[k];
    return dimensions == 1 && (strstr(p->name, ":fwd") || strstr(p->name, ":bwd")) ? ragged_piece : NULL;
}

bool ari_dump_is_ragged(const ar_dump *d, const char *name, char text[160])
{
    const ari_ragged key = {.name = name};
    const ari_ragged *found = d->raggeds ? bsearch(&key, d->ragged, d->raggeds, sizeof key, ari_by_name) : NULL;
    if (!found)
        return false;
    const ari_piece *p = found->piece, *first_piece = p;
    if (p->left_out) {
        ari_printable(text, 160, p->left_out);
        return true;
    }
    while (first_piece > d->piece && strcmp(first_piece[-1].name, name) == 0)
        first_piece--;
    snprintf(text, 160, "%s on rank %d, %s on rank %d: each pads to its own longest sample",
             ARI_SHOW_SHAPE(first_piece->ndim, first_piece->shape), first_piece->rank,
             ARI_SHOW_SHAPE(p->ndim, p->shape), p->rank);
    return true;
}

static ar_status make_tensor(const ar_dump *d, ar_dump_tensor *t, ar_dump_part *part, ari_piece *piece, size_t n)
{
    AR_TRY(ari_parts_shape(t, d, piece, n));
    t->part = part;
    t->sample_rows = piece->sample_rows;
    join_boxes(t, piece, n);
    AR_TRY(check_parts(d, t, piece));
    for (size_t i = 0; i < n; i++) {
        part[i] = part_of(d, &piece[i]);
        if (part[i].replica == 0 && t->whole == NULL)
            t->whole = whole_data(t, &part[i]);
    }
    return AR_OK;
}

ar_status ari_dump_make_tensors(ar_dump *d)
{
    size_t tensors = 0;
    for (size_t i = 0; i < d->pieces; i++)
        tensors += i == 0 || strcmp(d->piece[i].name, d->piece[i - 1].name) != 0;
    AR_TRY(ARI_TAKE(&d->tensor, &d->arena, tensors, "tensors of a dump"));
    AR_TRY(ARI_TAKE(&d->ragged, &d->arena, tensors, "tensors of a dump"));
    AR_TRY(ARI_TAKE(&d->part, &d->arena, d->pieces, "parts of a dump"));
    for (size_t i = 0, n = 0; i < d->pieces; i += n) {
        n = ari_piece_group(&d->piece[i], d->pieces - i);
        d->ragged[d->raggeds] = (ari_ragged){d->piece[i].name, find_ragged(&d->piece[i], n)};
        if (d->ragged[d->raggeds].piece) {
            d->raggeds++;
            continue;
        }
        AR_TRY(make_tensor(d, &d->tensor[d->tensors], &d->part[i], &d->piece[i], n));
        d->tensors++;
    }
    return AR_OK;
}

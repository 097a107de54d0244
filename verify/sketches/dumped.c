/* SPDX-License-Identifier: Apache-2.0 */
/* Sketches of a dump's tensors. */
#include <string.h>

#include "ref/core/size.h"
#include "verify/sketches/sketches.h"

/* Passes ownership of a sketch to the report. */
static ar_status sketch_keep(ar_sketch *out, ari_sketch_report *r, ar_sketch *s)
{
    AR_TRY(ARI_GROW_IN(&r->arena, &r->sketches, &r->made_room, r->made_count, "sketches of a dump"));
    r->sketches[r->made_count++] = *out = *s;
    *s = (ar_sketch){0};
    return AR_OK;
}

/* Adds the boxes of a part that are first copies, or with `copies` the boxes that are further copies. */
static ar_status part_add(ar_sketch *s, const ar_dump_part *p, bool copies)
{
    for (size_t b = 0; b < p->boxes; b++) {
        if ((p->box[b].replica > 0) == copies)
            AR_TRY(ar_sketch_add(s, p->entry->data, &p->box[b]));
    }
    return AR_OK;
}

static bool has_equal_boxes(const ar_dump_part *a, const ar_dump_part *b)
{
    bool equal = a->boxes == b->boxes;
    for (size_t i = 0; i < a->boxes && equal; i++)
        equal = memcmp(a->box[i].global, b->box[i].global, sizeof a->box[i].global) == 0 &&
                memcmp(a->box[i].extent, b->box[i].extent, sizeof a->box[i].extent) == 0;
    return equal;
}

/* Computes the sketch of one part. */
static ar_status part_sketch(ar_sketch *s, const ar_dump_tensor *t, const ar_dump_part *p, bool copy)
{
    AR_TRY(ar_sketch_init(s, t->dtype, t->ndim, t->shape));
    return part_add(s, p, copy);
}

/* Finds copies of parts whose digest differs from the first copy's. If ranks hold summands, copies cannot be told apart
 * from summands. */
static ar_status find_copies(ari_sketched *out, ari_sketch_report *r, const ar_dump_tensor *t)
{
    ar_sketch_copies *list = NULL;
    size_t capacity = 0;
    for (size_t i = 1; i < t->parts; i++) {
        size_t first_part = 0;
        while (first_part < i && !has_equal_boxes(&t->part[first_part], &t->part[i]))
            first_part++;
        if (first_part == i || t->part[i].partial || t->part[i].replica == 0 || t->part[first_part].replica > 0)
            continue;
        ARI_ENDED(ar_sketch_fini) ar_sketch a = {0};
        ARI_ENDED(ar_sketch_fini) ar_sketch b = {0};
        AR_TRY(part_sketch(&a, t, &t->part[first_part], false));
        AR_TRY(part_sketch(&b, t, &t->part[i], true));
        if (a.digest == b.digest)
            continue;
        AR_TRY(ARI_GROW_IN(&r->arena, &list, &capacity, out->differing_parts, "copies that differ"));
        ar_sketch_copies *copies = &list[out->differing_parts++];
        *copies = (ar_sketch_copies){.first_rank = t->part[first_part].rank, .rank = t->part[i].rank};
        AR_TRY(sketch_keep(&copies->original, r, &a));
        AR_TRY(sketch_keep(&copies->copy, r, &b));
        out->differing = out->differing < 0 ? copies->rank : out->differing;
    }
    out->copies = list;
    return AR_OK;
}

static ar_status add_parts(ar_sketch *s, const ar_dump_tensor *t)
{
    for (size_t i = 0; i < t->parts; i++) {
        const ar_dump_part *p = &t->part[i];
        ARI_ENDED(ar_sketch_fini) ar_sketch summand = {0};
        if (!p->partial) {
            AR_TRY(part_add(s, p, false));
            continue;
        }
        AR_TRY(ar_sketch_init(&summand, t->dtype, t->ndim, t->shape));
        AR_TRY(part_add(&summand, p, false));
        AR_TRY(ar_sketch_merge(s, &summand, i > 0));
    }
    return AR_OK;
}

ar_status ari_dump_sketch(ari_sketched *out, ari_sketch_report *r, const ar_dump_tensor *t)
{
    ARI_ENDED(ar_sketch_fini) ar_sketch s = {0};
    const ar_status st = ar_sketch_init(&s, t->dtype, t->ndim, t->shape);
    if (st == AR_ERR_DTYPE) {
        out->unjudged = "its dtype has no sketch";
        return AR_OK;
    }
    AR_TRY(st);
    AR_TRY(add_parts(&s, t));
    ar_sketch *stored_sketch = NULL;
    AR_TRY(ARI_TAKE(&stored_sketch, &r->arena, 1, "a dump's sketch"));
    AR_TRY(sketch_keep(stored_sketch, r, &s));
    out->sketch = stored_sketch;
    return find_copies(out, r, t);
}

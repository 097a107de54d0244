/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/dump_listener.h"

#include <search.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/context/context.h"
#include "ref/core/axis.h"
#include "ref/core/size.h"
#include "verify/writer/dump_listener_private.h"
#include "verify/writer/dump_ranks.h"

/* This rank's part of one tensor. */
typedef struct tensor_part {
    char name[ARI_REFERENCE_NAME]; /* the key; must be the first field */
    ar_tensor local;               /* contiguous, owned */
    ar_layout layout;
} tensor_part;

struct ar_dump_listener {
    ar_dump_listener_options options;
    char passes[16];
    tensor_part **list; /* sorted by first report */
    size_t count, capacity;
    void *by_name; /* tsearch's */
};

ar_status ar_dump_listener_create(ar_dump_listener **out, const ar_dump_listener_options *options)
{
    ar_dump_listener *l = NULL;
    if (options && options->passes && strlen(options->passes) >= sizeof l->passes)
        return ar_error_set(AR_ERR_ARG, "passes '%.32s': letters of a tap's passes, once each", options->passes);
    AR_TRY(ARI_ALLOC_ZERO(&l, 1, "a listener"));
    if (options)
        l->options = *options;
    snprintf(l->passes, sizeof l->passes, "%s", l->options.passes ? l->options.passes : "");
    *out = l;
    return AR_OK;
}

void ari_dump_listener_clear(ar_dump_listener *l)
{
    for (size_t i = 0; i < l->count; i++) {
        tdelete(l->list[i], &l->by_name, ari_by_text);
        free(l->list[i]->local.data.ptr);
        free(l->list[i]);
    }
    l->count = 0;
}

void ar_dump_listener_destroy(ar_dump_listener *l)
{
    if (!l)
        return;
    ari_dump_listener_clear(l);
    free(l->list);
    free(l);
}

/* --- copying ------------------------------------------------------------------------------------------------------ */

/* Reduces the tensor to the smallest part that contains all boxes, and moves the boxes accordingly. The rest of a
 * gradient's share is zero. Returns false if no box is left. */
static bool crop(ar_tensor *part, ar_layout *layout, const ar_tap_event *e)
{
    *part = *e->local;
    *layout = *e->layout;
    if (layout->nbox == 0 || ar_tensor_count(part) == 0)
        return false;
    for (int d = 0; d < part->ndim; d++) {
        size_t begin = SIZE_MAX, end = 0;
        for (size_t k = 0; k < layout->nbox; k++) {
            const ar_box *b = &layout->box[k];
            begin = b->local[d] < begin ? b->local[d] : begin;
            end = b->local[d] + b->extent[d] > end ? b->local[d] + b->extent[d] : end;
        }
        *part = ar_tensor_slice(part, d, begin, end - begin);
        for (size_t k = 0; k < layout->nbox; k++)
            layout->box[k].local[d] -= begin;
    }
    return ar_tensor_count(part) > 0;
}

static void copy_run(void *user, const ari_box_run *r)
{
    float *dst = (float *)user + r->local_index;
    if (r->stride == 1) {
        memcpy(dst, r->local, r->count * sizeof *dst);
        return;
    }
    for (size_t i = 0; i < r->count; i++)
        dst[i] = r->local[(ptrdiff_t)i * r->stride];
}

/* --- reports of one tensor that become one part ------------------------------------------------------------------- */

bool ari_same_tensor(const ar_layout *a, const ar_layout *b)
{
    return a->ndim >= 1 && a->ndim == b->ndim && a->replica == b->replica && a->replicas == b->replicas &&
           memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape) == 0;
}

ari_side ari_side_of(const ar_layout *have, size_t had_rows, const ar_layout *addend, size_t rows)
{
    bool after = have->nbox == addend->nbox, before = after;
    for (size_t i = 0; i < addend->nbox && (after || before); i++) {
        const ar_box *a = &have->box[i], *b = &addend->box[i];
        bool is_aligned = a->local[0] == 0 && b->local[0] == 0 && a->extent[0] == had_rows && b->extent[0] == rows;
        for (int d = 1; d < addend->ndim; d++)
            is_aligned = is_aligned && a->global[d] == b->global[d] && a->local[d] == b->local[d] &&
                         a->extent[d] == b->extent[d];
        after = after && is_aligned && a->global[0] + a->extent[0] == b->global[0];
        before = before && is_aligned && b->global[0] + b->extent[0] == a->global[0];
    }
    return after ? ARI_AFTER : before ? ARI_BEFORE : ARI_SEPARATE;
}

void ari_join_rows(ar_layout *have, const ar_layout *addend, ari_side side)
{
    for (size_t i = 0; i < addend->nbox; i++) {
        have->box[i].extent[0] += addend->box[i].extent[0];
        if (side == ARI_BEFORE)
            have->box[i].global[0] = addend->box[i].global[0];
    }
}

/* Returns true if both are parts of one tensor that can be concatenated along dimension 0. */
static bool stackable(const tensor_part *k, const ar_tensor *t, const ar_layout *o)
{
    return ari_same_tensor(&k->layout, o) && k->local.ndim == t->ndim &&
           memcmp(k->local.shape + 1, t->shape + 1, (size_t)(t->ndim - 1) * sizeof *t->shape) == 0;
}

static ar_status join_boxes(tensor_part *k, const ar_layout *o, ari_side side)
{
    ar_layout *have = &k->layout;
    if (side != ARI_SEPARATE) {
        ari_join_rows(have, o, side);
        return AR_OK;
    }
    if (have->nbox + o->nbox > AR_MAX_BOXES)
        return ar_error_set(AR_ERR_UNSUPPORTED, "%s: a rank reports it in more than %d pieces", k->name, AR_MAX_BOXES);
    for (size_t i = 0; i < o->nbox; i++) {
        have->box[have->nbox] = o->box[i];
        have->box[have->nbox++].local[0] += k->local.shape[0];
    }
    return AR_OK;
}

static ar_status stack(tensor_part *k, const ar_tensor *t, const ar_layout *o)
{
    if (!stackable(k, t, o))
        return ar_error_set(AR_ERR_UNSUPPORTED, "%s: a rank reports it in pieces that do not fit together", k->name);
    const ari_side side = ari_side_of(&k->layout, k->local.shape[0], o, t->shape[0]);
    const size_t had = ar_tensor_count(&k->local), added_count = ar_tensor_count(t);
    ARI_OWNED float *joined = NULL;
    AR_TRY(ARI_ALLOC_ZERO(&joined, had + added_count, k->name));
    AR_TRY(join_boxes(k, o, side));
    memcpy(joined + (side == ARI_BEFORE ? added_count : 0), k->local.data.ptr, had * sizeof *joined);
    ari_for_each_run(t, o, copy_run, joined + (side == ARI_BEFORE ? 0 : had));
    free(k->local.data.ptr);
    ARI_GIVE(&k->local.data.ptr, joined);
    k->local.shape[0] += t->shape[0];
    return AR_OK;
}

/* --- the tap ------------------------------------------------------------------------------------------------------ */

static ar_status keep_first(ar_dump_listener *l, const tensor_part *named, const ar_tensor *t, const ar_layout *o)
{
    ARI_OWNED tensor_part *k = NULL;
    ARI_OWNED float *values = NULL;
    AR_TRY(ARI_GROW(&l->list, &l->capacity, l->count, "a rank's tensors"));
    AR_TRY(ARI_ALLOC_ZERO(&k, 1, named->name));
    *k = *named;
    k->layout = *o;
    AR_TRY(ARI_ALLOC_ZERO(&values, ar_tensor_count(t), k->name));
    AR_TRY(ar_tensor_view(&k->local, AR_F32, t->ndim, t->shape, (ar_buf){values}));
    if (!tsearch(k, &l->by_name, ari_by_text))
        return ar_error_set(AR_ERR_MEMORY, "no memory for the name %s", k->name);
    ari_for_each_run(t, o, copy_run, values);
    values = NULL;
    ARI_GIVE(&l->list[l->count++], k);
    return AR_OK;
}

static ar_status name_of(tensor_part *k, const ar_tap_event *e)
{
    if (ari_dump_name(k->name, e->name, e->pass, e->step))
        return AR_OK;
    return ar_error_set(AR_ERR_ARG, "the name '%.80s...' is longer than %zu bytes", e->name, sizeof k->name - 8);
}

static bool wants_event(const ar_dump_listener *l, const ar_tap_event *e)
{
    if (l->options.first_copies && e->layout->replica != 0)
        return false;
    if (l->options.passes && !strchr(l->passes, e->pass))
        return false;
    return !l->options.wants || l->options.wants(l->options.wants_user, e);
}

ar_status ar_dump_listener_tap(void *user, const ar_tap_event *e)
{
    ar_dump_listener *l = user;
    tensor_part key;
    ar_tensor part;
    ar_layout layout;
    if (!wants_event(l, e))
        return AR_OK;
    AR_TRY(name_of(&key, e));
    if (e->local->dtype != AR_F32)
        return ar_error_set(AR_ERR_DTYPE, "%s: a rank reports it as %s, expected F32", key.name,
                            ar_dtype_name(e->local->dtype));
    if (!crop(&part, &layout, e))
        return AR_OK;
    tensor_part *const *found = tfind(&key, &l->by_name, ari_by_text);
    return found ? stack(*found, &part, &layout) : keep_first(l, &key, &part, &layout);
}

/* --- what was kept ------------------------------------------------------------------------------------------------ */

size_t ari_dump_listener_count(const ar_dump_listener *l)
{
    return l->count;
}

bool ari_dump_listener_at(const ar_dump_listener *l, size_t i, ar_dump_value *value)
{
    if (i >= l->count)
        return false;
    const tensor_part *k = l->list[i];
    *value = (ar_dump_value){.name = k->name, .dtype = AR_F32, .local = &k->local, .layout = &k->layout};
    return true;
}

ar_status ar_dump_listener_write(const ar_dump_listener *l, const char *folder, const ar_dump_place *place,
                                 const char *const *metadata, size_t n_meta)
{
    ar_dump_value *values = NULL;
    ar_tensor *integer_tensors = NULL; /* integer tensors among them */
    ARI_ENDED(ari_arena_free) ari_arena arena = {NULL};
    AR_TRY(ARI_TAKE(&values, &arena, l->count, "a list of a rank's tensors"));
    AR_TRY(ARI_TAKE(&integer_tensors, &arena, l->count, "a list of a rank's tensors"));
    for (size_t i = 0; i < l->count; i++) {
        const ar_tensor *t = &l->list[i]->local;
        int32_t *numbers = NULL;
        ari_dump_listener_at(l, i, &values[i]);
        if (!ari_is_of_integers(values[i].name))
            continue;
        AR_TRY(ari_integers_of(&numbers, &arena, t->data.ptr, ar_tensor_count(t)));
        AR_TRY(ar_tensor_view(&integer_tensors[i], AR_I32, t->ndim, t->shape, (ar_buf){numbers}));
        values[i].dtype = AR_I32;
        values[i].local = &integer_tensors[i];
    }
    return ar_dump_write(folder, place, values, l->count, metadata, n_meta);
}

ar_dump_place ar_dump_place_of(const ar_parallel *p, int rank)
{
    ar_dump_place place = {.rank = rank, .world = ar_parallel_world(p)};
    ari_layout_mesh(&place.mesh, place.coords, p, rank, ARI_CUTS_SAMPLES | ARI_CUTS_FEATURES);
    return place;
}

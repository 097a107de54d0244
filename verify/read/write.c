/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/read/dump.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ref/core/atomic_file.h"
#include "ref/core/tensor_private.h"
#include "ref/io/file.h"
#include "ref/io/json.h"
#include "ref/io/safetensors.h"
#include "ref/placement/placement_private.h"

/* --- a rank's files ----------------------------------------------------------------------------------------------- */
/* True if b continues a along one dimension in both tensors. */
static bool continues(const ar_box *a, const ar_box *b, int ndim, int along)
{
    for (int d = 0; d < ndim; d++) {
        const size_t step = d == along ? a->extent[d] : 0;
        if (b->global[d] != a->global[d] + step || b->local[d] != a->local[d] + step ||
            (d != along && b->extent[d] != a->extent[d]))
            return false;
    }
    return true;
}

void ari_boxes_of(ari_boxes *o, const ar_layout *layout)
{
    o->n = 0;
    for (size_t i = 0; i < layout->nbox; i++) {
        const ar_box *b = &layout->box[i];
        bool empty = false;
        int along = 0;
        for (int d = 0; d < layout->ndim; d++)
            empty |= b->extent[d] == 0;
        if (empty)
            continue;
        ar_box *last_box = o->n > 0 ? &o->box[o->n - 1] : NULL;
        while (last_box != NULL && along < layout->ndim && !continues(last_box, b, layout->ndim, along))
            along++;
        if (last_box != NULL && along < layout->ndim)
            last_box->extent[along] += b->extent[along];
        else
            o->box[o->n++] = *b;
    }
}

void ari_rank_file_name(char name[ARI_RANK_FILE], int rank, size_t k)
{
    char number[24] = "";
    if (k > 0)
        snprintf(number, sizeof number, "-%zu", k + 1);
    snprintf(name, ARI_RANK_FILE, "rank-%05d%s.safetensors", rank, number);
}

void ari_rank_metadata(const char *pair[2 * ARI_RANK_METADATA], char *const text[2])
{
    pair[0] = "DCP_VERSION";
    pair[1] = "1.0";
    pair[2] = ARI_DUMP_DCP;
    pair[3] = text[0];
    pair[4] = ARI_DUMP_PLACEMENT;
    pair[5] = text[1];
}

/* --- what a file says of itself ----------------------------------------------------------------------------------- */
/* Returns the placement of a rank's tensors for the rank's file, as ari_placement_parse reads it. If memory is short,
 * jansson returns NULL and refuses to insert a NULL, so the error is reported once, at the end. */

static json_t *whole_or_none(json_t *o, int failed)
{
    if (failed == 0)
        return o;
    json_decref(o);
    return NULL;
}

/* PyTorch wants an offset for each. */
static json_t *saved_offsets(const ari_placed *t)
{
    return json_pack("{s:o}", "saved_offsets", ari_json_sizes(t->offset, (size_t)t->ndim));
}

/* Adds the mesh dimensions over which the tensor is a partial sum. */
static json_t *partial_over(const ari_placement *p, const ari_placed *t)
{
    json_t *list = json_array();
    size_t n = 0;
    for (int i = 0; i < p->mesh.ndim; i++)
        if ((t->partial_over >> i & 1u) != 0) {
            json_array_append_new(list, json_string(p->mesh.dim[i].name));
            n++;
        }
    return whole_or_none(list, n != json_array_size(list));
}

static json_t *own_tensor(const ari_placement *p, const ari_placed *t)
{
    json_t *o = json_object();
    int failed = json_object_set_new(o, "shape", ari_json_sizes(t->shape, (size_t)t->ndim));
    if (t->replicas > 1) {
        failed |= json_object_set_new(o, "replica", json_integer(t->replica));
        failed |= json_object_set_new(o, "replicas", json_integer(t->replicas));
    }
    if (t->partial)
        failed |= json_object_set_new(o, "partial", partial_over(p, t));
    return whole_or_none(o, failed);
}

json_t *ari_mesh_json(const ar_mesh *m)
{
    json_t *list = json_array();
    for (int i = 0; i < m->ndim; i++)
        json_array_append_new(list, json_pack("[s, i]", m->dim[i].name, m->dim[i].size));
    return list;
}

static json_t *coordinates(const ari_placement *p)
{
    json_t *list = json_array();
    for (int i = 0; i < p->mesh.ndim; i++)
        json_array_append_new(list, json_integer(p->coords[i]));
    return list;
}

static json_t *whole_text(const ari_placement *p)
{
    json_t *o = json_pack("{s:i}", "version", 1), *tensors = json_object(), *order = json_array();
    int failed = 0;
    if (p->rank >= 0) {
        failed |= json_object_set_new(o, "rank", json_integer(p->rank));
        failed |= json_object_set_new(o, "world", json_integer(p->world));
    }
    if (p->mesh.ndim > 0) {
        failed |= json_object_set_new(o, "mesh", ari_mesh_json(&p->mesh));
        failed |= json_object_set_new(o, "at", coordinates(p));
    }
    for (size_t i = 0; i < p->tensors; i++)
        failed |= json_object_set_new(tensors, p->tensor[i].name, own_tensor(p, &p->tensor[i]));
    if (p->rank >= 0)
        failed |= json_object_set(o, "tensors", tensors);
    json_decref(tensors);
    for (size_t i = 0; i < p->ordered; i++)
        failed |= json_array_append_new(order, json_string(p->order[i]));
    if (p->ordered > 0)
        failed |= json_object_set_new(o, "order", order);
    else
        json_decref(order);
    return whole_or_none(o, failed);
}

static json_t *dcp_text(const ari_placement *p)
{
    json_t *o = json_object();
    int failed = 0;
    for (size_t i = 0; i < p->tensors; i++)
        failed |= json_object_set_new(o, p->tensor[i].name, saved_offsets(&p->tensor[i]));
    return whole_or_none(o, failed);
}

static ar_status print_json(char **out, json_t *value)
{
    *out = value ? json_dumps(value, JSON_COMPACT) : NULL;
    json_decref(value);
    return *out ? AR_OK : ar_error_set(AR_ERR_MEMORY, "no memory for a rank's placement");
}

ar_status ari_placement_text(char **dcp, char **placement_text, const ari_placement *p)
{
    *placement_text = NULL;
    if (dcp)
        AR_TRY(print_json(dcp, dcp_text(p)));
    return print_json(placement_text, whole_text(p));
}

/* --- writing ------------------------------------------------------------------------------------------------------ */
/* The contents of one file. */
typedef struct contents {
    ar_st_tensor *tensor;
    ari_placed *placed;
    size_t n;
    ari_arena *arena; /* memory for these and for copies of tensors that are not row-major */
} contents;

static ar_status check_value(const ar_dump_value *v)
{
    const ar_layout *o = v->layout;
    const char *name = v->name == NULL ? "(none)" : v->name;
    bool fits = o->ndim == v->local->ndim && o->ndim >= 0 && o->ndim <= AR_MAX_DIMS && o->nbox <= AR_MAX_BOXES &&
                v->dtype == v->local->dtype && ar_dtype_bytes(v->dtype) > 0;
    for (size_t i = 0; fits && i < o->nbox; i++)
        for (int d = 0; d < o->ndim; d++) {
            const ar_box *b = &o->box[i];
            fits &= b->local[d] <= v->local->shape[d] && b->extent[d] <= v->local->shape[d] - b->local[d];
            fits &= b->global[d] <= o->shape[d] && b->extent[d] <= o->shape[d] - b->global[d];
        }
    if (!fits)
        return ar_error_set(AR_ERR_ARG, "tensor '%s': the layout is not one of its local tensor", ARI_SHOW(name));
    return AR_OK;
}

/* --- one file ----------------------------------------------------------------------------------------------------- */
/* Gets a box of the local tensor: a pointer into the tensor if the box is row-major, otherwise a copy. */
static ar_status box_data(const void **data, ari_arena *arena, const ar_tensor *local, const ar_box *b)
{
    ar_dump_tensor box_tensor = {.dtype = local->dtype, .ndim = local->ndim};
    ar_dump_box box = {.offset = 0};
    ar_tensor part = *local;
    for (int d = 0; d < local->ndim; d++) {
        part = ar_tensor_slice(&part, d, b->local[d], b->extent[d]);
        box_tensor.shape[d] = box.extent[d] = b->extent[d];
        box.stride[d] = (size_t)part.stride[d];
    }
    *data = part.data.ptr;
    if (ari_tensor_is_contiguous(&part))
        return AR_OK;
    const size_t count = ar_tensor_count(&part);
    void *copy = NULL;
    AR_TRY(ari_arena_take(arena, &copy, count, ar_dtype_bytes(local->dtype), "a tensor to write"));
    ari_dump_copy_box(copy, &box_tensor, part.data.ptr, &box, 0, count);
    *data = copy;
    return AR_OK;
}

static ar_status set_partial(ari_placed *p, const ar_dump_value *v, const ar_dump_place *place)
{
    const int d = v->partial == NULL ? -1 : ari_mesh_find(&place->mesh, v->partial);
    p->partial = v->partial != NULL;
    p->partial_over = d < 0 ? 0 : 1u << d;
    if (p->partial && d < 0)
        return ar_error_set(AR_ERR_ARG, "tensor '%s': partial over '%s', which is no dimension of the mesh",
                            ARI_SHOW(v->name), ARI_SHOW(v->partial));
    return AR_OK;
}

static ar_status add_box(contents *o, const ar_dump_value *v, const ar_dump_place *place, const ar_box *b)
{
    const ar_layout *layout = v->layout;
    ar_st_tensor *t = &o->tensor[o->n];
    ari_placed *p = &o->placed[o->n];
    *t = (ar_st_tensor){.name = v->name, .dtype = v->dtype, .ndim = layout->ndim};
    *p = (ari_placed){.name = (char *)(uintptr_t)v->name,
                      .ndim = layout->ndim,
                      .has_shape = true,
                      .replica = layout->replica,
                      .replicas = layout->replicas < 1 ? 1 : layout->replicas};
    for (int d = 0; d < layout->ndim; d++) {
        t->shape[d] = b->extent[d];
        p->shape[d] = layout->shape[d];
        p->offset[d] = b->global[d];
    }
    AR_TRY(set_partial(p, v, place));
    AR_TRY(box_data(&t->data, o->arena, v->local, b));
    o->n++;
    return AR_OK;
}

static ar_status make_texts(char *text[2], const contents *o, const ar_dump_place *place, char **order, size_t ordered)
{
    ari_placement p = {.rank = place->rank,
                       .world = place->world,
                       .mesh = place->mesh,
                       .has_at = true,
                       .tensor = o->placed,
                       .tensors = o->n,
                       .order = order,
                       .ordered = ordered};
    memcpy(p.coords, place->coords, sizeof p.coords);
    return ari_placement_text(&text[0], &text[1], &p);
}

static ar_status write_file(ari_atomic_file **out, const char *path, const contents *o, char *const text[2],
                            const char *const *metadata, size_t n_meta)
{
    const size_t rank_pairs = ARI_RANK_METADATA + 1;
    const char **pairs = NULL;
    AR_TRY(ARI_TAKE(&pairs, o->arena, 2 * (n_meta + rank_pairs), "metadata"));
    pairs[0] = "format";
    pairs[1] = "pt";
    ari_rank_metadata(pairs + 2, text);
    for (size_t i = 0; i < 2 * n_meta; i++)
        pairs[2 * rank_pairs + i] = metadata[i];
    return ari_st_write_uncommitted(out, path, o->tensor, o->n, pairs, rank_pairs + n_meta);
}

/* --- a rank ------------------------------------------------------------------------------------------------------- */
typedef struct job {
    const char *folder;
    const ar_dump_place *place;
    const ar_dump_value *values;
    size_t n;
    const char *const *metadata;
    size_t n_meta;
    ari_boxes *boxes; /* [n] */
    char **order;     /* [n] names; borrowed */
    ari_arena arena;
} job;

static ar_status file_path(char **out, const job *j, size_t k)
{
    char name[ARI_RANK_FILE];
    ari_rank_file_name(name, j->place->rank, k);
    return ari_file_path(out, j->folder, name);
}

static ar_status write_boxes(ari_atomic_file **out, job *j, size_t k)
{
    ar_status st = AR_OK;
    ARI_OWNED char *path = NULL;
    char *text[2] = {NULL, NULL};
    ARI_ARENA_SCOPE(&j->arena);
    contents o = {.arena = &j->arena};
    AR_TRY_TO(done, st, file_path(&path, j, k));
    AR_TRY_TO(done, st, ARI_TAKE(&o.tensor, o.arena, j->n, "tensors to write"));
    AR_TRY_TO(done, st, ARI_TAKE(&o.placed, o.arena, j->n, "tensors to write"));
    for (size_t i = 0; i < j->n; i++)
        if (k < j->boxes[i].n)
            AR_TRY_TO(done, st, add_box(&o, &j->values[i], j->place, &j->boxes[i].box[k]));
    AR_TRY_TO(done, st, make_texts(text, &o, j->place, j->order, k == 0 ? j->n : 0));
    st = write_file(out, path, &o, text, j->metadata, j->n_meta);
done:
    free(text[0]);
    free(text[1]);
    return st;
}

/* Removes files of further boxes left by an earlier dump that this dump does not write. */
static ar_status remove_others(const job *j, size_t files)
{
    for (size_t k = files; k < AR_MAX_BOXES; k++) {
        ARI_OWNED char *path = NULL;
        AR_TRY(file_path(&path, j, k));
        if (unlink(path) != 0 && errno != ENOENT)
            return ari_io_fail("remove", path);
    }
    return AR_OK;
}

static ar_status write_rank(job *j)
{
    ari_atomic_file *out[AR_MAX_BOXES] = {NULL};
    size_t files = 1;
    ar_status st = AR_OK;
    for (size_t i = 0; i < j->n; i++)
        files = j->boxes[i].n > files ? j->boxes[i].n : files;
    for (size_t k = 0; k < files && st == AR_OK; k++)
        st = write_boxes(&out[k], j, k);
    if (st == AR_OK)
        st = remove_others(j, files);
    if (st == AR_OK)
        return ari_atomic_file_commit_all(out, files);
    for (size_t k = 0; k < files; k++)
        ari_atomic_file_discard(out[k]);
    return st;
}

static ar_status check_place(const ar_dump_place *p)
{
    if (p->rank < 0 || p->rank >= p->world)
        return ar_error_set(AR_ERR_ARG, "rank %d of %d", p->rank, p->world);
    if (p->mesh.ndim == 0)
        return AR_OK;
    AR_TRY(ari_mesh_check(&p->mesh, p->world));
    for (int d = 0; d < p->mesh.ndim; d++) {
        if (p->coords[d] < 0 || p->coords[d] >= p->mesh.dim[d].size)
            return ar_error_set(AR_ERR_ARG, "rank %d: coordinate %d along '%s', which has %d", p->rank, p->coords[d],
                                p->mesh.dim[d].name, p->mesh.dim[d].size);
    }
    return AR_OK;
}

static ar_status write_values(job *j)
{
    AR_TRY(check_place(j->place));
    AR_TRY(ARI_TAKE(&j->boxes, &j->arena, j->n, "tensors to write"));
    AR_TRY(ARI_TAKE(&j->order, &j->arena, j->n, "tensors to write"));
    for (size_t i = 0; i < j->n; i++) {
        AR_TRY(check_value(&j->values[i]));
        ari_boxes_of(&j->boxes[i], j->values[i].layout);
        j->order[i] = (char *)(uintptr_t)j->values[i].name;
    }
    return write_rank(j);
}

ar_status ar_dump_write(const char *folder, const ar_dump_place *place, const ar_dump_value *values, size_t n,
                        const char *const *metadata, size_t n_meta)
{
    job j = {folder, place, values, n, metadata, n_meta, NULL, NULL, {NULL}};
    const ar_status st = write_values(&j);
    ari_arena_end(&j.arena, NULL);
    return st;
}

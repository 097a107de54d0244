/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/read/placement.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/text.h"
#include "ref/io/json.h"
#include "ref/placement/placement_private.h"

/* Where a text is, for messages: "InvalidPlacement: FILE: tensor 'NAME'". */
typedef struct reading {
    ari_placement *p;
    const char *file;
    char location[3 * ARI_PRINTABLE];
} reading;

static const char *at_tensor(reading *r, const char *name)
{
    snprintf(r->location, sizeof r->location, "%s: tensor '%s'", ARI_SHOW(r->file), ARI_SHOW(name));
    return r->location;
}

static ar_status invalid(const char *location, const char *problem)
{
    return ar_error_set(AR_ERR_FORMAT, "InvalidPlacement: %s: %s", location, problem);
}

/* Reads an array of n integers. With *n == -1, accepts up to AR_ST_MAX_DIMS integers and sets *n. */
static ar_status read_numbers(const json_t *array, const char *key, int *n, size_t *out, const char *location)
{
    const size_t size = json_array_size(array);
    if (!json_is_array(array) || size > AR_ST_MAX_DIMS || (*n >= 0 && size != (size_t)*n))
        return ar_error_set(AR_ERR_FORMAT, "InvalidPlacement: %s: '%s' has to be an array of %s integers", location,
                            key, *n < 0 ? "at most 8" : "as many");
    for (size_t i = 0; i < size; i++) {
        const json_t *x = json_array_get(array, i);
        if (!json_is_integer(x) || json_integer_value(x) < 0)
            return ar_error_set(AR_ERR_FORMAT, "InvalidPlacement: %s: '%s' has an element that is no integer from 0",
                                location, key);
        out[i] = (size_t)json_integer_value(x);
    }
    *n = (int)size;
    return AR_OK;
}

/* Refuses unknown keys, because a misspelt key would have no effect. */
static ar_status known_keys(const json_t *object, const char *const *allowed_keys, size_t n, const char *location)
{
    const char *key = ari_json_unknown_key(object, allowed_keys, n);
    return key ? ar_error_set(AR_ERR_FORMAT, "InvalidPlacement: %s: unknown key '%s'", location, ARI_SHOW(key)) : AR_OK;
}

static ar_status read_int(const json_t *object, const char *key, int min, int *out, const char *location)
{
    const json_t *x = json_object_get(object, key);
    if (x == NULL)
        return AR_OK;
    if (!json_is_integer(x) || json_integer_value(x) < min || json_integer_value(x) > INT_MAX)
        return ar_error_set(AR_ERR_FORMAT, "InvalidPlacement: %s: '%s' has to be an integer from %d to %d", location,
                            key, min, INT_MAX);
    *out = (int)json_integer_value(x);
    return AR_OK;
}

/* --- a tensor ----------------------------------------------------------------------------------------------------- */
static ar_status read_box(const json_t *value, ari_placed *t, size_t i, const char *location)
{
    static const char *const keys[] = {"global", "local", "extent"};
    ar_dump_box *b = &t->box[i];
    if (!json_is_object(value))
        return invalid(location, "a box has to be an object");
    AR_TRY(known_keys(value, keys, sizeof keys / sizeof *keys, location));
    AR_TRY(read_numbers(json_object_get(value, "global"), "global", &t->ndim, b->global, location));
    AR_TRY(read_numbers(json_object_get(value, "local"), "local", &t->ndim, t->local[i].global, location));
    AR_TRY(read_numbers(json_object_get(value, "extent"), "extent", &t->ndim, b->extent, location));
    memcpy(t->local[i].extent, b->extent, sizeof b->extent);
    return AR_OK;
}

static ar_status read_boxes(const json_t *array, ari_placed *t, ari_arena *arena, const char *location)
{
    const size_t n = json_array_size(array);
    if (!json_is_array(array) || n == 0)
        return invalid(location, "'boxes' has to be an array of one box or more");
    AR_TRY(ARI_TAKE(&t->box, arena, n, "boxes of a placement"));
    AR_TRY(ARI_TAKE(&t->local, arena, n, "boxes of a placement"));
    t->boxes = n;
    for (size_t i = 0; i < n; i++)
        AR_TRY(read_box(json_array_get(array, i), t, i, location));
    return AR_OK;
}

static ar_status add_partial(const ari_placement *p, ari_placed *t, const json_t *name, const char *location)
{
    const char *dim = json_string_value(name);
    if (dim == NULL)
        return invalid(location, "'partial' has to be the name of a dimension of the mesh, or an array of them");
    t->partial = true;
    const int d = ari_mesh_find(&p->mesh, dim);
    t->partial_over |= d < 0 ? 0 : 1u << d;
    if (d >= 0 || p->mesh.ndim == 0)
        return AR_OK;
    return ar_error_set(AR_ERR_FORMAT, "InvalidPlacement: %s: partial over '%s', which is no dimension of the mesh",
                        location, ARI_SHOW(dim));
}

static ar_status read_partial(const ari_placement *p, ari_placed *t, const json_t *value, const char *location)
{
    if (json_is_null(value))
        return AR_OK;
    if (!json_is_array(value))
        return add_partial(p, t, value, location);
    t->partial = true;
    for (size_t i = 0; i < json_array_size(value); i++)
        AR_TRY(add_partial(p, t, json_array_get(value, i), location));
    return AR_OK;
}

static ar_status read_own(reading *r, ari_placed *t, const json_t *value)
{
    static const char *const keys[] = {"shape",   "boxes",   "replica",  "replicas",
                                       "partial", "assumed", "left_out", "sample_rows"};
    const char *location = at_tensor(r, t->name);
    if (!json_is_object(value))
        return invalid(location, "has to be an object");
    AR_TRY(known_keys(value, keys, sizeof keys / sizeof *keys, location));
    const json_t *shape = json_object_get(value, "shape"), *boxes = json_object_get(value, "boxes");
    const json_t *partial = json_object_get(value, "partial"), *assumed = json_object_get(value, "assumed");
    const json_t *left_out = json_object_get(value, "left_out");
    if (assumed != NULL && !json_is_boolean(assumed))
        return invalid(location, "'assumed' has to be true or false");
    t->assumed = json_is_true(assumed);
    if (left_out != NULL && !json_is_string(left_out))
        return invalid(location, "'left_out' has to be a text, why it is a part of no tensor");
    if (left_out != NULL)
        AR_TRY(ari_arena_text(&r->p->arena, &t->left_out, json_string_value(left_out), "a placement"));
    if (shape != NULL)
        AR_TRY(read_numbers(shape, "shape", &t->ndim, t->shape, location));
    t->has_shape = shape != NULL;
    if (boxes != NULL)
        AR_TRY(read_boxes(boxes, t, &r->p->arena, location));
    AR_TRY(read_int(value, "sample_rows", 1, &t->sample_rows, location));
    AR_TRY(read_int(value, "replica", 0, &t->replica, location));
    AR_TRY(read_int(value, "replicas", 1, &t->replicas, location));
    if (t->replica > 0 && t->replica >= t->replicas)
        return ar_error_set(AR_ERR_FORMAT, "InvalidPlacement: %s: replica %d of %d; they count from 0", location,
                            t->replica, t->replicas);
    return partial == NULL ? AR_OK : read_partial(r->p, t, partial, location);
}

/* Reads the keys that are needed; later versions of PyTorch may add others. */
static ar_status read_dcp(reading *r, ari_placed *t, const json_t *value)
{
    return read_numbers(json_object_get(value, "saved_offsets"), "saved_offsets", &t->ndim, t->offset,
                        at_tensor(r, t->name));
}

static ar_status add_tensor(reading *r, const char *name, const json_t *placement, const json_t *dcp)
{
    ari_placed *t = &r->p->tensor[r->p->tensors];
    *t = (ari_placed){.ndim = -1};
    AR_TRY(ari_arena_text(&r->p->arena, &t->name, name, "a placement"));
    r->p->tensors++;
    if (dcp != NULL)
        AR_TRY(read_dcp(r, t, dcp));
    return placement == NULL ? AR_OK : read_own(r, t, placement);
}

static ar_status read_tensors(reading *r, const json_t *placement, const json_t *dcp)
{
    const char *name;
    json_t *value;
    const size_t max_tensors = json_object_size(placement) + json_object_size(dcp);
    AR_TRY(ARI_TAKE(&r->p->tensor, &r->p->arena, max_tensors, "a placement"));
    json_object_foreach((json_t *)(uintptr_t)placement, name, value)
        AR_TRY(add_tensor(r, name, value, json_object_get(dcp, name)));
    json_object_foreach((json_t *)(uintptr_t)dcp, name, value) if (json_object_get(placement, name) == NULL)
        AR_TRY(add_tensor(r, name, NULL, value));
    ARI_SORT(r->p->tensor, r->p->tensors, ari_by_name);
    return AR_OK;
}

/* --- the rank ----------------------------------------------------------------------------------------------------- */
static ar_status read_dim(ar_mesh_dim *o, const json_t *pair, const char *location)
{
    const char *name = json_string_value(json_array_get(pair, 0));
    const json_t *size = json_array_get(pair, 1);
    if (json_array_size(pair) != 2 || name == NULL || name[0] == '\0' || strlen(name) >= sizeof o->name ||
        !json_is_integer(size) || json_integer_value(size) < 1 || json_integer_value(size) > INT_MAX)
        return invalid(location, "'mesh' has to be pairs of a name of 1 to 15 bytes and a size");
    memcpy(o->name, name, strlen(name) + 1);
    o->size = (int)json_integer_value(size);
    return AR_OK;
}

static ar_status read_mesh(ari_placement *p, const json_t *mesh, const char *location)
{
    const size_t n = json_array_size(mesh);
    size_t ranks = 1;
    if (!json_is_array(mesh) || n > AR_MESH_DIMS)
        return invalid(location, "'mesh' has to be an array of at most 6 dimensions");
    for (size_t i = 0; i < n; i++) {
        AR_TRY(read_dim(&p->mesh.dim[i], json_array_get(mesh, i), location));
        if (ari_mesh_find(&p->mesh, p->mesh.dim[i].name) >= 0)
            return invalid(location, "two dimensions of 'mesh' have the same name");
        p->mesh.ndim++;
        if (ranks <= INT_MAX)
            ranks *= (size_t)p->mesh.dim[i].size;
    }
    if (n > 0 && (ranks > INT_MAX || (p->world > 0 && ranks != (size_t)p->world)))
        return ar_error_set(AR_ERR_FORMAT, "InvalidPlacement: %s: a mesh of %zu ranks in a world of %d", location,
                            ranks, p->world);
    return AR_OK;
}

static ar_status read_coordinates(ari_placement *p, const json_t *coords, const char *location)
{
    size_t x[AR_ST_MAX_DIMS] = {0};
    int n = p->mesh.ndim;
    AR_TRY(read_numbers(coords, "at", &n, x, location));
    for (int i = 0; i < p->mesh.ndim; i++) {
        if (x[i] >= (size_t)p->mesh.dim[i].size)
            return ar_error_set(AR_ERR_FORMAT, "InvalidPlacement: %s: coordinate %zu along '%s', which has %d",
                                location, x[i], ARI_SHOW(p->mesh.dim[i].name), p->mesh.dim[i].size);
        p->coords[i] = (int)x[i];
    }
    p->has_at = true;
    return AR_OK;
}

static ar_status read_order(ari_placement *p, const json_t *order, const char *location)
{
    const size_t n = json_array_size(order);
    if (!json_is_array(order))
        return invalid(location, "'order' has to be an array of names");
    AR_TRY(ARI_TAKE(&p->order, &p->arena, n, "an execution order"));
    for (; p->ordered < n; p->ordered++) {
        const char *name = json_string_value(json_array_get(order, p->ordered));
        if (name == NULL)
            return invalid(location, "'order' has to be an array of names");
        AR_TRY(ari_arena_text(&p->arena, &p->order[p->ordered], name, "an execution order"));
    }
    return AR_OK;
}

static ar_status read_rank(reading *r, const json_t *placement)
{
    static const char *const keys[] = {"version", "rank", "world", "mesh", "at", "tensors", "order"};
    const char *location = r->location;
    snprintf(r->location, sizeof r->location, "%s: %s", ARI_SHOW(r->file), ARI_DUMP_PLACEMENT);
    if (!json_is_object(placement))
        return invalid(location, "has to be an object");
    const json_t *version = json_object_get(placement, "version");
    if (!json_is_integer(version) || json_integer_value(version) != 1)
        return invalid(location, "'version' has to be 1");
    AR_TRY(known_keys(placement, keys, sizeof keys / sizeof *keys, location));
    AR_TRY(read_int(placement, "rank", 0, &r->p->rank, location));
    AR_TRY(read_int(placement, "world", 1, &r->p->world, location));
    if (r->p->world > 0 && r->p->rank >= r->p->world)
        return ar_error_set(AR_ERR_FORMAT, "InvalidPlacement: %s: rank %d of %d; they count from 0", location,
                            r->p->rank, r->p->world);
    const json_t *mesh = json_object_get(placement, "mesh"), *coords = json_object_get(placement, "at");
    const json_t *order = json_object_get(placement, "order"), *tensors = json_object_get(placement, "tensors");
    if (mesh != NULL)
        AR_TRY(read_mesh(r->p, mesh, location));
    if (coords != NULL)
        AR_TRY(read_coordinates(r->p, coords, location));
    if (tensors != NULL && !json_is_object(tensors))
        return invalid(location, "'tensors' has to be an object");
    return order == NULL ? AR_OK : read_order(r->p, order, location);
}

static ar_status parse_text(json_t **out, const char *text, const char *key, const char *file)
{
    char name[2 * ARI_PRINTABLE];
    if (text == NULL)
        return AR_OK;
    snprintf(name, sizeof name, "InvalidPlacement: %s: %s", ARI_SHOW(file), key);
    return ari_json_parse(out, text, strlen(text), name);
}

ar_status ari_placement_parse(ari_placement *p, const char *dcp, const char *placement_text, const char *file)
{
    json_auto_t *dcp_root = NULL, *own_root = NULL;
    reading r = {.p = p, .file = file};
    *p = (ari_placement){.rank = -1};
    AR_TRY(parse_text(&dcp_root, dcp, ARI_DUMP_DCP, file));
    AR_TRY(parse_text(&own_root, placement_text, ARI_DUMP_PLACEMENT, file));
    if (own_root != NULL)
        AR_TRY(read_rank(&r, own_root));
    snprintf(r.location, sizeof r.location, "%s: %s", ARI_SHOW(file), ARI_DUMP_DCP);
    if (dcp_root != NULL && !json_is_object(dcp_root))
        AR_TRY(invalid(r.location, "has to be an object"));
    return read_tensors(&r, json_object_get(own_root, "tensors"), dcp_root);
}

void ari_placement_forget_tensors(ari_placement *p)
{
    p->tensor = NULL;
    p->tensors = 0;
}

void ari_placement_fini(ari_placement *p)
{
    ari_arena_end(&p->arena, NULL);
    *p = (ari_placement){.rank = -1};
}

const ari_placed *ari_placement_find(const ari_placement *p, const char *name)
{
    const ari_placed key = {.name = (char *)(uintptr_t)name};
    return p->tensors == 0 ? NULL : bsearch(&key, p->tensor, p->tensors, sizeof key, ari_by_name);
}

/* --- in the file's tensor ----------------------------------------------------------------------------------------- */
static ar_status misplaced(const char *file, const ar_st_entry *e, const char *problem)
{
    return ar_error_set(AR_ERR_FORMAT, "InvalidPlacement: %s: tensor '%s', which is %s in the file: %s", ARI_SHOW(file),
                        ARI_SHOW(e->name), ARI_SHOW_SHAPE(e->ndim, e->shape), problem);
}

/* Checks that the box lies within the file's tensor, and within the full tensor if its shape is known. */
static ar_status check_box(const ar_dump_box *b, const size_t *local, const ari_placed *t, const ar_st_entry *e,
                           const char *file)
{
    for (int d = 0; d < e->ndim; d++) {
        if (local[d] > e->shape[d] || b->extent[d] > e->shape[d] - local[d])
            return misplaced(file, e, "a box reaches beyond it");
        if (b->global[d] > SIZE_MAX - b->extent[d] ||
            (t->has_shape && (b->global[d] > t->shape[d] || b->extent[d] > t->shape[d] - b->global[d])))
            return misplaced(file, e, "a box reaches beyond the full tensor");
    }
    return AR_OK;
}

/* Checks that every element of the file's tensor is in one of its boxes. */
static ar_status check_local(const ari_placed *t, const ar_st_entry *e, const char *file)
{
    ARI_OWNED ari_cover_box *cover = NULL;
    ari_cover result = {.fault = ARI_COVERED};
    size_t n = 0;
    AR_TRY(ARI_ALLOC(&cover, t->boxes, "boxes of a placement"));
    for (size_t i = 0; i < t->boxes; i++) {
        if (ari_dump_box_count(e->ndim, &t->local[i]) > 0)
            cover[n++] = (ari_cover_box){&t->local[i], i};
    }
    if (e->count > 0)
        ari_cover_check(&result, e->ndim, e->shape, cover, n);
    if (result.fault == ARI_COVERED)
        return AR_OK;
    return misplaced(file, e,
                     result.fault == ARI_COVER_GAP ? "its boxes have fewer elements" : "its boxes overlap in the file");
}

/* Gets box i, or the whole entry if no boxes are given. */
static ar_status resolve_box(ar_dump_box *b, size_t i, const ari_placed *t, const ar_st_entry *e, const char *file)
{
    static const size_t origin[AR_ST_MAX_DIMS];
    const bool has_boxes = t != NULL && t->boxes > 0;
    const size_t *local = has_boxes ? t->local[i].global : origin;
    if (has_boxes)
        *b = t->box[i];
    else
        memcpy(b->extent, e->shape, (size_t)e->ndim * sizeof *e->shape);
    if (t != NULL && !has_boxes)
        memcpy(b->global, t->offset, sizeof t->offset);
    ari_row_major(b->stride, e->ndim, e->shape);
    if (t != NULL)
        AR_TRY(check_box(b, local, t, e, file));
    for (int d = 0; d < e->ndim; d++)
        b->offset += e->count > 0 ? local[d] * b->stride[d] : 0;
    return AR_OK;
}

ar_status ari_placed_resolve(ar_dump_box **box, size_t *boxes, ari_arena *a, const ari_placed *t, const ar_st_entry *e,
                             const char *file)
{
    const size_t stated_boxes = t == NULL ? 0 : t->boxes;
    *boxes = stated_boxes == 0 ? 1 : stated_boxes;
    if (t != NULL && t->ndim >= 0 && t->ndim != e->ndim)
        return misplaced(file, e, "its place has another number of dimensions");
    AR_TRY(ARI_TAKE(box, a, *boxes, "boxes of a dump"));
    for (size_t i = 0; i < *boxes; i++)
        AR_TRY(resolve_box(&(*box)[i], i, t, e, file));
    return stated_boxes > 0 ? check_local(t, e, file) : AR_OK;
}

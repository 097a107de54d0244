/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/abi.h"

#include <stdint.h>
#include <stdlib.h>

#include "anyrank/dump.h"
#include "anyrank/sketch.h"
#include "ref/core/tensor_private.h"
#include "ref/io/file.h"
#include "ref/io/json.h"
#include "verify/compare/verify_private.h"
#include "verify/read/dump_private.h"

#if !defined(ANYRANK_VERSION)
#error "the version is to be defined"
#endif

int ar_abi_number(void)
{
    return AR_ABI_NUMBER;
}

const char *ar_abi_version(void)
{
    return ANYRANK_VERSION;
}

const char *ar_abi_error(void)
{
    return ar_error_message();
}

void ar_abi_free(char *text)
{
    free(text);
}

/** Returns the text of `value` and releases `value`, which may be NULL if memory is short. */
static char *text_of(json_t *value)
{
    char *text = value == NULL ? NULL : json_dumps(value, JSON_COMPACT | JSON_ENCODE_ANY);
    json_decref(value);
    if (text == NULL)
        (void)ar_error_set(AR_ERR_MEMORY, "no memory for a description");
    return text;
}

/* --- dumps -------------------------------------------------------------------------------------------------------- */

int ar_abi_dump_open(ar_abi_dump **out, const char *path, const char *map)
{
    if (out == NULL || path == NULL)
        return ar_error_set(AR_ERR_ARG, "the dump's path is missing");
    *out = NULL;
    return ar_dump_open(out, path, &(ar_dump_options){.map = map});
}

void ar_abi_dump_close(ar_abi_dump *d)
{
    ar_dump_close(d);
}

int ar_abi_dump_align(ar_abi_dump *reference, ar_abi_dump *other)
{
    return ari_verify_align(reference, other);
}

char *ar_abi_dump_json(const ar_abi_dump *d)
{
    const ar_mesh *mesh = ar_dump_mesh(d);
    json_t *dims = json_array();
    for (int i = 0; i < mesh->ndim; i++) {
        if (json_array_append_new(dims, json_pack("[si]", mesh->dim[i].name, mesh->dim[i].size)) != 0) {
            json_decref(dims);
            dims = NULL;
            break;
        }
    }
    return text_of(json_pack("{so sI si so}", "path", ari_json_text(ar_dump_path(d)), "tensors",
                             (json_int_t)ar_dump_count(d), "ranks", ar_dump_ranks(d), "mesh", dims));
}

const char *ar_abi_dump_metadata(const ar_abi_dump *d, const char *key)
{
    return ar_dump_metadata(d, key);
}

size_t ar_abi_dump_count(const ar_abi_dump *d)
{
    return ar_dump_count(d);
}

const ar_abi_tensor *ar_abi_dump_at(const ar_abi_dump *d, size_t i)
{
    return ar_dump_at(d, i);
}

const ar_abi_tensor *ar_abi_dump_find(const ar_abi_dump *d, const char *name)
{
    return ar_dump_find(d, name);
}

/* --- tensors ------------------------------------------------------------------------------------------------------ */

const char *ar_abi_tensor_name(const ar_abi_tensor *t)
{
    return t->name;
}

size_t ar_abi_tensor_order(const ar_abi_tensor *t)
{
    return t->order;
}

size_t ar_abi_tensor_bytes(const ar_abi_tensor *t)
{
    return t->count * ar_dtype_bytes(t->dtype); /* no overflow: the files contain this many bytes */
}

static json_t *boxes_of(const ar_dump_part *part, size_t ndim)
{
    json_t *boxes = json_array();
    for (size_t i = 0; i < part->boxes; i++) {
        const ar_dump_box *box = &part->box[i];
        if (json_array_append_new(boxes, json_pack("{so so}", "global", ari_json_sizes(box->global, ndim), "extent",
                                                   ari_json_sizes(box->extent, ndim))) != 0) {
            json_decref(boxes);
            return NULL;
        }
    }
    return boxes;
}

static json_t *parts_of(const ar_dump_tensor *t)
{
    json_t *parts = json_array();
    for (size_t i = 0; i < t->parts; i++) {
        const ar_dump_part *p = &t->part[i];
        if (json_array_append_new(
                parts, json_pack("{so so si si sb so}", "rank", p->rank < 0 ? json_null() : json_integer(p->rank),
                                 "file", ari_json_text(p->file), "replica", p->replica, "replicas", p->replicas,
                                 "partial", p->partial, "boxes", boxes_of(p, (size_t)t->ndim))) != 0) {
            json_decref(parts);
            return NULL;
        }
    }
    return parts;
}

char *ar_abi_tensor_json(const ar_abi_tensor *t)
{
    return text_of(json_pack("{so ss so so}", "name", ari_json_text(t->name), "dtype", ar_dtype_name(t->dtype), "shape",
                             ari_json_sizes(t->shape, (size_t)t->ndim), "parts", parts_of(t)));
}

int ar_abi_tensor_read(const ar_abi_tensor *t, void *out, size_t bytes)
{
    if (ar_dtype_bytes(t->dtype) == 0)
        return ar_error_set(AR_ERR_DTYPE, "tensor '%s': elements of %s have less than a byte", t->name,
                            ar_dtype_name(t->dtype));
    if (bytes != ar_abi_tensor_bytes(t) || (out == NULL && bytes > 0))
        return ar_error_set(AR_ERR_ARG, "tensor '%s': room for %zu bytes, expected %zu", t->name, bytes,
                            ar_abi_tensor_bytes(t));
    const ar_status st = t->count == 0 ? AR_OK : ar_dump_read(t, 0, t->count, out);
    for (size_t i = 0; i < t->parts; i++) /* the files' pages would count as memory of this process */
        ari_pages_drop(t->part[i].entry->data, t->part[i].entry->bytes);
    return st;
}

int ar_abi_tensor_read_part(const ar_abi_tensor *t, size_t i, float *out, size_t count)
{
    size_t elements = 0;
    if (i >= t->parts)
        return ar_error_set(AR_ERR_ARG, "tensor '%s': part %zu of %zu", t->name, i, t->parts);
    for (size_t k = 0; k < t->part[i].boxes; k++)
        elements += ari_volume(t->part[i].box[k].extent, t->ndim);
    if (elements != count || (out == NULL && count > 0))
        return ar_error_set(AR_ERR_ARG, "tensor '%s': room for %zu elements of part %zu, expected %zu", t->name, count,
                            i, elements);
    return count == 0 ? AR_OK : ari_dump_part_f32(t, &t->part[i], out);
}

int ar_abi_tensor_replicas(const ar_abi_tensor *t, char **out)
{
    bool found = false;
    ar_dump_disagreement disagreement = {0};
    AR_TRY(ar_dump_replicas(t, &found, &disagreement));
    char *text =
        text_of(!found ? json_null()
                       : json_pack("{s[ii] sI sI sI s[oo]}", "ranks", disagreement.ranks[0], disagreement.ranks[1],
                                   "index", (json_int_t)disagreement.index, "elements",
                                   (json_int_t)disagreement.elements, "count", (json_int_t)disagreement.count, "values",
                                   ari_json_number(disagreement.value[0]), ari_json_number(disagreement.value[1])));
    if (text == NULL)
        return AR_ERR_MEMORY;
    *out = text;
    return AR_OK;
}

/* --- sketches ----------------------------------------------------------------------------------------------------- */

int ar_abi_sketch_create(ar_abi_sketch **out, const char *dtype, size_t ndim, const size_t *shape)
{
    ar_dtype t;
    ar_sketch *s = NULL;
    *out = NULL;
    if (ndim > AR_ST_MAX_DIMS)
        return ar_error_set(AR_ERR_SHAPE, "sketch: %zu dimensions, at most %d", ndim, AR_ST_MAX_DIMS);
    AR_TRY(ari_dtype_parse(&t, dtype));
    AR_TRY(ARI_ALLOC_ZERO(&s, 1, "a sketch"));
    const ar_status st = ar_sketch_init(s, t, (int)ndim, shape);
    if (st != AR_OK)
        ar_abi_sketch_destroy(s);
    else
        *out = s;
    return st;
}

void ar_abi_sketch_destroy(ar_abi_sketch *s)
{
    if (s != NULL)
        ar_sketch_fini(s);
    free(s);
}

int ar_abi_sketch_add(ar_abi_sketch *s, const void *values, size_t first, const size_t *stride, const size_t *global,
                      const size_t *extent)
{
    ar_dump_box box = {.offset = first, .replicas = 1};
    for (int d = 0; d < s->ndim; d++) {
        box.stride[d] = stride[d];
        box.global[d] = global[d];
        box.extent[d] = extent[d];
    }
    return ar_sketch_add(s, values, &box);
}

int ar_abi_sketch_merge(ar_abi_sketch *s, const ar_abi_sketch *part)
{
    return ar_sketch_merge(s, part, false);
}

size_t ar_abi_sketch_bytes(const ar_abi_sketch *s)
{
    return ar_sketch_bytes(s);
}

void ar_abi_sketch_encode(const ar_abi_sketch *s, unsigned char *out)
{
    ar_sketch_encode(out, s);
}

int ar_abi_sketch_decode(ar_abi_sketch *s, const unsigned char *data, size_t n)
{
    size_t used = 0;
    return ar_sketch_decode(s, data, n, &used);
}

uint64_t ar_abi_sketch_hash(const unsigned char *data, size_t n)
{
    return ar_sketch_hash(data, n);
}

static json_t *sketch_json(const ar_sketch_tensor *t)
{
    const ar_sketch *s = &t->sketch;
    char digest[17];
    snprintf(digest, sizeof digest, "%016llx", (unsigned long long)s->digest);
    return json_pack("{ss si ss so ss sI sI sI so so so sb si si ss}", "name", t->name, "step", t->step, "dtype",
                     ar_dtype_name(s->dtype), "shape", ari_json_sizes(s->shape, (size_t)s->ndim), "digest", digest,
                     "zeros", (json_int_t)s->zeros, "nan", (json_int_t)s->nan, "inf", (json_int_t)s->inf, "sum",
                     ari_json_number(s->sum), "sum_squares", ari_json_number(s->sum_squares), "max_abs",
                     ari_json_number(s->max_abs), "summed", (int)s->summed, "copies", t->copies, "differing",
                     t->differing, "left_out", t->left_out);
}

char *ar_abi_sketches_json(const char *folder)
{
    ar_sketch_run *run = NULL;
    if (ar_sketch_run_open(&run, folder) != AR_OK)
        return NULL;
    json_t *tensors = json_array();
    bool is_complete = tensors != NULL;
    for (size_t i = 0; i < ar_sketch_run_count(run) && is_complete; i++)
        is_complete = json_array_append_new(tensors, sketch_json(ar_sketch_run_tensor(run, i))) == 0;
    json_t *document = is_complete ? json_pack("{si sO}", "ranks", ar_sketch_run_ranks(run), "tensors", tensors) : NULL;
    json_decref(tensors);
    ar_sketch_run_close(run);
    return text_of(document);
}

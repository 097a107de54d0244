/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/io/hash.h"
#include "ref/io/json.h"
#include "ref/io/safetensors.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "safetensors data is little-endian and used in place");
_Static_assert(sizeof(size_t) == 8, "sizes of the format are 64-bit");

bool ari_st_count(uint64_t *count, int ndim, const size_t *shape)
{
    uint64_t n = 1;
    for (int i = 0; i < ndim; i++)
        if (__builtin_mul_overflow(n, (uint64_t)shape[i], &n))
            return false;
    *count = n;
    return true;
}

ar_status ari_st_tensor_bytes(size_t *bytes, const ar_st_tensor *t)
{
    const char *name = t->name == NULL ? "(no name)" : t->name;
    uint64_t count = 0, bits = 0;
    if (t->name == NULL)
        return ar_error_set(AR_ERR_ARG, "a tensor has no name");
    if (!ari_utf8_valid(name, strlen(name)) || strcmp(name, ARI_ST_METADATA) == 0)
        return ar_error_set(AR_ERR_ARG, "tensor '%s': a name must be UTF-8 and not " ARI_ST_METADATA, ARI_SHOW(name));
    if (t->ndim < 0 || t->ndim > AR_ST_MAX_DIMS)
        return ar_error_set(AR_ERR_ARG, "tensor '%s' has %d dimensions, expected 0 to %d", ARI_SHOW(name), t->ndim,
                            AR_ST_MAX_DIMS);
    const size_t width = ar_dtype_bits(t->dtype);
    if (width == 0)
        return ar_error_set(AR_ERR_ARG, "tensor '%s' has the unknown dtype %d", ARI_SHOW(name), (int)t->dtype);
    if (!ari_st_count(&count, t->ndim, t->shape) || __builtin_mul_overflow(count, (uint64_t)width, &bits))
        return ar_error_set(AR_ERR_OVERFLOW, "tensor '%s': its size overflows 64 bits", ARI_SHOW(name));
    if (bits % 8 != 0)
        return ar_error_set(AR_ERR_ARG, "tensor '%s': its elements do not fill whole bytes", ARI_SHOW(name));
    *bytes = (size_t)(bits / 8);
    return AR_OK;
}

ar_status ari_st_sort(const ar_st_tensor **order, const ar_st_tensor *tensors, size_t n, const char *who)
{
    for (size_t i = 0; i < n; i++)
        order[i] = &tensors[i];
    ARI_SORT(order, n, ari_by_name_of);
    for (size_t i = 1; i < n; i++)
        if (strcmp(order[i - 1]->name, order[i]->name) == 0)
            return ar_error_set(AR_ERR_ARG, "%stensor '%s' is there twice", who, ARI_SHOW(order[i]->name));
    return AR_OK;
}

/* --- their hash --------------------------------------------------------------------------------------------------- */

static ar_status hash_one(ari_sha256 *s, const ar_st_tensor *t)
{
    size_t bytes = 0;
    AR_TRY(ari_st_tensor_bytes(&bytes, t));
    if (bytes > 0 && t->data == NULL)
        return ar_error_set(AR_ERR_ARG, "tensors_hash: tensor '%s' has no data", ARI_SHOW(t->name));
    const char *dtype = ar_dtype_name(t->dtype);
    const char *shape = ARI_SHOW_SHAPE(t->ndim, t->shape);
    ari_sha256_update(s, t->name, strlen(t->name) + 1);
    ari_sha256_update(s, dtype, strlen(dtype) + 1);
    ari_sha256_update(s, shape, strlen(shape) + 1);
    ari_sha256_update(s, t->data, bytes);
    return AR_OK;
}

ar_status ari_tensors_hash(char hex[65], const ar_st_tensor *tensors, size_t n)
{
    ari_sha256 s;
    ARI_OWNED const ar_st_tensor **order = NULL;
    AR_TRY(ARI_ALLOC_ZERO(&order, n, "names to sort"));
    for (size_t i = 0; i < n; i++) {
        if (tensors[i].name == NULL)
            AR_TRY(ar_error_set(AR_ERR_ARG, "tensors_hash: tensor %zu has no name", i));
    }
    AR_TRY(ari_st_sort(order, tensors, n, "tensors_hash: "));
    ari_sha256_init(&s);
    for (size_t i = 0; i < n; i++)
        AR_TRY(hash_one(&s, order[i]));
    ari_sha256_final(&s, hex);
    return AR_OK;
}

/* --- of a file ---------------------------------------------------------------------------------------------------- */

static ar_status refuse_layout(const char *rule, const char *path, const ari_st_item *item, const char *problem)
{
    const char *shape = ARI_SHOW_SHAPE(item->entry.ndim, item->entry.shape);
    return ar_error_set(AR_ERR_FORMAT, "%s: %s: tensor '%s' %s %s [%" PRIu64 ", %" PRIu64 "): %s", rule, ARI_SHOW(path),
                        ARI_SHOW(item->entry.name), ar_dtype_name(item->entry.dtype), shape, item->begin, item->end,
                        problem);
}

/* One entry, given where the one before it ended. The order of the checks is the official library's. */
static ar_status check_item(ari_st_item *item, uint64_t previous_end, const char *path)
{
    char problem[128];
    uint64_t count = 0, bits = 0;
    if (item->begin != previous_end || item->end < item->begin) {
        snprintf(problem, sizeof problem, "expected it to begin at %" PRIu64 " and not to end before", previous_end);
        return refuse_layout("InvalidOffset", path, item, problem);
    }
    if (!ari_st_count(&count, item->entry.ndim, item->entry.shape) ||
        __builtin_mul_overflow(count, (uint64_t)ar_dtype_bits(item->entry.dtype), &bits))
        return refuse_layout("ValidationOverflow", path, item, "its size overflows 64 bits");
    if (bits % 8 != 0)
        return refuse_layout("MisalignedSlice", path, item, "its elements do not fill whole bytes");
    if (item->end - item->begin != bits / 8) {
        snprintf(problem, sizeof problem, "has %" PRIu64 " bytes, expected %" PRIu64, item->end - item->begin,
                 bits / 8);
        return refuse_layout("TensorInvalidInfo", path, item, problem);
    }
    item->entry.count = (size_t)count;
    item->entry.bytes = (size_t)(bits / 8);
    return AR_OK;
}

static int compare_offsets(const void *a, const void *b)
{
    const ari_st_item *x = *(const ari_st_item *const *)a;
    const ari_st_item *y = *(const ari_st_item *const *)b;
    ARI_ASCENDING(x->begin, y->begin);
    ARI_ASCENDING(x->end, y->end);
    return x < y ? -1 : x > y; /* the same range twice: a stable order, so the same message each time */
}

ar_status ari_st_header_validate(ari_st_header *h, uint64_t data_bytes, const char *path)
{
    ARI_OWNED ari_st_item **order = NULL;
    AR_TRY(ARI_ALLOC_ZERO(&order, h->n, "a file's header"));
    for (size_t i = 0; i < h->n; i++)
        order[i] = &h->items[i];
    ARI_SORT(order, h->n, compare_offsets);
    uint64_t end = 0;
    for (size_t i = 0; i < h->n; i++) {
        AR_TRY(check_item(order[i], end, path));
        end = order[i]->end;
    }
    if (end != data_bytes)
        return ar_error_set(AR_ERR_FORMAT,
                            "MetadataIncompleteBuffer: %s: the tensors end at byte %" PRIu64
                            " of the data, the file at %" PRIu64,
                            ARI_SHOW(path), end, data_bytes);
    return AR_OK;
}

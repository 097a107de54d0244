/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/io/hash.h"

#include <stdlib.h>
#include <string.h>

#include "ref/io/file.h"
#include "ref/io/safetensors.h"

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
    ar_status st = AR_OK;
    ari_sha256 s;
    const ar_st_tensor **order = calloc(n + 1, sizeof(const ar_st_tensor *));
    if (order == NULL)
        return ar_error_set(AR_ERR_MEMORY, "tensors_hash: no memory to sort %zu names", n);
    for (size_t i = 0; i < n; i++) {
        if (tensors[i].name == NULL)
            AR_TRY_TO(done, st, ar_error_set(AR_ERR_ARG, "tensors_hash: tensor %zu has no name", i));
    }
    AR_TRY_TO(done, st, ari_st_sort(order, tensors, n, "tensors_hash: "));
    ari_sha256_init(&s);
    for (size_t i = 0; i < n; i++)
        AR_TRY_TO(done, st, hash_one(&s, order[i]));
    ari_sha256_final(&s, hex);
done:
    free(order);
    return st;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/io/hash.h"

#include <openssl/err.h>
#include <openssl/evp.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/io/file.h"
#include "ref/io/safetensors.h"

/* True if one of the reasons that the library queued is a lack of memory. Empties the queue. */
static bool no_memory_queued(void)
{
    bool found = false;
    for (unsigned long e = ERR_get_error(); e != 0; e = ERR_get_error())
        found = found || ERR_GET_REASON(e) == ERR_R_MALLOC_FAILURE;
    return found;
}

ar_status ari_sha256_init(ari_sha256 *s)
{
    ERR_clear_error(); /* or what somebody else left there would be taken for a reason */
    EVP_MD_CTX *context = EVP_MD_CTX_new();
    s->context = context;
    if (context != NULL && EVP_DigestInit_ex(context, EVP_sha256(), NULL) == 1)
        return AR_OK;
    ari_sha256_drop(s);
    if (context == NULL || no_memory_queued())
        return ar_error_set(AR_ERR_MEMORY, "no memory for SHA-256");
    return ar_error_set(AR_ERR_INTERNAL, "SHA-256 cannot be started");
}

ar_status ari_sha256_update(ari_sha256 *s, const void *data, size_t bytes)
{
    if (bytes == 0 || EVP_DigestUpdate((EVP_MD_CTX *)s->context, data, bytes) == 1)
        return AR_OK;
    return ar_error_set(AR_ERR_INTERNAL, "SHA-256 failed over %zu bytes", bytes);
}

ar_status ari_sha256_final(ari_sha256 *s, char hex[65])
{
    unsigned char digest[EVP_MAX_MD_SIZE];
    unsigned int length = 0;
    const int ok = EVP_DigestFinal_ex((EVP_MD_CTX *)s->context, digest, &length);
    ari_sha256_drop(s);
    if (ok != 1 || length != 32)
        return ar_error_set(AR_ERR_INTERNAL, "SHA-256 gave %u bytes, expected 32", length);
    for (unsigned int i = 0; i < length; i++)
        snprintf(hex + 2 * i, 3, "%02x", digest[i]);
    return AR_OK;
}

void ari_sha256_drop(ari_sha256 *s)
{
    EVP_MD_CTX_free((EVP_MD_CTX *)s->context);
    s->context = NULL;
}

ar_status ari_sha256_of(char hex[65], const void *data, size_t bytes)
{
    ari_sha256 s = {NULL};
    AR_TRY(ari_sha256_init(&s));
    const ar_status st = ari_sha256_update(&s, data, bytes);
    if (st == AR_OK)
        return ari_sha256_final(&s, hex);
    ari_sha256_drop(&s);
    return st;
}

static ar_status hash_one(ari_sha256 *s, const ar_st_tensor *t)
{
    size_t bytes = 0;
    AR_TRY(ari_st_tensor_bytes(&bytes, t));
    if (bytes > 0 && t->data == NULL)
        return ar_error_set(AR_ERR_ARG, "tensors_hash: tensor '%s' has no data", ARI_SHOW(t->name));
    const char *dtype = ar_dtype_name(t->dtype);
    const char *shape = ARI_SHOW_SHAPE(t->ndim, t->shape);
    AR_TRY(ari_sha256_update(s, t->name, strlen(t->name) + 1));
    AR_TRY(ari_sha256_update(s, dtype, strlen(dtype) + 1));
    AR_TRY(ari_sha256_update(s, shape, strlen(shape) + 1));
    return ari_sha256_update(s, t->data, bytes);
}

ar_status ari_tensors_hash(char hex[65], const ar_st_tensor *tensors, size_t n)
{
    ar_status st = AR_OK;
    ari_sha256 s = {NULL};
    const ar_st_tensor **order = calloc(n + 1, sizeof(const ar_st_tensor *));
    if (order == NULL)
        return ar_error_set(AR_ERR_MEMORY, "tensors_hash: no memory to sort %zu names", n);
    for (size_t i = 0; i < n; i++) {
        if (tensors[i].name == NULL)
            AR_TRY_TO(done, st, ar_error_set(AR_ERR_ARG, "tensors_hash: tensor %zu has no name", i));
    }
    AR_TRY_TO(done, st, ari_st_sort(order, tensors, n, "tensors_hash: "));
    AR_TRY_TO(done, st, ari_sha256_init(&s));
    for (size_t i = 0; i < n; i++)
        AR_TRY_TO(done, st, hash_one(&s, order[i]));
    st = ari_sha256_final(&s, hex);
done:
    ari_sha256_drop(&s);
    free(order);
    return st;
}

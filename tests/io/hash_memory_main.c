/* SPDX-License-Identifier: Apache-2.0 */
/* Without memory a hash must say so. A program of its own: OpenSSL takes another allocator only before its first call,
 * which Criterion's libraries make. */
#include <openssl/crypto.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/io/hash.h"

/* sha256("") */
#define EMPTY "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"

static size_t allocations_left = SIZE_MAX;

static bool take(void)
{
    allocations_left -= allocations_left > 0;
    return allocations_left > 0;
}

static void *scarce_malloc(size_t bytes, const char *file, int line)
{
    (void)file, (void)line;
    return take() ? malloc(bytes) : NULL;
}

static void *scarce_realloc(void *old, size_t bytes, const char *file, int line)
{
    (void)file, (void)line;
    return take() ? realloc(old, bytes) : NULL;
}

static void plain_free(void *old, const char *file, int line)
{
    (void)file, (void)line;
    free(old);
}

static int failed(const char *what, size_t n, ar_status st)
{
    fprintf(stderr, "hash_memory_main: %s, allocation %zu, status %d: %s\n", what, n, (int)st, ar_error_message());
    return 1;
}

int main(void)
{
    char hex[65];
    if (CRYPTO_set_mem_functions(scarce_malloc, scarce_realloc, plain_free) != 1)
        return 77;                /* an OpenSSL that keeps its own allocator */
    for (int i = 0; i < 2; i++) { /* the first call loads what stays */
        const ar_status st = ari_tensors_hash(hex, NULL, 0);
        if (st != AR_OK || strcmp(hex, EMPTY) != 0)
            return failed("with memory", SIZE_MAX, st);
    }
    size_t n = 1;
    for (;; n++) {
        allocations_left = n;
        const ar_status st = ari_tensors_hash(hex, NULL, 0);
        allocations_left = SIZE_MAX;
        if (st == AR_OK)
            break;
        if (st != AR_ERR_MEMORY && (n == 1 || st != AR_ERR_INTERNAL)) /* a later part may not say why */
            return failed("without memory", n, st);
        if (ari_tensors_hash(hex, NULL, 0) != AR_OK || strcmp(hex, EMPTY) != 0)
            return failed("with memory again", n, st);
    }
    return n > 1 ? 0 : failed("nothing was allocated", n, AR_OK);
}

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <math.h>

#include "ref/io/safetensors_private.h"
#include "tests/support/temporary.h"

/* Two files of tensors in a folder of their own, and what ar_verify says of them. */
typedef struct two_files {
    char folder[64], reference[96], other[96], allowed[96];
} two_files;

static inline two_files two_files_make(void)
{
    two_files f = {.folder = "/tmp/anyrank-verify-XXXXXX"};
    if (!mkdtemp(f.folder))
        abort();
    snprintf(f.reference, sizeof f.reference, "%s/reference.safetensors", f.folder);
    snprintf(f.other, sizeof f.other, "%s/other.safetensors", f.folder);
    snprintf(f.allowed, sizeof f.allowed, "%s/allowed.safetensors", f.folder);
    return f;
}

static inline void two_files_end(const two_files *f)
{
    (void)remove_all(f->folder);
}

static inline void write_tensors(const char *path, const ar_st_tensor *t, size_t n)
{
    if (ari_st_write(path, t, n, NULL, 0) != AR_OK)
        abort();
}

static inline ar_st_tensor vector_of(const char *name, ar_dtype dtype, size_t n, const void *data)
{
    return (ar_st_tensor){.name = name, .dtype = dtype, .ndim = 1, .shape = {n}, .data = data};
}

/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_VERIFY_VERIFY_SUPPORT_H
#define TESTS_VERIFY_VERIFY_SUPPORT_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "anyrank/verify.h"

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

static inline void two_files_remove(const two_files *f)
{
    unlink(f->reference);
    unlink(f->other);
    unlink(f->allowed);
    rmdir(f->folder);
}

static inline void write_tensors(const char *path, const ar_st_tensor *t, size_t n)
{
    if (ar_st_write(path, t, n, NULL, 0) != AR_OK)
        abort();
}

static inline ar_st_tensor vector_of(const char *name, ar_dtype dtype, size_t n, const void *data)
{
    return (ar_st_tensor){.name = name, .dtype = dtype, .ndim = 1, .shape = {n}, .data = data};
}

/* One vector against another by `o`, whose paths are set here. The report is the caller's; NULL after an error. */
static inline ar_verify_report *verify_vectors(ar_verify_options o, ar_dtype dtype, size_t n, const void *a,
                                               const void *b)
{
    const two_files f = two_files_make();
    const ar_st_tensor reference = vector_of("x", dtype, n, a), other = vector_of("x", dtype, n, b);
    ar_verify_report *r = NULL;
    write_tensors(f.reference, &reference, 1);
    write_tensors(f.other, &other, 1);
    o.reference = f.reference;
    o.other = f.other;
    if (ar_verify(&r, &o) != AR_OK)
        r = NULL;
    two_files_remove(&f);
    return r;
}

#endif

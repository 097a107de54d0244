/* SPDX-License-Identifier: Apache-2.0 */
/* Files of tokens that are gone as soon as they are open. */
#pragma once

#include "io/st_bytes.h"
#include "ref/io/safetensors_private.h"
#include "tests/support/temporary.h"
#include "tests/support/test.h"
#include "verify/run/data_private.h"

/* What opening gives; the data itself, or NULL. */
static inline ar_status open_bytes(ar_data **d, const void *bytes, size_t n, ar_data_format format)
{
    const mem_file m = mem_file_of(bytes, n);
    *d = NULL;
    ar_error_clear();
    const ar_status st = ari_data_open(d, m.path, format);
    close(m.fd);
    return st;
}

/* A file of the name with one tensor of these bytes. */
static inline ar_status open_tensor(ar_data **d, const char *name, ar_dtype dtype, int ndim, const size_t *shape,
                                    const void *values)
{
    SCOPED(temp_end) const temp_path file = temp_file(".safetensors");
    ar_st_tensor t = {.name = name, .dtype = dtype, .ndim = ndim, .data = values};
    for (int i = 0; i < ndim; i++)
        t.shape[i] = shape[i];
    cr_assert_ok(ari_st_write(file.path, &t, 1, NULL, 0));
    *d = NULL;
    return ari_data_open(d, file.path, AR_DATA_AUTO);
}

static inline ar_status open_lines(ar_data **d, const char *lines)
{
    SCOPED(temp_end) const temp_path file = temp_bytes(".jsonl", lines, strlen(lines));
    *d = NULL;
    return ari_data_open(d, file.path, AR_DATA_AUTO);
}

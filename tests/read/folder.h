/* SPDX-License-Identifier: Apache-2.0 */
/* A folder of files that a test writes, gone with it. */
#pragma once

#include "anyrank/dump.h"
#include "ref/io/file.h"
#include "ref/io/safetensors_private.h"
#include "tests/support/folder.h"

static inline void put_text(const char *name, const char *text)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    cr_assert_ok(ari_file_write(path, text, strlen(text)));
}

/* A file with one F32 tensor, and its placements where they are not NULL. Returns its path, until the next call. */
static inline const char *put_tensor(const char *file, const char *name, int ndim, const size_t *shape,
                                     const float *data, const char *dcp, const char *own)
{
    static char path[256];
    const char *metadata[4];
    size_t n = 0;
    ar_st_tensor t = {.name = name, .dtype = AR_F32, .ndim = ndim, .data = data};
    for (int d = 0; d < ndim; d++)
        t.shape[d] = shape[d];
    if (dcp != NULL)
        metadata[n++] = "DCP_SHARDING_INFO", metadata[n++] = dcp;
    if (own != NULL)
        metadata[n++] = "ANYRANK_PLACEMENT", metadata[n++] = own;
    snprintf(path, sizeof path, "%s/%s", folder, file);
    cr_assert_ok(ari_st_write(path, &t, 1, metadata, n / 2));
    return path;
}

/* The status of opening the folder; the dump is closed again. */
static inline ar_status try_folder(void)
{
    OWNED(ar_dump_close) ar_dump *d = NULL;
    ar_error_clear();
    const ar_status st = ar_dump_open(&d, folder, NULL);
    cr_expect((st == AR_OK) == (d != NULL));
    return st;
}

/* Opening the folder fails, and the message holds both texts. */
static inline void expect_error(ar_status expected, const char *name, const char *detail)
{
    cr_expect_eq(try_folder(), expected, "%s", ar_error_message());
    cr_expect_eq(strncmp(ar_error_message(), name, strlen(name)), 0, "%s", ar_error_message());
    cr_expect_says(detail);
}

static inline ar_dump *open_folder(void)
{
    ar_dump *d = NULL;
    cr_assert_ok(ar_dump_open(&d, folder, NULL));
    return d;
}

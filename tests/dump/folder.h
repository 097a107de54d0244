/* SPDX-License-Identifier: Apache-2.0 */
/* A folder of files that a test writes, gone with it. */
#ifndef TESTS_DUMP_FOLDER_H
#define TESTS_DUMP_FOLDER_H

#include <criterion/criterion.h>
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "anyrank/dump.h"
#include "ref/io/file.h"

static char folder[64];

static inline void folder_begin(void)
{
    snprintf(folder, sizeof folder, "/tmp/anyrank-dump-XXXXXX");
    cr_assert_not_null(mkdtemp(folder));
}

static inline void folder_end(void)
{
    struct dirent **list = NULL;
    const int n = scandir(folder, &list, NULL, NULL);
    for (int i = 0; i < n; i++) {
        char path[512];
        snprintf(path, sizeof path, "%s/%s", folder, list[i]->d_name);
        unlink(path);
        free(list[i]);
    }
    free(list);
    rmdir(folder);
}

static inline void put_text(const char *name, const char *text)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    cr_assert_eq(ari_file_write(path, text, strlen(text)), AR_OK, "%s", ar_error_message());
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
    cr_assert_eq(ar_st_write(path, &t, 1, metadata, n / 2), AR_OK, "%s", ar_error_message());
    return path;
}

/* The status of opening the folder; the dump is closed again. */
static inline ar_status try_folder(void)
{
    ar_dump *d = NULL;
    ar_error_clear();
    const ar_status st = ar_dump_open(&d, folder, NULL);
    cr_expect((st == AR_OK) == (d != NULL));
    ar_dump_close(d);
    return st;
}

/* Opening the folder fails, and the message holds both texts. */
static inline void expect_error(ar_status expected, const char *name, const char *detail)
{
    cr_expect_eq(try_folder(), expected, "%s", ar_error_message());
    cr_expect_eq(strncmp(ar_error_message(), name, strlen(name)), 0, "%s", ar_error_message());
    cr_expect_not_null(strstr(ar_error_message(), detail), "expected '%s' in: %s", detail, ar_error_message());
}

static inline ar_dump *open_folder(void)
{
    ar_dump *d = NULL;
    cr_assert_eq(ar_dump_open(&d, folder, NULL), AR_OK, "%s", ar_error_message());
    return d;
}

#endif

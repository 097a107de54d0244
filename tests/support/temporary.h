/* SPDX-License-Identifier: Apache-2.0 */
/* Files and folders of a test's own, gone at the end of the block that has them:
 * SCOPED(temp_end) const temp_path t = temp_file(".json"); */
#pragma once

#include <ftw.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/support/scoped.h"

typedef struct temp_path {
    char path[64];
} temp_path;

static inline int remove_entry(const char *path, const struct stat *info, int kind, struct FTW *at)
{
    (void)info, (void)kind, (void)at;
    return remove(path);
}

/* Removes a folder with all that is in it, or a file. 0: it is gone. */
static inline int remove_all(const char *path)
{
    return nftw(path, remove_entry, 8, FTW_DEPTH | FTW_PHYS);
}

static inline void temp_end(const temp_path *t)
{
    (void)remove_all(t->path);
}

static inline temp_path temp_folder(void)
{
    temp_path t = {"/tmp/anyrank-test-XXXXXX"};
    if (!mkdtemp(t.path))
        abort();
    return t;
}

/* With n bytes, and a name that ends so. */
static inline temp_path temp_bytes(const char *suffix, const void *bytes, size_t n)
{
    temp_path t;
    snprintf(t.path, sizeof t.path, "/tmp/anyrank-test-XXXXXX%s", suffix);
    const int fd = mkstemps(t.path, (int)strlen(suffix));
    if (fd < 0 || write(fd, bytes, n) != (ssize_t)n || close(fd) != 0)
        abort();
    return t;
}

/* An empty one. */
static inline temp_path temp_file(const char *suffix)
{
    return temp_bytes(suffix, "", 0);
}

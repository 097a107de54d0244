/* SPDX-License-Identifier: Apache-2.0 */
/* A folder of a test's own, gone with all that is in it: TestSuite(NAME, .init = folder_begin, .fini = folder_end). */
#pragma once

#include <dirent.h>

#include "tests/support/temporary.h"
#include "tests/support/test.h"

static char folder[64];

static inline void folder_begin(void)
{
    snprintf(folder, sizeof folder, "/tmp/anyrank-test-XXXXXX");
    cr_assert_not_null(mkdtemp(folder));
}

static inline void folder_end(void)
{
    cr_assert_eq(remove_all(folder), 0);
}

/* The path of a name in it, until four more are asked for. */
static inline const char *in_folder(const char *name)
{
    static char path[4][192];
    static int next;
    char *p = path[next++ % 4];
    snprintf(p, sizeof path[0], "%s/%s", folder, name);
    return p;
}

/* Its entries. *hidden (NULL: not wanted): those whose names begin with a dot. */
static inline size_t count_files(size_t *hidden)
{
    size_t n = 0, dots = 0;
    DIR *d = opendir(folder);
    cr_assert_not_null(d);
    for (const struct dirent *e = readdir(d); e != NULL; e = readdir(d)) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0)
            continue;
        n++;
        dots += e->d_name[0] == '.';
    }
    closedir(d);
    if (hidden)
        *hidden = dots;
    return n;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "anyrank/config.h"

/* All four come from CMakeLists.txt: the data of the source tree, the build tree, the installed data as an absolute
 * path and as one relative to the folder of the installed command. */
#if !defined(ANYRANK_SOURCE_DATA) || !defined(ANYRANK_BUILD_TREE) || !defined(ANYRANK_INSTALLED_DATA) || \
    !defined(ANYRANK_DATA_FROM_COMMAND)
#error "the folders of the bundled models are to be defined"
#endif

/* Of the folder beside the running program, which no constant can hold: an installed tree may be moved. */
static _Thread_local char beside[PATH_MAX];

/* The text is what every data directory has. */
static bool has_data(const char *folder)
{
    char text[PATH_MAX];
    const int n = snprintf(text, sizeof text, "%s/text.txt", folder);
    return n > 0 && (size_t)n < sizeof text && access(text, R_OK) == 0;
}

static bool is_below(const char *path, const char *folder)
{
    const size_t n = strlen(folder);
    return strncmp(path, folder, n) == 0 && path[n] == '/';
}

const char *ar_data_dir(void)
{
    const char *set = getenv("ANYRANK_DATA");
    if (set != NULL && set[0] != '\0')
        return set;
    char program[PATH_MAX];
    const ssize_t length = readlink("/proc/self/exe", program, sizeof program);
    if (length <= 0 || (size_t)length >= sizeof program) /* no /proc here */
        return has_data(ANYRANK_INSTALLED_DATA) ? ANYRANK_INSTALLED_DATA : ANYRANK_SOURCE_DATA;
    program[length] = '\0';
    if (is_below(program, ANYRANK_BUILD_TREE) && has_data(ANYRANK_SOURCE_DATA))
        return ANYRANK_SOURCE_DATA;
    *strrchr(program, '/') = '\0';
    const int n = snprintf(beside, sizeof beside, "%s/%s", program, ANYRANK_DATA_FROM_COMMAND);
    if (n > 0 && (size_t)n < sizeof beside && has_data(beside)) {
        /* "/usr/share/anyrank" reads better than "/usr/bin/../share/anyrank". */
        return realpath(beside, program) != NULL ? memcpy(beside, program, strlen(program) + 1) : beside;
    }
    return ANYRANK_INSTALLED_DATA;
}

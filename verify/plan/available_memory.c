/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/plan/estimate.h"

#include <inttypes.h>
#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/size.h"

enum { PATH_CAP = 2 * PATH_MAX };

static FILE *open_at(const char *root, const char *path)
{
    char full[PATH_CAP];
    const int n = snprintf(full, sizeof full, "%s%s", root, path);
    return n > 0 && (size_t)n < sizeof full ? fopen(full, "r") : NULL;
}

/* Reads the number after `key` at the start of a line and multiplies it by `unit`. Returns false if the file, the line
 * or the number is missing. */
static bool number_after(const char *root, const char *path, const char *key, uint64_t unit, size_t *value)
{
    char line[512];
    FILE *f = open_at(root, path);
    bool found = false;
    while (f && !found && fgets(line, sizeof line, f)) {
        if (strncmp(line, key, strlen(key)) != 0)
            continue;
        char *end = NULL;
        const char *begin = line + strlen(key) + strspn(line + strlen(key), " \t");
        const uint64_t n = strtoull(begin, &end, 10);
        found = end != begin && *begin != '-';
        if (found)
            *value = n <= SIZE_MAX / unit ? (size_t)(n * unit) : SIZE_MAX;
        else
            break; /* "max", "unlimited" */
    }
    if (f)
        fclose(f);
    return found;
}

/* --- control groups ------------------------------------------------------------------------------------------------*/

typedef struct cgroup_files {
    const char *mount[3]; /* possible mount points of the hierarchy, terminated by NULL */
    const char *limit, *usage, *reclaimable;
} cgroup_files;

static const cgroup_files version1 = {
    {"/sys/fs/cgroup/memory", NULL, NULL}, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"};
static const cgroup_files version2 = {
    {"/sys/fs/cgroup", "/sys/fs/cgroup/unified", NULL}, "memory.max", "memory.current", "inactive_file"};

static bool read_group(const char *root, const char *folder, const char *file, const char *key, size_t *value)
{
    char path[PATH_CAP];
    const int n = snprintf(path, sizeof path, "%s/%s", folder, file);
    return n > 0 && (size_t)n < sizeof path && number_after(root, path, key, 1, value);
}

static size_t left_in_group(const char *root, const char *folder, const cgroup_files *files)
{
    size_t limit = 0, used = 0, reclaimable = 0;
    if (!read_group(root, folder, files->limit, "", &limit))
        return SIZE_MAX;
    if (!read_group(root, folder, files->usage, "", &used))
        return limit;
    if (read_group(root, folder, "memory.stat", files->reclaimable, &reclaimable))
        used -= ari_smaller(used, reclaimable);
    return limit > used ? limit - used : 0;
}

/* Returns the memory left in a group and all its parents. In a container the path may exist only on the host; then the
 * container's group is the root of the mount, where the walk ends. */
static size_t left_in_groups(const char *root, const char *group, const cgroup_files *files)
{
    size_t available = SIZE_MAX;
    for (int i = 0; i < 3 && files->mount[i]; i++) {
        char folder[PATH_MAX];
        const size_t mount = strlen(files->mount[i]);
        const bool outside = strstr(group, "/..") != NULL; /* the path belongs to another namespace and is not below
                                                              this mount */
        const int n = snprintf(folder, sizeof folder, "%s%s", files->mount[i], outside ? "" : group);
        if (n < 0 || (size_t)n >= sizeof folder)
            continue;
        for (;;) {
            available = ari_smaller(available, left_in_group(root, folder, files));
            char *slash = strrchr(folder + mount, '/');
            if (!slash)
                break;
            *slash = '\0';
        }
    }
    return available;
}

static bool lists(const char *controllers, const char *name)
{
    const size_t n = strlen(name);
    for (const char *cursor = controllers; cursor; cursor = strchr(cursor, ',') ? strchr(cursor, ',') + 1 : NULL) {
        if (strncmp(cursor, name, n) == 0 && (cursor[n] == ',' || cursor[n] == '\0'))
            return true;
    }
    return false;
}

/* Reads /proc/self/cgroup, which has "0::/group" for version 2 and "4:cpu,memory:/group" for version 1, or both. */
static size_t left_by_groups(const char *root)
{
    char line[PATH_MAX + 64];
    size_t available = SIZE_MAX;
    FILE *f = open_at(root, "/proc/self/cgroup");
    while (f && fgets(line, sizeof line, f)) {
        line[strcspn(line, "\n")] = '\0';
        char *controllers = strchr(line, ':');
        char *group = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!group)
            continue;
        *controllers++ = '\0';
        *group++ = '\0';
        if (*controllers == '\0')
            available = ari_smaller(available, left_in_groups(root, group, &version2));
        else if (lists(controllers, "memory"))
            available = ari_smaller(available, left_in_groups(root, group, &version1));
    }
    if (f)
        fclose(f);
    return available;
}

/* --- the whole -----------------------------------------------------------------------------------------------------*/

size_t ari_available_space(const char *root)
{
    size_t limit = 0, mapped = 0;
    if (!number_after(root, "/proc/self/limits", "Max address space", 1, &limit))
        return SIZE_MAX;
    if (!number_after(root, "/proc/self/status", "VmSize:", 1024, &mapped))
        return limit;
    return limit > mapped ? limit - mapped : 0;
}

size_t ari_available_memory(const char *root)
{
    size_t available = SIZE_MAX;
    if (!number_after(root, "/proc/meminfo", "MemAvailable:", 1024, &available))
        available = SIZE_MAX;
    return ari_smaller(available, left_by_groups(root));
}

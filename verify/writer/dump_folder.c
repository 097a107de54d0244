/* SPDX-License-Identifier: Apache-2.0 */
/* Folders that hold ranks' files and the facts of their run may be replaced. All other folders belong to the user. */
#include "verify/writer/dump_ranks.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "ref/io/file.h"

/* --- of ranks ----------------------------------------------------------------------------------------------------- */

/* Returns true for the file names that ar_dump_write uses: "rank-00003.safetensors", and "rank-00003-2.safetensors" for
 * a second file of the rank. Partly written files (atomic_file.c) count too. */
static bool is_rank_file(const char *name)
{
    static const char digits[] = "0123456789";
    if (strncmp(name, ".anyrank-", 9) == 0 && ari_ends_in(name, ".tmp"))
        return true;
    if (strncmp(name, "rank-", 5) != 0 || strspn(name + 5, digits) < 5)
        return false;
    const char *rest = name + 5 + strspn(name + 5, digits);
    if (*rest == '-' && strspn(rest + 1, digits) > 0)
        rest += 1 + strspn(rest + 1, digits);
    return strcmp(rest, ".safetensors") == 0;
}

static bool is_model_file(const char *name, const char *path)
{
    return strcmp(name, ARI_DUMP_MODEL) == 0 && ari_dump_model_is(path);
}

ar_status ari_folder_path(char *path, size_t cap, const char *folder, const char *name)
{
    const int n = snprintf(path, cap, "%s/%s", folder, name);
    if (n < 0 || (size_t)n >= cap)
        return ar_error_set(AR_ERR_ARG, "%s: the path is too long", ARI_SHOW(folder));
    return AR_OK;
}

static ar_status expect_rank_file(const char *folder, const char *name)
{
    char path[2048];
    struct stat s;
    AR_TRY(ari_folder_path(path, sizeof path, folder, name));
    if (lstat(path, &s) == 0 && S_ISREG(s.st_mode) && (is_rank_file(name) || is_model_file(name, path)))
        return AR_OK;
    return ar_error_set(AR_ERR_IO,
                        "%s: holds '%s', which is no file of a rank: it cannot be replaced by a dump; remove it, or "
                        "name another folder",
                        ARI_SHOW(folder), ARI_SHOW(name));
}

static ar_status remove_file(const char *folder, const char *name)
{
    char path[2048];
    AR_TRY(ari_folder_path(path, sizeof path, folder, name));
    return unlink(path) == 0 ? AR_OK : ari_io_fail("remove the file", path);
}

static int is_entry(const struct dirent *e)
{
    return strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0;
}

/* Calls f for every entry until a call fails. *exists: whether the folder exists. */
static ar_status visit_folder(const char *folder, bool *exists, ar_status (*f)(const char *folder, const char *name))
{
    struct dirent **entry = NULL;
    const int n = scandir(folder, &entry, is_entry, NULL);
    ar_status st = n >= 0 || errno == ENOENT ? AR_OK : ari_io_fail("open the folder", folder);
    *exists = n >= 0;
    for (int i = 0; i < n; i++) {
        if (st == AR_OK)
            st = f(folder, entry[i]->d_name);
        free(entry[i]);
    }
    free(entry);
    return st;
}

ar_status ari_dump_folder_check(const char *folder)
{
    bool exists = false;
    return visit_folder(folder, &exists, expect_rank_file);
}

ar_status ari_dump_folder_clear(bool *exists, const char *folder)
{
    AR_TRY(ari_dump_folder_check(folder));
    return visit_folder(folder, exists, remove_file);
}

ar_status ari_dump_folder_remove(const char *folder)
{
    bool exists = false;
    AR_TRY(ari_dump_folder_clear(&exists, folder));
    if (exists && rmdir(folder) != 0)
        return ari_io_fail("remove the folder", folder);
    return AR_OK;
}

/* --- of a check --------------------------------------------------------------------------------------------------- */

static ar_status count_entry(const char *folder, const char *name)
{
    (void)name;
    return ar_error_set(AR_ERR_IO, "%s: is not empty", ARI_SHOW(folder));
}

/* Returns true if the folder is empty. An empty folder may be replaced. */
static bool is_empty(const char *folder)
{
    bool exists = false;
    return visit_folder(folder, &exists, count_entry) == AR_OK;
}

static bool is_dump_file(const char *name, const char *path, mode_t mode)
{
    return S_ISREG(mode) &&
           (strcmp(name, ARI_DUMP_REFERENCE) == 0 || strcmp(name, ARI_DUMP_ALLOWED) == 0 || is_model_file(name, path));
}

static ar_status expect_dump(const char *folder, const char *name)
{
    char path[2048];
    struct stat s;
    AR_TRY(ari_folder_path(path, sizeof path, folder, name));
    if (lstat(path, &s) != 0)
        return ari_io_fail("look at", path);
    if (is_dump_file(name, path, s.st_mode))
        return AR_OK;
    if (S_ISDIR(s.st_mode))
        return is_empty(path) ? AR_OK : ari_dump_folder_check(path);
    return ar_error_set(AR_ERR_IO,
                        "%s: holds '%s', which is no part of an earlier dump: it cannot be replaced by one; remove it, "
                        "or name another folder",
                        ARI_SHOW(folder), ARI_SHOW(name));
}

static ar_status remove_dump(const char *folder, const char *name)
{
    char path[2048];
    struct stat s;
    AR_TRY(ari_folder_path(path, sizeof path, folder, name));
    if (lstat(path, &s) != 0)
        return ari_io_fail("look at", path);
    if (is_dump_file(name, path, s.st_mode))
        return remove_file(folder, name);
    return is_empty(path) ? AR_OK : ari_dump_folder_remove(path);
}

/* Checks that the folder's file system has about this many bytes free. */
static ar_status expect_room(const char *folder, size_t bytes)
{
    static const double sure = 0.85; /* safety factor of the size estimate, whose error is smaller */
    struct statvfs s;
    if (statvfs(folder, &s) != 0 || s.f_blocks == 0) /* a file system that does not report its size */
        return AR_OK;
    const double free_bytes = (double)s.f_bavail * (double)s.f_frsize;
    if ((double)bytes * sure <= free_bytes)
        return AR_OK;
    return ar_error_set(AR_ERR_IO, "%s: the dump takes about %.3g GB, and its disk has %.3g GB left", ARI_SHOW(folder),
                        (double)bytes * 1e-9, free_bytes * 1e-9);
}

/* Checks that a new folder's parent exists and has enough space. */
static ar_status expect_parent(const char *folder, size_t bytes)
{
    char parent[2048] = "./";
    struct stat s;
    size_t n = strlen(folder);
    while (n > 0 && folder[n - 1] == '/')
        n--;
    while (n > 0 && folder[n - 1] != '/')
        n--;
    if (n >= sizeof parent)
        return ar_error_set(AR_ERR_ARG, "%s: the path is too long", ARI_SHOW(folder));
    if (n > 0)
        snprintf(parent, sizeof parent, "%.*s", (int)n, folder);
    return stat(parent, &s) == 0 ? expect_room(parent, bytes) : ari_io_fail("open the folder", parent);
}

/* Space of an earlier dump counts as free, because the earlier dump is removed first. */
ar_status ari_dump_check_folder_check(const char *folder, size_t bytes)
{
    bool exists = false;
    AR_TRY(visit_folder(folder, &exists, expect_dump));
    if (!exists)
        return expect_parent(folder, bytes);
    return is_empty(folder) ? expect_room(folder, bytes) : AR_OK;
}

ar_status ari_dump_check_folder_clear(const char *folder)
{
    bool exists = false;
    AR_TRY(ari_folder_make(folder));
    AR_TRY(ari_dump_check_folder_check(folder, 0));
    return visit_folder(folder, &exists, remove_dump);
}

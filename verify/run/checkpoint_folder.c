/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/run/checkpoint.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ref/core/os/os.h"
#include "ref/core/size.h"
#include "ref/io/file.h"

/* Only one process writes at a time, so the temporary names need no number. */
#define NEW_FOLDER ".anyrank-new"
#define OLD_FOLDER ".anyrank-old"
#define NEW_LINK ".anyrank-latest"

void ari_checkpoint_name(char out[ARI_CHECKPOINT_NAME], uint64_t step)
{
    snprintf(out, ARI_CHECKPOINT_NAME, "step-%08" PRIu64, step);
}

/* Parses the step out of a checkpoint's name; returns false for any other name. */
static bool step_of(const char *name, uint64_t *step)
{
    char canonical_name[ARI_CHECKPOINT_NAME];
    if (strncmp(name, "step-", 5) != 0 || strspn(name + 5, "0123456789") != strlen(name + 5) || strlen(name) > 25)
        return false;
    errno = 0;
    *step = strtoull(name + 5, NULL, 10);
    ari_checkpoint_name(canonical_name, *step);
    return errno == 0 && strcmp(name, canonical_name) == 0;
}

/* --- looking into folders ----------------------------------------------------------------------------------------- */
/* Calls visit for every name in a folder except "." and "..", until visit returns false. Returns false if the folder
 * does not exist or visit returned false. */
static bool for_each_name(int dir_fd, const char *folder, bool (*visit)(void *user, const char *name), void *user)
{
    const int fd = openat(dir_fd, folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    DIR *list = fd < 0 ? NULL : fdopendir(fd);
    if (list == NULL) {
        if (fd >= 0)
            close(fd);
        return false;
    }
    bool go_on = true;
    for (const struct dirent *e = readdir(list); e != NULL && go_on; e = readdir(list)) {
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0)
            go_on = visit(user, e->d_name);
    }
    closedir(list);
    return go_on;
}

static bool is_ours(void *user, const char *name)
{
    static const char *const files[] = {ARI_CHECKPOINT_CONFIG, ARI_CHECKPOINT_WEIGHTS, ARI_CHECKPOINT_OPTIMIZER,
                                        ARI_CHECKPOINT_TRAINING};
    size_t *count = user;
    const bool ours = ARI_IS_AMONG(name, files);
    *count += ours;
    return ours;
}

/* Returns true if a folder is a complete checkpoint and contains nothing else. */
static bool holds_ours_alone(const ari_checkpoint_folder *f, const char *folder)
{
    size_t count = 0;
    return for_each_name(f->fd, folder, is_ours, &count) && count > 0;
}

struct removal {
    int dir_fd;
    const char *folder;
};

static bool remove_one(void *user, const char *name)
{
    const struct removal *r = user;
    char path[sizeof OLD_FOLDER + 1 + NAME_MAX + 1];
    snprintf(path, sizeof path, "%s/%s", r->folder, name);
    (void)unlinkat(r->dir_fd, path, 0);
    return true;
}

/* Removes one of the two hidden folders, which only this file creates, with its contents. */
static void remove_hidden(const ari_checkpoint_folder *f, const char *folder)
{
    struct removal r = {f->fd, folder};
    (void)for_each_name(f->fd, folder, remove_one, &r);
    (void)unlinkat(f->fd, folder, AT_REMOVEDIR);
}

/* The steps of a folder's checkpoints. */
struct steps {
    uint64_t *list;
    size_t count, capacity;
    ar_status status;
};

static bool note_step(void *user, const char *name)
{
    struct steps *s = user;
    uint64_t step = 0;
    if (!step_of(name, &step))
        return true;
    s->status = ARI_GROW(&s->list, &s->capacity, s->count, "the list of checkpoints");
    if (s->status == AR_OK)
        s->list[s->count++] = step;
    return s->status == AR_OK;
}

/* --- the folder --------------------------------------------------------------------------------------------------- */
static ar_status fail_entry(const ari_checkpoint_folder *f, const char *action, const char *name)
{
    char path[ARI_PRINTABLE];
    const int error = errno;
    ari_printable(path, sizeof path, f->path);
    return ar_error_set(AR_ERR_IO, "%s: cannot %s %s: %s", path, action, name, strerror(error));
}

static ar_status check_fresh(const ari_checkpoint_folder *f)
{
    struct steps s = {.status = AR_OK};
    char name[ARI_CHECKPOINT_NAME];
    (void)for_each_name(f->fd, ".", note_step, &s);
    ar_status st = s.status;
    if (st == AR_OK && s.count > 0) {
        ari_checkpoint_name(name, s.list[0]);
        st = ar_error_set(AR_ERR_ARG, "%s: holds checkpoints of another run, %s; resume it, or choose another folder",
                          ARI_SHOW(f->path), name);
    }
    free(s.list);
    return st;
}

/* Locks the folder until the process ends. On a file system without locks, the user must not run two processes in one
 * folder. */
static ar_status lock(const ari_checkpoint_folder *f)
{
    if (flock(f->fd, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK)
        return AR_OK;
    return ar_error_set(AR_ERR_IO, "%s: another process writes checkpoints there", ARI_SHOW(f->path));
}

/* Checks that an existing `latest` is a link of a checkpoint, which the next checkpoint may replace. */
static ar_status check_latest(const ari_checkpoint_folder *f)
{
    char target[ARI_CHECKPOINT_NAME + 1];
    uint64_t step = 0;
    const ssize_t n = readlinkat(f->fd, ARI_CHECKPOINT_LATEST, target, sizeof target - 1);
    if (n < 0 && errno == ENOENT)
        return AR_OK;
    target[n < 0 ? 0 : n] = '\0';
    if (n > 0 && step_of(target, &step))
        return AR_OK;
    return ar_error_set(AR_ERR_IO, "%s/" ARI_CHECKPOINT_LATEST ": is no link to a checkpoint, so it is not one of ours",
                        ARI_SHOW(f->path));
}

/* Finds out before the training whether the folder can be written. */
static ar_status try_writing(const ari_checkpoint_folder *f)
{
    const bool is_created = mkdirat(f->fd, NEW_FOLDER, 0777) == 0;
    if (!is_created && errno == EEXIST)
        return ar_error_set(AR_ERR_IO, "%s/" NEW_FOLDER ": is in the way, and not one of ours", ARI_SHOW(f->path));
    if (!is_created)
        return fail_entry(f, "make the folder", NEW_FOLDER);
    (void)unlinkat(f->fd, NEW_FOLDER, AT_REMOVEDIR);
    return AR_OK;
}

ar_status ari_checkpoint_folder_open(ari_checkpoint_folder *f, const char *path, bool fresh)
{
    *f = (ari_checkpoint_folder){.fd = -1};
    if (path == NULL || path[0] == '\0')
        return ar_error_set(AR_ERR_ARG, "the folder for checkpoints has no name");
    if (mkdir(path, 0777) != 0 && errno != EEXIST)
        return ari_io_fail("make the folder", path);
    f->path = realpath(path, NULL);
    if (f->path == NULL)
        return ari_io_fail("find the folder", path);
    f->fd = open(f->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (f->fd < 0)
        return ari_io_fail("open the folder", path);
    AR_TRY(lock(f));
    AR_TRY(check_latest(f));
    if (fresh)
        AR_TRY(check_fresh(f));
    remove_hidden(f, NEW_FOLDER);
    remove_hidden(f, OLD_FOLDER);
    (void)unlinkat(f->fd, NEW_LINK, 0);
    return try_writing(f);
}

void ari_checkpoint_folder_close(ari_checkpoint_folder *f)
{
    if (f->fd >= 0)
        close(f->fd);
    free(f->path);
    *f = (ari_checkpoint_folder){.fd = -1};
}

/* --- one checkpoint ----------------------------------------------------------------------------------------------- */
static bool exists(const ari_checkpoint_folder *f, const char *name)
{
    struct stat info;
    return fstatat(f->fd, name, &info, AT_SYMLINK_NOFOLLOW) == 0;
}

ar_status ari_checkpoint_folder_begin(ari_checkpoint_folder *f, char **out, uint64_t step)
{
    char name[ARI_CHECKPOINT_NAME];
    ari_checkpoint_name(name, step);
    if (exists(f, name) && !holds_ours_alone(f, name))
        return ar_error_set(AR_ERR_IO, "%s/%s: is in the way, and holds files that are not of a checkpoint",
                            ARI_SHOW(f->path), name);
    AR_TRY(ari_file_path(out, f->path, NEW_FOLDER));
    ari_checkpoint_folder_abandon(f); /* remove what a failed removal may have left */
    if (mkdirat(f->fd, NEW_FOLDER, 0777) == 0)
        return AR_OK;
    free(*out);
    *out = NULL;
    return fail_entry(f, "make the folder", NEW_FOLDER);
}

void ari_checkpoint_folder_abandon(ari_checkpoint_folder *f)
{
    (void)unlinkat(f->fd, NEW_LINK, 0);
    remove_hidden(f, NEW_FOLDER);
}

/* The files are durable once their folder is. */
static ar_status sync_new(const ari_checkpoint_folder *f)
{
    const int fd = openat(f->fd, NEW_FOLDER, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return fail_entry(f, "open", NEW_FOLDER);
    /* Some file systems do not support fsync of folders (EINVAL); the files are synced in any case. */
    const ar_status st = fsync(fd) == 0 || errno == EINVAL ? AR_OK : fail_entry(f, "sync", NEW_FOLDER);
    close(fd);
    return st;
}

/* Renames the new folder, or exchanges it with the existing folder of that name. A reader always finds one of the
 * two. */
static int swap(const ari_checkpoint_folder *f, const char *name, bool replace)
{
    return replace ? ari_rename_exchange(f->fd, NEW_FOLDER, name) : ari_rename_new(f->fd, NEW_FOLDER, name);
}

static int swap_back(const ari_checkpoint_folder *f, const char *name, bool replace)
{
    return replace ? swap(f, name, true) : renameat(f->fd, name, f->fd, NEW_FOLDER);
}

ar_status ari_checkpoint_folder_publish(ari_checkpoint_folder *f, uint64_t step)
{
    char name[ARI_CHECKPOINT_NAME];
    ari_checkpoint_name(name, step);
    const bool replace = exists(f, name);
    ar_status st = sync_new(f);
    if (st == AR_OK && symlinkat(name, f->fd, NEW_LINK) != 0)
        st = fail_entry(f, "make the link", NEW_LINK);
    if (st == AR_OK && swap(f, name, replace) != 0)
        st = fail_entry(f, "give its name to", name);
    else if (st == AR_OK && renameat(f->fd, NEW_LINK, f->fd, ARI_CHECKPOINT_LATEST) != 0) {
        st = fail_entry(f, "rename to", ARI_CHECKPOINT_LATEST);
        (void)swap_back(f, name, replace);
    }
    if (st == AR_OK)
        (void)fsync(f->fd);           /* sync both names; some file systems refuse, as above */
    ari_checkpoint_folder_abandon(f); /* the old checkpoint of the same step, or the new one after a failure */
    return st;
}

static int newest_first(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x < y) - (x > y);
}

void ari_checkpoint_folder_keep(ari_checkpoint_folder *f, uint64_t step, size_t keep_count)
{
    struct steps s = {.status = AR_OK};
    char name[ARI_CHECKPOINT_NAME];
    size_t kept_count = 0;
    if (keep_count == 0)
        return;
    (void)for_each_name(f->fd, ".", note_step, &s);
    ARI_SORT(s.list, s.count, newest_first);
    for (size_t i = 0; i < s.count && s.status == AR_OK; i++) {
        if (s.list[i] > step || kept_count++ < keep_count)
            continue;
        ari_checkpoint_name(name, s.list[i]);
        if (holds_ours_alone(f, name) && renameat(f->fd, name, f->fd, OLD_FOLDER) == 0)
            remove_hidden(f, OLD_FOLDER);
    }
    free(s.list);
}

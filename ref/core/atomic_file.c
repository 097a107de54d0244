/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/core/atomic_file.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <unistd.h>

#include "ref/core/os/os.h"

/* A crashed process may have left temporary files whose names recur with its process number. */
#define TEMPORARY_NAMES 1000
/* Length of a temporary name without its folder: two numbers and the text around them. */
#define TEMPORARY_BYTES 64

ar_status ari_io_fail(const char *action, const char *path)
{
    const int error = errno;
    return ar_error_set(error == ENOMEM ? AR_ERR_MEMORY : AR_ERR_IO, "%s: cannot %s: %s", ARI_SHOW(path), action,
                        strerror(error));
}

struct ari_atomic_file {
    int fd;
    char *path;    /* final name with links resolved, since the file is replaced and not the link */
    char *temp;    /* NULL: written directly */
    bool named;    /* true if temp exists in the folder and must be removed; otherwise the file has no name yet */
    size_t offset; /* offset of the next byte */
};

/* Returns the length of the folder part of `path`, including the slash. */
static size_t folder_length(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash == NULL ? 0 : (size_t)(slash - path) + 1;
}

/* Opens a file without a name, which vanishes with the process, however that ends. Returns false if the system has
 * none. */
static bool open_unnamed(ari_atomic_file *o)
{
    const size_t folder = folder_length(o->path);
    snprintf(o->temp, folder + 2, "%.*s", folder == 0 ? 1 : (int)folder, folder == 0 ? "." : o->path);
    o->fd = ari_unnamed_open(o->temp);
    return o->fd >= 0;
}

/* Creates a file under the first free temporary name, or links the unnamed file to that name. */
static bool take_temporary_name(ari_atomic_file *o)
{
    const size_t folder = folder_length(o->path);
    const bool create = o->fd < 0;
    for (int i = 0; i < TEMPORARY_NAMES && !o->named; i++) {
        snprintf(o->temp, folder + TEMPORARY_BYTES, "%.*s.anyrank-%ld-%d.tmp", (int)folder, o->path, (long)getpid(), i);
        if (create)
            o->fd = open(o->temp, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        o->named = create ? o->fd >= 0 : ari_unnamed_link(o->fd, o->temp);
        if (!o->named && errno != EEXIST)
            break;
    }
    return o->named;
}

static ar_status open_temporary(ari_atomic_file *o)
{
    o->temp = malloc(folder_length(o->path) + TEMPORARY_BYTES);
    if (o->temp == NULL)
        return ar_error_set(AR_ERR_MEMORY, "%s: no memory for a file name", ARI_SHOW(o->path));
    if (open_unnamed(o) || take_temporary_name(o))
        return AR_OK;
    return ari_io_fail("create a file in its folder", o->path);
}

ar_status ari_atomic_file_create(ari_atomic_file **out, const char *path)
{
    const bool empty = path == NULL || path[0] == '\0';
    if (empty || strlen(path) > PATH_MAX) {
        ar_error_set(AR_ERR_ARG, "the name of a file to write is %s", empty ? "empty" : "too long");
        return AR_ERR_ARG;
    }
    ari_atomic_file *o = calloc(1, sizeof *o);
    if (o == NULL) {
        ar_error_set(AR_ERR_MEMORY, "%s: no memory to write it", ARI_SHOW(path));
        return AR_ERR_MEMORY;
    }
    ar_status st = AR_OK;
    struct stat info;
    o->fd = -1;
    o->path = realpath(path, NULL);
    if (o->path == NULL && lstat(path, &info) == 0 && S_ISLNK(info.st_mode)) {
        free(o);
        (void)stat(path, &info); /* sets errno */
        return ari_io_fail("follow the link", path);
    }
    if (o->path == NULL)
        o->path = strdup(path);
    if (o->path == NULL) {
        st = ar_error_set(AR_ERR_MEMORY, "%s: no memory to write it", ARI_SHOW(path));
    } else if (stat(o->path, &info) == 0 && !S_ISREG(info.st_mode)) {
        o->fd = open(o->path, O_WRONLY | O_CLOEXEC);
        if (o->fd < 0)
            st = ari_io_fail("write", path);
    } else {
        st = open_temporary(o);
    }
    if (st != AR_OK) {
        ari_atomic_file_discard(o);
        return st;
    }
    *out = o;
    return AR_OK;
}

ar_status ari_atomic_file_check(const char *path)
{
    struct stat s;
    if (stat(path, &s) == 0 && !S_ISREG(s.st_mode) && !S_ISDIR(s.st_mode))
        return AR_OK;
    ari_atomic_file *o = NULL;
    AR_TRY(ari_atomic_file_create(&o, path));
    ari_atomic_file_discard(o);
    return AR_OK;
}

ar_status ari_atomic_file_write(ari_atomic_file *o, const void *data, size_t bytes)
{
    size_t written = 0;
    while (written < bytes) {
        const size_t step = bytes - written < ARI_TRANSFER_BYTES ? bytes - written : ARI_TRANSFER_BYTES;
        const ssize_t result = write(o->fd, (const char *)data + written, step);
        if (result < 0 && errno == EINTR)
            continue;
        if (result <= 0)
            return ari_io_fail("write", o->path);
        written += (size_t)result;
        o->offset += (size_t)result;
    }
    return AR_OK;
}

ar_status ari_atomic_file_stream(FILE **out, const ari_atomic_file *o)
{
    const int fd = fcntl(o->fd, F_DUPFD_CLOEXEC, 0);
    *out = fd < 0 ? NULL : fdopen(fd, "w");
    if (*out)
        return AR_OK;
    const ar_status st = ari_io_fail("write", o->path);
    if (fd >= 0)
        close(fd);
    return st;
}

ar_status ari_atomic_file_stream_end(FILE *f, const ari_atomic_file *o)
{
    const bool failed = ferror(f) != 0;
    const int reason = errno; /* once a write has failed, all later ones have failed too */
    const bool closed = fclose(f) == 0;
    errno = failed ? reason : errno;
    return closed && !failed ? AR_OK : ari_io_fail("write", o->path);
}

/* The name itself is durable once the folder is. Some file systems refuse this; the data is safe all the same. */
static void sync_folder(const char *path)
{
    ARI_OWNED char *folder = strndup(path, folder_length(path));
    if (folder == NULL)
        return;
    const int fd = open(folder[0] == '\0' ? "." : folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return;
    (void)fsync(fd);
    close(fd);
}

/* Does everything that can fail for lack of space or because of a bad disk. A device does not support fsync and does
 * not need it. */
static ar_status sync_file(const ari_atomic_file *o)
{
    return o->temp == NULL || fsync(o->fd) == 0 ? AR_OK : ari_io_fail("write", o->path);
}

/* Moves a synced file to its final name. A free name takes an unnamed file in one step. Replacing an old file takes two
 * steps, and only a process that ends between them leaves a temporary name behind. */
static ar_status publish(ari_atomic_file *o)
{
    if (o->temp == NULL || o->named) { /* an unnamed file has no name to remove */
        const int closed = close(o->fd);
        o->fd = -1;
        if (closed != 0)
            return ari_io_fail("write", o->path);
    }
    if (o->temp == NULL)
        return AR_OK;
    if (o->named || !ari_unnamed_link(o->fd, o->path)) {
        if (!o->named && errno != EEXIST)
            return ari_io_fail("give its name to", o->path);
        if (!take_temporary_name(o))
            return ari_io_fail("create a file in its folder", o->path);
        if (rename(o->temp, o->path) != 0)
            return ari_io_fail("rename to", o->path);
    }
    o->named = false;
    sync_folder(o->path);
    return AR_OK;
}

ar_status ari_atomic_file_commit_all(ari_atomic_file *const *list, size_t n)
{
    ar_status st = AR_OK;
    for (size_t i = 0; i < n && st == AR_OK; i++)
        st = list[i] == NULL ? AR_OK : sync_file(list[i]);
    for (size_t i = 0; i < n && st == AR_OK; i++)
        st = list[i] == NULL ? AR_OK : publish(list[i]);
    for (size_t i = 0; i < n; i++)
        ari_atomic_file_discard(list[i]);
    return st;
}

ar_status ari_atomic_file_commit(ari_atomic_file *o)
{
    AR_TRY(sync_file(o));
    return publish(o);
}

void ari_atomic_file_discard(ari_atomic_file *o)
{
    if (o == NULL)
        return;
    if (o->fd >= 0)
        close(o->fd);
    if (o->named)
        unlink(o->temp);
    free(o->temp);
    free(o->path);
    free(o);
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/io/file.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Linux transfers at most 0x7ffff000 bytes in one call; a smaller step keeps the arithmetic away from SSIZE_MAX. */
#define TRANSFER_BYTES ((size_t)1 << 30)
/* A crashed process may have left temporary files whose names come round again with its process number. */
#define TEMPORARY_NAMES 1000

static ar_status fail(const char *what, const char *path)
{
    char text[128];
    const int error = errno;
    return ar_error_set(AR_ERR_IO, "%s: cannot %s: %s", ARI_SHOW(path), what, strerror_r(error, text, sizeof text));
}

const char *ari_printable(char *out, size_t cap, const char *text)
{
    size_t n = 0;
    for (; text[n] != '\0' && n + 1 < cap; n++)
        out[n] = (unsigned char)text[n] < 0x20 || text[n] == 0x7f ? '?' : text[n];
    out[n] = '\0';
    if (text[n] != '\0' && n >= 3)
        memcpy(out + n - 3, "...", 3);
    return out;
}

ar_status ari_file_open(int *fd, size_t *bytes, const char *path)
{
    if (path == NULL)
        return ar_error_set(AR_ERR_ARG, "a path is missing");
    /* O_NONBLOCK: opening a named pipe without a writer would wait for ever. It changes nothing for regular files. */
    const int opened = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (opened < 0)
        return fail("open", path);
    struct stat info;
    if (fstat(opened, &info) != 0) {
        const ar_status st = fail("read the size", path);
        close(opened);
        return st;
    }
    if (!S_ISREG(info.st_mode)) {
        close(opened);
        return ar_error_set(AR_ERR_IO, "%s: %s, expected a regular file", ARI_SHOW(path),
                            S_ISDIR(info.st_mode) ? "is a directory" : "is a pipe, a socket or a device");
    }
    *fd = opened;
    *bytes = (size_t)info.st_size;
    return AR_OK;
}

ar_status ari_file_pread(int fd, void *out, size_t bytes, size_t offset, const char *path)
{
    size_t done = 0;
    while (done < bytes) {
        const size_t step = bytes - done < TRANSFER_BYTES ? bytes - done : TRANSFER_BYTES;
        const ssize_t got = pread(fd, (char *)out + done, step, (off_t)(offset + done));
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return fail("read", path);
        if (got == 0)
            return ar_error_set(AR_ERR_IO,
                                "%s: became shorter while it was read: %zu bytes at offset %zu, expected %zu",
                                ARI_SHOW(path), done, offset, bytes);
        done += (size_t)got;
    }
    return AR_OK;
}

ar_status ari_file_read(unsigned char **gives, size_t *length, const char *path, size_t limit)
{
    int fd = -1;
    size_t bytes = 0;
    AR_TRY(ari_file_open(&fd, &bytes, path));
    if (bytes > limit || bytes == SIZE_MAX) {
        close(fd);
        return ar_error_set(AR_ERR_OVERFLOW, "%s: has %zu bytes, at most %zu are read", ARI_SHOW(path), bytes, limit);
    }
    unsigned char *data = malloc(bytes + 1);
    if (data == NULL) {
        close(fd);
        return ar_error_set(AR_ERR_MEMORY, "%s: no memory for its %zu bytes", ARI_SHOW(path), bytes);
    }
    const ar_status st = ari_file_pread(fd, data, bytes, 0, path);
    close(fd);
    if (st != AR_OK) {
        free(data);
        return st;
    }
    data[bytes] = 0;
    *gives = data;
    *length = bytes;
    return AR_OK;
}

/* --- writing ------------------------------------------------------------------------------------------------------ */
struct ari_out {
    int fd;
    char *path; /* the final name, links resolved: the file is replaced, not the link to it */
    char *temp; /* NULL: written directly */
};

/* Where the folder part of `path` ends, its slash included. */
static size_t folder_length(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash == NULL ? 0 : (size_t)(slash - path) + 1;
}

static ar_status open_temporary(ari_out *o)
{
    const size_t folder = folder_length(o->path);
    const size_t cap = folder + 64;
    o->temp = malloc(cap);
    if (o->temp == NULL)
        return ar_error_set(AR_ERR_MEMORY, "%s: no memory for a file name", ARI_SHOW(o->path));
    for (int i = 0; i < TEMPORARY_NAMES; i++) {
        snprintf(o->temp, cap, "%.*s.anyrank-%ld-%d.tmp", (int)folder, o->path, (long)getpid(), i);
        o->fd = open(o->temp, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (o->fd >= 0 || errno != EEXIST)
            break;
    }
    if (o->fd >= 0)
        return AR_OK;
    const ar_status st = fail("create a file in its folder", o->path);
    free(o->temp); /* of another writer, or not there at all: not ours to remove */
    o->temp = NULL;
    return st;
}

ar_status ari_out_create(ari_out **gives, const char *path)
{
    const bool empty = path == NULL || path[0] == '\0';
    if (empty || strlen(path) > PATH_MAX) {
        ar_error_set(AR_ERR_ARG, "the name of a file to write is %s", empty ? "empty" : "too long");
        return AR_ERR_ARG;
    }
    ari_out *o = calloc(1, sizeof *o);
    if (o == NULL) {
        ar_error_set(AR_ERR_MEMORY, "%s: no memory to write it", ARI_SHOW(path));
        return AR_ERR_MEMORY;
    }
    ar_status st = AR_OK;
    o->fd = -1;
    o->path = realpath(path, NULL);
    if (o->path == NULL)
        o->path = strdup(path);
    struct stat info;
    if (o->path == NULL) {
        st = ar_error_set(AR_ERR_MEMORY, "%s: no memory to write it", ARI_SHOW(path));
    } else if (stat(o->path, &info) == 0 && !S_ISREG(info.st_mode)) {
        o->fd = open(o->path, O_WRONLY | O_CLOEXEC);
        if (o->fd < 0)
            st = fail("write", path);
    } else {
        st = open_temporary(o);
    }
    if (st != AR_OK) {
        ari_out_discard(o);
        return st;
    }
    *gives = o;
    return AR_OK;
}

ar_status ari_out_write(ari_out *o, const void *data, size_t bytes)
{
    size_t done = 0;
    while (done < bytes) {
        const size_t step = bytes - done < TRANSFER_BYTES ? bytes - done : TRANSFER_BYTES;
        const ssize_t put = write(o->fd, (const char *)data + done, step);
        if (put < 0 && errno == EINTR)
            continue;
        if (put <= 0)
            return fail("write", o->path);
        done += (size_t)put;
    }
    return AR_OK;
}

/* The name itself is durable once the folder is. Some file systems refuse this; the data is safe all the same. */
static void sync_folder(const char *path)
{
    char *folder = strndup(path, folder_length(path));
    if (folder == NULL)
        return;
    const int fd = open(folder[0] == '\0' ? "." : folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    free(folder);
    if (fd < 0)
        return;
    (void)fsync(fd);
    close(fd);
}

ar_status ari_out_commit(ari_out *o)
{
    ar_status st = AR_OK;
    if (o->temp != NULL && fsync(o->fd) != 0)
        st = fail("write", o->path);
    if (close(o->fd) != 0 && st == AR_OK)
        st = fail("write", o->path);
    o->fd = -1;
    if (st == AR_OK && o->temp != NULL) {
        if (rename(o->temp, o->path) != 0) {
            st = fail("rename to", o->path);
        } else {
            sync_folder(o->path);
            free(o->temp);
            o->temp = NULL;
        }
    }
    ari_out_discard(o);
    return st;
}

void ari_out_discard(ari_out *o)
{
    if (o == NULL)
        return;
    if (o->fd >= 0)
        close(o->fd);
    if (o->temp != NULL)
        unlink(o->temp);
    free(o->temp);
    free(o->path);
    free(o);
}

ar_status ari_file_write(const char *path, const void *data, size_t bytes)
{
    if (path != NULL && strcmp(path, "-") == 0) {
        if (fwrite(data, 1, bytes, stdout) != bytes || fflush(stdout) != 0)
            return fail("write", "standard output");
        return AR_OK;
    }
    ari_out *o = NULL;
    AR_TRY(ari_out_create(&o, path));
    const ar_status st = ari_out_write(o, data, bytes);
    if (st == AR_OK)
        return ari_out_commit(o);
    ari_out_discard(o);
    return st;
}

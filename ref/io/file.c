/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/io/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

ar_status ari_file_path(char **out, const char *folder, const char *name)
{
    if (asprintf(out, "%s/%s", folder, name) >= 0)
        return AR_OK;
    *out = NULL; /* asprintf leaves the pointer undefined on failure */
    ar_error_set(AR_ERR_MEMORY, "%s: no memory for a file name", ARI_SHOW(folder));
    return AR_ERR_MEMORY;
}

ar_status ari_arena_path(ari_arena *a, char **out, const char *folder, const char *name)
{
    const size_t n = strlen(folder) + strlen(name) + 2;
    AR_TRY(ARI_TAKE(out, a, n, "a file name"));
    snprintf(*out, n, "%s%s%s", folder, folder[0] ? "/" : "", name);
    return AR_OK;
}

ar_status ari_config_path(char **out, const char *path)
{
    return ari_is_folder(path) ? ari_file_path(out, path, "config.json")
                               : ari_text_copy(out, path, SIZE_MAX, "a file name");
}

bool ari_is_folder(const char *path)
{
    struct stat info;
    return stat(path, &info) == 0 && S_ISDIR(info.st_mode);
}

ar_status ari_folder_make(const char *path)
{
    ARI_OWNED char *copy = NULL;
    bool failed = false;
    AR_TRY(ari_text_copy(&copy, path, SIZE_MAX, "a file name"));
    for (char *slash = copy; !failed && *slash && (slash = strchr(slash + 1, '/')) != NULL;) {
        *slash = '\0';
        failed = !ari_is_folder(copy) && mkdir(copy, 0777) != 0 && errno != EEXIST;
        *slash = '/';
    }
    failed = failed || (mkdir(path, 0777) != 0 && errno != EEXIST);
    if (failed)
        return ari_io_fail("make the folder", path);
    return ari_is_folder(path) ? AR_OK : ar_error_set(AR_ERR_IO, "%s: is not a folder", ARI_SHOW(path));
}

ar_status ari_folder_make_temporary(char *path, size_t cap, const char *name)
{
    const char *set = getenv("TMPDIR"), *parent = set && set[0] ? set : "/tmp";
    const int n = snprintf(path, cap, "%s/%s-XXXXXX", parent, name);
    if (n > 0 && (size_t)n < cap && mkdtemp(path))
        return AR_OK;
    path[0] = '\0';
    return ar_error_set(AR_ERR_IO, "no folder for temporary files in %s", ARI_SHOW(parent));
}

ar_status ari_file_is_in(bool *exists, const char *folder, const char *name)
{
    ARI_OWNED char *path = NULL;
    AR_TRY(ari_file_path(&path, folder, name));
    *exists = access(path, F_OK) == 0;
    return AR_OK;
}

void ari_file_close(const int *fd)
{
    if (*fd >= 0)
        close(*fd);
}

ar_status ari_file_open(int *fd, size_t *bytes, const char *path)
{
    if (path == NULL)
        return ar_error_set(AR_ERR_ARG, "a path is missing");
    /* O_NONBLOCK: opening a named pipe without a writer would wait for ever. It changes nothing for regular files. */
    ARI_ENDED(ari_file_close) int opened = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (opened < 0)
        return ari_io_fail("open", path);
    struct stat info;
    if (fstat(opened, &info) != 0)
        return ari_io_fail("read the size", path);
    if (!S_ISREG(info.st_mode))
        return ar_error_set(AR_ERR_IO, "%s: %s, expected a regular file", ARI_SHOW(path),
                            S_ISDIR(info.st_mode) ? "is a directory" : "is a pipe, a socket or a device");
    *fd = opened;
    opened = -1;
    *bytes = (size_t)info.st_size;
    return AR_OK;
}

ar_status ari_file_pread(int fd, void *out, size_t bytes, size_t offset, const char *path)
{
    size_t bytes_read = 0;
    while (bytes_read < bytes) {
        const size_t step = bytes - bytes_read < ARI_TRANSFER_BYTES ? bytes - bytes_read : ARI_TRANSFER_BYTES;
        const ssize_t got = pread(fd, (char *)out + bytes_read, step, (off_t)(offset + bytes_read));
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return ari_io_fail("read", path);
        if (got == 0)
            return ar_error_set(AR_ERR_IO,
                                "%s: became shorter while it was read: %zu bytes at offset %zu, expected %zu",
                                ARI_SHOW(path), bytes_read, offset, bytes);
        bytes_read += (size_t)got;
    }
    return AR_OK;
}

ar_status ari_file_map(void **map, int fd, size_t bytes, const char *path)
{
    struct stat file_status;
    void *mapping = mmap(NULL, bytes, PROT_READ, MAP_PRIVATE, fd, 0);
    if (mapping == MAP_FAILED)
        return ar_error_set(errno == ENOMEM ? AR_ERR_MEMORY : AR_ERR_IO, "%s: cannot map its %zu bytes: %s",
                            ARI_SHOW(path), bytes, strerror(errno));
    if (fstat(fd, &file_status) != 0 || (size_t)file_status.st_size != bytes) {
        munmap(mapping, bytes);
        return ar_error_set(AR_ERR_IO, "%s: changed its size from %zu bytes while it was opened", ARI_SHOW(path),
                            bytes);
    }
    *map = mapping;
    return AR_OK;
}

void ari_pages_drop(const void *data, size_t bytes)
{
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), page_begin = (uintptr_t)data / page * page;
    if (bytes > 0) /* only a hint: nothing is wrong if it is not taken */
        (void)madvise((void *)page_begin, (uintptr_t)data - page_begin + bytes, MADV_DONTNEED);
}

ar_status ari_file_read(unsigned char **out, size_t *length, const char *path, size_t limit)
{
    ARI_ENDED(ari_file_close) int fd = -1;
    size_t bytes = 0;
    AR_TRY(ari_file_open(&fd, &bytes, path));
    if (bytes > limit || bytes == SIZE_MAX)
        return ar_error_set(AR_ERR_OVERFLOW, "%s: has %zu bytes, at most %zu are read", ARI_SHOW(path), bytes, limit);
    ARI_OWNED unsigned char *data = malloc(bytes + 1);
    if (data == NULL)
        return ar_error_set(AR_ERR_MEMORY, "%s: no memory for its %zu bytes", ARI_SHOW(path), bytes);
    AR_TRY(ari_file_pread(fd, data, bytes, 0, path));
    data[bytes] = 0;
    ARI_GIVE(out, data);
    *length = bytes;
    return AR_OK;
}

ar_status ari_file_write(const char *path, const void *data, size_t bytes)
{
    if (path != NULL && strcmp(path, "-") == 0) {
        if (fwrite(data, 1, bytes, stdout) != bytes || fflush(stdout) != 0)
            return ari_io_fail("write", "standard output");
        return AR_OK;
    }
    ARI_OWNED_BY(ari_atomic_file_discard) ari_atomic_file *o = NULL;
    AR_TRY(ari_atomic_file_create(&o, path));
    AR_TRY(ari_atomic_file_write(o, data, bytes));
    return ari_atomic_file_commit(o);
}

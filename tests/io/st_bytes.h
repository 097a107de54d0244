/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "anyrank/safetensors.h"
#include "ref/io/safetensors_private.h"

/* A file without a folder: an anonymous one, reached by its descriptor, gone with the process. */
typedef struct mem_file {
    int fd;
    char path[32];
} mem_file;

static inline mem_file mem_file_of(const void *bytes, size_t n)
{
    mem_file m = {memfd_create("test", MFD_CLOEXEC), ""};
    for (size_t done = 0; m.fd >= 0 && done < n;) {
        const ssize_t put = write(m.fd, (const char *)bytes + done, n - done);
        if (put <= 0)
            abort();
        done += (size_t)put;
    }
    snprintf(m.path, sizeof m.path, "/proc/self/fd/%d", m.fd);
    return m;
}

/* 8 bytes of length, the header, `data` bytes 0, 1, 2, ... `claimed` is the length the file says it has. */
static inline mem_file st_bytes_claiming(uint64_t claimed, const char *header, size_t n, size_t data)
{
    unsigned char *bytes = calloc(8 + n + data, 1);
    if (bytes == NULL)
        abort();
    memcpy(bytes, &claimed, 8);
    memcpy(bytes + 8, header, n);
    for (size_t i = 0; i < data; i++)
        bytes[8 + n + i] = (unsigned char)i;
    const mem_file m = mem_file_of(bytes, 8 + n + data);
    free(bytes);
    return m;
}

static inline mem_file st_bytes(const char *header, size_t n, size_t data)
{
    return st_bytes_claiming(n, header, n, data);
}

/* Opens and closes; what it said is in ar_error_message(). */
static inline ar_status st_try(mem_file m)
{
    ar_st_file *f = NULL;
    ar_error_clear();
    const ar_status st = ari_st_open(&f, m.path);
    if (st == AR_OK)
        ari_st_close(f);
    close(m.fd);
    return st;
}

/* The message begins with the rule's name and a colon. */
static inline int names_rule(const char *rule)
{
    const size_t n = strlen(rule);
    return strncmp(ar_error_message(), rule, n) == 0 && ar_error_message()[n] == ':';
}

/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "ref/io/safetensors.h"
#include "ref/io/safetensors_private.h"

ARI_OWNER(ar_st_file, ari_st_close)

struct ar_st_file {
    ari_st_header header;
    void *map; /* mapping of the whole file */
    size_t map_bytes;
};

/* Reads the length N and the N bytes of the header. They are read and not mapped, so that a file that shrinks meanwhile
 * gives an error instead of a signal. */
static ar_status read_header(int fd, size_t bytes, const char *path, char **out, size_t *length)
{
    uint64_t n = 0;
    if (bytes < ARI_ST_PREFIX_BYTES)
        return ar_error_set(AR_ERR_FORMAT,
                            "HeaderTooSmall: %s: has %zu bytes, expected at least %zu; is it a safetensors file?",
                            ARI_SHOW(path), bytes, ARI_ST_PREFIX_BYTES);
    AR_TRY(ari_file_pread(fd, &n, sizeof n, 0, path));
    if (memcmp(&n, "version ", sizeof n) == 0) /* first bytes of a Git LFS pointer */
        return ar_error_set(AR_ERR_FORMAT,
                            "HeaderTooLarge: %s: is the pointer of Git LFS, not the file: fetch that with git lfs pull",
                            ARI_SHOW(path));
    if (n > ARI_ST_MAX_HEADER)
        return ar_error_set(AR_ERR_FORMAT,
                            "HeaderTooLarge: %s: a header of %" PRIu64
                            " bytes, at most %zu are allowed; is it a safetensors file?",
                            ARI_SHOW(path), n, ARI_ST_MAX_HEADER);
    if (n > bytes - ARI_ST_PREFIX_BYTES)
        return ar_error_set(AR_ERR_FORMAT, "InvalidHeaderLength: %s: a header of %" PRIu64 " bytes in a file of %zu",
                            ARI_SHOW(path), n, bytes);
    ARI_OWNED char *text = NULL;
    AR_TRY(ARI_ALLOC(&text, (size_t)n + 1, "a file's header"));
    AR_TRY(ari_file_pread(fd, text, (size_t)n, ARI_ST_PREFIX_BYTES, path));
    *out = text;
    text = NULL;
    *length = (size_t)n;
    return AR_OK;
}

static ar_status map_data(ar_st_file *f, int fd, size_t bytes, size_t data_start, const char *path)
{
    void *map = NULL;
    AR_TRY(ari_file_map(&map, fd, bytes, path));
    f->map = map;
    f->map_bytes = bytes;
    for (size_t i = 0; i < f->header.n; i++) {
        f->header.items[i].entry.data = (const char *)map + data_start + f->header.items[i].begin;
        f->header.items[i].entry.mapped = true;
    }
    return AR_OK;
}

ar_status ari_st_open(ar_st_file **out, const char *path)
{
    ARI_ENDED(ari_file_close) int fd = -1; /* a mapping outlives its descriptor, so hundreds of shards keep none open */
    size_t bytes = 0, length = 0;
    ARI_OWNED char *text = NULL;
    ARI_OWNED_BY(ari_st_close) ar_st_file *f = NULL;
    AR_TRY(ari_file_open(&fd, &bytes, path));
    AR_TRY(ARI_ALLOC_ZERO(&f, 1, "a file"));
    AR_TRY(ari_unsupported_format_check_file(fd, bytes, path, ARI_WANT_TENSORS));
    AR_TRY(read_header(fd, bytes, path, &text, &length));
    const size_t start = ARI_ST_PREFIX_BYTES + length;
    AR_TRY(ari_st_header_parse(&f->header, text, length, bytes - start, path));
    AR_TRY(map_data(f, fd, bytes, start, path));
    ARI_GIVE(out, f);
    return AR_OK;
}

void ari_st_close(ar_st_file *f)
{
    if (f == NULL)
        return;
    if (f->map != NULL)
        munmap(f->map, f->map_bytes);
    ari_st_header_free(&f->header);
    free(f);
}

size_t ari_st_tensor_count(const ar_st_file *f)
{
    return f->header.n;
}

const ar_st_entry *ari_st_at(const ar_st_file *f, size_t i)
{
    return i < f->header.n ? &f->header.items[i].entry : NULL;
}

const ar_st_entry *ari_st_find(const ar_st_file *f, const char *name)
{
    const ari_st_header *h = &f->header;
    size_t low = 0;
    ARI_BISECT(low, h->n, i, strcmp(h->by_name[i]->entry.name, name) < 0)
    return low < h->n && strcmp(h->by_name[low]->entry.name, name) == 0 ? &h->by_name[low]->entry : NULL;
}

const char *ari_st_metadata(const ar_st_file *f, const char *key)
{
    for (size_t i = 0; i < f->header.n_metadata; i++)
        if (strcmp(f->header.metadata[2 * i], key) == 0)
            return f->header.metadata[2 * i + 1];
    return NULL;
}

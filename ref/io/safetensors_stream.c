/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "ref/core/size.h"
#include "ref/io/file.h"
#include "ref/io/safetensors.h"

typedef struct slot {
    char *name;
    size_t at, bytes, done; /* in the file; of the tensor */
} slot;

struct ar_st_writer {
    ari_out *out;
    slot *slot; /* in the caller's order */
    size_t n;
};

static ar_status place(ar_st_writer *w, const ar_st_tensor *const *order, const ar_st_tensor *tensors, size_t at)
{
    for (size_t k = 0; k < w->n; k++) {
        slot *s = &w->slot[order[k] - tensors];
        AR_TRY(ari_st_tensor_bytes(&s->bytes, order[k]));
        s->at = at;
        AR_TRY(ari_add_size(&at, at, s->bytes));
        s->name = strdup(order[k]->name);
        if (s->name == NULL)
            return ar_error_set(AR_ERR_MEMORY, "no memory to write %zu tensors", w->n);
    }
    return AR_OK;
}

ar_status ar_st_writer_open(ar_st_writer **gives, const char *path, const ar_st_tensor *tensors, size_t n,
                            const char *const *metadata, size_t n_meta)
{
    ar_status st = AR_OK;
    char *header = NULL;
    size_t length = 0;
    const ar_st_tensor **order = calloc(n + 1, sizeof(const ar_st_tensor *));
    ar_st_writer *w = calloc(1, sizeof *w);
    if (w != NULL)
        w->slot = calloc(n + 1, sizeof *w->slot);
    if (order == NULL || w == NULL || w->slot == NULL) {
        st = ar_error_set(AR_ERR_MEMORY, "no memory to write %zu tensors", n);
        goto done;
    }
    w->n = n;
    AR_TRY_TO(done, st, ari_st_header_make(&header, &length, order, tensors, n, metadata, n_meta));
    AR_TRY_TO(done, st, place(w, order, tensors, length));
    AR_TRY_TO(done, st, ari_out_create(&w->out, path));
    AR_TRY_TO(done, st, ari_out_write(w->out, header, length));
    *gives = w;
    w = NULL;
done:
    ar_st_writer_discard(w);
    free(header);
    free(order);
    return st;
}

ar_status ar_st_writer_put(ar_st_writer *w, size_t i, const void *data, size_t bytes)
{
    if (i >= w->n)
        return ar_error_set(AR_ERR_ARG, "a file of %zu tensors has no tensor %zu to write", w->n, i);
    slot *s = &w->slot[i];
    if (bytes > s->bytes - s->done)
        return ar_error_set(AR_ERR_ARG, "tensor '%s' has %zu bytes: %zu more than the %zu written are too many",
                            ARI_SHOW(s->name), s->bytes, bytes, s->done);
    AR_TRY(ari_out_write_at(w->out, s->at + s->done, data, bytes));
    s->done += bytes;
    return AR_OK;
}

/* The file's end takes the writer with it, whatever becomes of the file. */
static ari_out *release(ar_st_writer *w)
{
    ari_out *out = w->out;
    w->out = NULL;
    ar_st_writer_discard(w);
    return out;
}

ar_status ar_st_writer_commit(ar_st_writer *w)
{
    for (size_t i = 0; i < w->n; i++)
        if (w->slot[i].done != w->slot[i].bytes) {
            const ar_status st = ar_error_set(AR_ERR_ARG, "tensor '%s': %zu of its %zu bytes were written",
                                              ARI_SHOW(w->slot[i].name), w->slot[i].done, w->slot[i].bytes);
            ar_st_writer_discard(w);
            return st;
        }
    return ari_out_commit(release(w));
}

void ar_st_writer_discard(ar_st_writer *w)
{
    if (w == NULL)
        return;
    ari_out_discard(w->out);
    for (size_t i = 0; i < w->n; i++)
        free(w->slot[i].name);
    free(w->slot);
    free(w);
}

/* --- all at once -------------------------------------------------------------------------------------------------- */
static ar_status check_data(const ar_st_tensor *tensors, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        size_t bytes = 0;
        AR_TRY(ari_st_tensor_bytes(&bytes, &tensors[i]));
        if (bytes > 0 && tensors[i].data == NULL)
            return ar_error_set(AR_ERR_ARG, "tensor '%s' has no data", ARI_SHOW(tensors[i].name));
    }
    return AR_OK;
}

/* In the file's order, so that a pipe takes it. */
static ar_status put_all(ari_out *out, const ar_st_tensor *const *order, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        size_t bytes = 0;
        AR_TRY(ari_st_tensor_bytes(&bytes, order[i]));
        AR_TRY(ari_out_write(out, order[i]->data, bytes));
    }
    return AR_OK;
}

ar_status ari_st_write_uncommitted(ari_out **gives, const char *path, const ar_st_tensor *tensors, size_t n,
                                   const char *const *metadata, size_t n_meta)
{
    ar_status st = AR_OK;
    ari_out *out = NULL;
    char *header = NULL;
    size_t length = 0;
    AR_TRY(check_data(tensors, n));
    const ar_st_tensor **order = calloc(n + 1, sizeof(const ar_st_tensor *));
    if (order == NULL)
        return ar_error_set(AR_ERR_MEMORY, "no memory to sort %zu tensors", n);
    AR_TRY_TO(done, st, ari_st_header_make(&header, &length, order, tensors, n, metadata, n_meta));
    AR_TRY_TO(done, st, ari_out_create(&out, path));
    AR_TRY_TO(done, st, ari_out_write(out, header, length));
    AR_TRY_TO(done, st, put_all(out, order, n));
    *gives = out;
    out = NULL;
done:
    ari_out_discard(out);
    free(header);
    free(order);
    return st;
}

ar_status ar_st_write(const char *path, const ar_st_tensor *tensors, size_t n, const char *const *metadata,
                      size_t n_meta)
{
    ari_out *out = NULL;
    AR_TRY(ari_st_write_uncommitted(&out, path, tensors, n, metadata, n_meta));
    return ari_out_commit(out);
}

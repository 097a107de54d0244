/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/gather.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/size.h"
#include "ref/io/hash.h"
#include "ref/io/safetensors.h"
#include "run/boxes.h"

ar_status ari_gather_want(ari_gatherer *g, const char *tap, char pass, const char *name, int ndim, const size_t *shape,
                          int file)
{
    AR_TRY(ari_grow(&g->list, &g->capacity, g->count, sizeof *g->list, "the list of outputs"));
    ari_gathered *t = &g->list[g->count];
    *t = (ari_gathered){.pass = pass, .ndim = ndim, .count = 1, .file = file};
    snprintf(t->tap, sizeof t->tap, "%s", tap);
    snprintf(t->name, sizeof t->name, "%s", name);
    for (int d = 0; d < ndim; d++) {
        t->shape[d] = shape[d];
        AR_TRY(ari_mul_size(&t->count, t->count, shape[d]));
    }
    AR_TRY(ari_alloc_zero((void **)&t->values, t->count, sizeof(float), name));
    g->count++;
    void *written = NULL; /* zero bytes are flags that are not set */
    AR_TRY(ari_alloc_zero(&written, t->count, sizeof *t->written, name));
    t->written = written;
    return AR_OK;
}

static void copy_run(void *user, const ari_box_run *r)
{
    ari_gathered *t = user;
    for (size_t i = 0; i < r->count; i++) {
        /* The first to come writes: an element that two ranks take for theirs is an error, and no race. */
        if (atomic_exchange_explicit(&t->written[r->full + i], 1, memory_order_relaxed) == 0)
            t->values[r->full + i] = r->local[(ptrdiff_t)i * r->stride];
    }
    atomic_fetch_add(&t->covered, r->count);
}

ar_status ari_gather_tap(void *user, const ar_tap_event *e)
{
    const ari_gatherer *g = user;
    if (e->layout->replica != 0)
        return AR_OK;
    for (size_t i = 0; i < g->count; i++) {
        ari_gathered *t = &g->list[i];
        if (t->pass != e->pass || strcmp(t->tap, e->name) != 0)
            continue;
        size_t count = 1;
        for (int d = 0; d < e->layout->ndim; d++)
            count *= e->layout->shape[d];
        if (count != t->count)
            return ar_error_set(AR_ERR_INTERNAL, "%s has %zu elements, expected %zu", e->name, count, t->count);
        ari_for_each_run(e->local, e->layout, copy_run, t);
    }
    return AR_OK;
}

ar_status ari_gather_check(const ari_gatherer *g)
{
    for (size_t i = 0; i < g->count; i++) {
        const ari_gathered *t = &g->list[i];
        const size_t covered = atomic_load(&t->covered);
        size_t written = 0;
        for (size_t k = 0; k < t->count; k++)
            written += atomic_load_explicit(&t->written[k], memory_order_relaxed);
        if (written != t->count)
            return ar_error_set(AR_ERR_INTERNAL, "the ranks reported %zu of the %zu elements of %s", written, t->count,
                                t->tap);
        if (covered != t->count)
            return ar_error_set(AR_ERR_INTERNAL, "the ranks reported some of the %zu elements of %s more than once",
                                t->count, t->tap);
    }
    return AR_OK;
}

void ari_gatherer_fini(ari_gatherer *g)
{
    for (size_t i = 0; i < g->count; i++) {
        free(g->list[i].values);
        free(g->list[i].written);
    }
    free(g->list);
    *g = (ari_gatherer){0};
}

/* The tensors of one file, or of all (file < 0). Gives; free(). */
static ar_status as_tensors(const ari_gatherer *g, int file, ar_st_tensor **gives, size_t *n)
{
    AR_TRY(ari_alloc_zero((void **)gives, g->count, sizeof **gives, "a list of outputs"));
    *n = 0;
    for (size_t i = 0; i < g->count; i++) {
        const ari_gathered *t = &g->list[i];
        if (file >= 0 && t->file != file)
            continue;
        ar_st_tensor *s = &(*gives)[(*n)++];
        *s = (ar_st_tensor){.name = t->name, .dtype = AR_F32, .ndim = t->ndim, .data = t->values};
        for (int d = 0; d < t->ndim; d++)
            s->shape[d] = t->shape[d];
    }
    return AR_OK;
}

ar_status ari_gather_write(const ari_gatherer *g, int files, const char *const *path)
{
    static const char *const metadata[] = {"format", "pt"};
    ari_out *out[2] = {NULL};
    ar_status st = AR_OK;
    for (int i = 0; i < files; i++) {
        ar_st_tensor *list = NULL;
        size_t n = 0;
        AR_TRY_TO(done, st, as_tensors(g, i, &list, &n));
        st = ari_st_write_uncommitted(&out[i], path[i], list, n, metadata, 1);
        free(list);
        if (st != AR_OK)
            goto done;
    }
    return ari_out_commit_all(out, 2);
done:
    for (int i = 0; i < 2; i++)
        ari_out_discard(out[i]);
    return st;
}

ar_status ari_gather_hash(const ari_gatherer *g, char hex[65])
{
    ar_st_tensor *list = NULL;
    size_t n = 0;
    AR_TRY(as_tensors(g, -1, &list, &n));
    const ar_status st = ari_tensors_hash(hex, list, n);
    free(list);
    return st;
}

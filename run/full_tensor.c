/* SPDX-License-Identifier: Apache-2.0 */
#include "run/full_tensor.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/boxes.h"
#include "ref/core/out.h"
#include "ref/core/size.h"
#include "ref/layers/share.h"
#include "ref/numerics/bits.h"

ar_status ari_full_tensor_init(ari_full_tensor *t, const char *name, int ndim, const size_t *shape)
{
    size_t count = 1;
    float *values = NULL;
    void *writer = NULL; /* zero bytes: nobody */
    if (strlen(name) >= sizeof t->name)
        return ar_error_set(AR_ERR_ARG, "a tensor's name has at most %zu bytes: '%s'", sizeof t->name - 1,
                            ARI_SHOW(name));
    for (int d = 0; d < ndim; d++)
        AR_TRY(ari_mul_size(&count, count, shape[d]));
    AR_TRY(ari_alloc_zero((void **)&values, count, sizeof *values, name));
    const ar_status st = ari_alloc_zero(&writer, count, sizeof *t->writer, name);
    if (st != AR_OK) {
        free(values);
        return st;
    }
    *t = (ari_full_tensor){.ndim = ndim, .count = count, .values = values, .writer = writer};
    snprintf(t->name, sizeof t->name, "%s", name);
    for (int d = 0; d < ndim; d++)
        t->shape[d] = shape[d];
    return AR_OK;
}

void ari_full_tensor_fini(ari_full_tensor *t)
{
    free(t->values);
    free(t->writer);
    *t = (ari_full_tensor){.count = 0};
}

static ar_status check_count(const ari_full_tensor *t, const ar_layout *o)
{
    const size_t count = ari_layout_count(o);
    if (count == t->count)
        return AR_OK;
    return ar_error_set(AR_ERR_INTERNAL, "a rank reports %s of %zu elements, expected %zu", t->name, count, t->count);
}

struct write {
    ari_full_tensor *t;
    int rank;
};

/* The first clash is kept: an element that two ranks take for theirs is an error, and no race. */
static void note_clash(ari_full_tensor *t, size_t at, int earlier, int rank)
{
    bool none = false;
    if (!atomic_compare_exchange_strong(&t->clash, &none, true))
        return;
    t->clash_at = at;
    t->clash_ranks[0] = earlier;
    t->clash_ranks[1] = rank;
}

static void write_run(void *user, const ari_box_run *r)
{
    const struct write *w = user;
    ari_full_tensor *t = w->t;
    for (size_t i = 0; i < r->count; i++) {
        const size_t at = r->full + i;
        unsigned short nobody = 0;
        if (at >= t->count)
            note_clash(t, at, w->rank, w->rank);
        else if (!atomic_compare_exchange_strong_explicit(&t->writer[at], &nobody, (unsigned short)(w->rank + 1),
                                                          memory_order_relaxed, memory_order_relaxed))
            note_clash(t, at, nobody - 1, w->rank);
        else
            t->values[at] = r->local[(ptrdiff_t)i * r->stride];
    }
}

ar_status ari_full_tensor_write(ari_full_tensor *t, int rank, const ar_tensor *local, const ar_layout *layout)
{
    struct write w = {t, rank};
    AR_TRY(check_count(t, layout));
    ari_for_each_run(local, layout, write_run, &w);
    return AR_OK;
}

struct comparison {
    const ari_full_tensor *t;
    size_t at; /* the first element that differs; SIZE_MAX: none */
    float own;
};

static void compare_run(void *user, const ari_box_run *r)
{
    struct comparison *c = user;
    for (size_t i = 0; i < r->count && c->at == SIZE_MAX; i++) {
        const float own = r->local[(ptrdiff_t)i * r->stride];
        if (r->full + i < c->t->count && ari_bits32(c->t->values[r->full + i]) != ari_bits32(own)) {
            c->at = r->full + i;
            c->own = own;
        }
    }
}

ar_status ari_full_tensor_compare(const ari_full_tensor *t, int rank, const ar_tensor *local, const ar_layout *layout)
{
    struct comparison c = {.t = t, .at = SIZE_MAX};
    AR_TRY(check_count(t, layout));
    ari_for_each_run(local, layout, compare_run, &c);
    if (c.at == SIZE_MAX)
        return AR_OK;
    const int writer = atomic_load(&t->writer[c.at]) - 1;
    if (writer < 0)
        return ar_error_set(AR_ERR_INTERNAL, "%s: no rank has written the first copy of element %zu", t->name, c.at);
    return ar_error_set(AR_ERR_DATA,
                        "%s: the copies of ranks %d and %d differ at element %zu: %.9g and %.9g (0x%08x, 0x%08x)",
                        t->name, writer, rank, c.at, (double)t->values[c.at], (double)c.own,
                        (unsigned)ari_bits32(t->values[c.at]), (unsigned)ari_bits32(c.own));
}

ar_status ari_full_tensor_check(const ari_full_tensor *t)
{
    size_t written = 0;
    for (size_t i = 0; i < t->count; i++)
        written += atomic_load_explicit(&t->writer[i], memory_order_relaxed) != 0;
    if (written != t->count)
        return ar_error_set(AR_ERR_INTERNAL, "the ranks reported %zu of the %zu elements of %s", written, t->count,
                            t->name);
    if (!atomic_load(&t->clash))
        return AR_OK;
    char who[48] = ""; /* where the ranks are known */
    if (t->clash_ranks[0] != t->clash_ranks[1])
        snprintf(who, sizeof who, " by ranks %d and %d", t->clash_ranks[0], t->clash_ranks[1]);
    return ar_error_set(AR_ERR_INTERNAL,
                        "the ranks reported some of the %zu elements of %s more than once: element %zu%s", t->count,
                        t->name, t->clash_at, who);
}

ar_st_tensor ari_full_tensor_entry(const ari_full_tensor *t)
{
    ar_st_tensor e = {.name = t->name, .dtype = AR_F32, .ndim = t->ndim, .data = t->values};
    for (int d = 0; d < t->ndim; d++)
        e.shape[d] = t->shape[d];
    return e;
}

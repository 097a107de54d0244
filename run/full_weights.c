/* SPDX-License-Identifier: Apache-2.0 */
#include "run/full_weights.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/context.h"
#include "ref/core/size.h"
#include "ref/io/hash.h"
#include "ref/models/param_list.h"
#include "run/boxes.h"

typedef struct full_tensor {
    char name[160];
    int ndim;
    size_t shape[AR_MAX_DIMS];
    size_t count;
    float *values;         /* [count] */
    atomic_size_t covered; /* elements that ranks have written */
} full_tensor;

struct ari_full_weights {
    full_tensor *list;
    size_t count, capacity;
};

static ar_status add(void *user, const char *name, int ndim, const size_t *shape)
{
    ari_full_weights *w = user;
    AR_TRY(ari_grow(&w->list, &w->capacity, w->count, sizeof *w->list, "the list of weights"));
    full_tensor *t = &w->list[w->count];
    *t = (full_tensor){.ndim = ndim, .count = 1};
    snprintf(t->name, sizeof t->name, "%s", name);
    for (int d = 0; d < ndim; d++) {
        t->shape[d] = shape[d];
        AR_TRY(ari_mul_size(&t->count, t->count, shape[d]));
    }
    AR_TRY(ari_alloc((void **)&t->values, t->count, sizeof(float), name));
    w->count++;
    return AR_OK;
}

ar_status ari_full_weights_create(ari_full_weights **gives, const ar_config *c)
{
    ari_full_weights *w = NULL;
    AR_TRY(ari_alloc_zero((void **)&w, 1, sizeof *w, "full weights"));
    const ar_status st = ari_param_list(c, add, w);
    if (st != AR_OK) {
        ari_full_weights_destroy(w);
        return st;
    }
    *gives = w;
    return AR_OK;
}

void ari_full_weights_destroy(ari_full_weights *w)
{
    if (!w)
        return;
    for (size_t i = 0; i < w->count; i++)
        free(w->list[i].values);
    free(w->list);
    free(w);
}

static void write_run(void *user, const ari_box_run *r)
{
    full_tensor *t = user;
    for (size_t i = 0; i < r->count; i++)
        t->values[r->full + i] = r->local[(ptrdiff_t)i * r->stride];
    atomic_fetch_add(&t->covered, r->count);
}

struct comparison {
    const full_tensor *t;
    bool differs;
};

static void compare_run(void *user, const ari_box_run *r)
{
    struct comparison *c = user;
    for (size_t i = 0; i < r->count && !c->differs; i++)
        c->differs = memcmp(&c->t->values[r->full + i], &r->local[(ptrdiff_t)i * r->stride], sizeof(float)) != 0;
}

static ar_status find(full_tensor **t, ari_full_weights *w, const ar_param *p)
{
    size_t count = 1;
    for (int d = 0; d < p->layout.ndim; d++)
        count *= p->layout.shape[d];
    for (size_t i = 0; i < w->count; i++) {
        if (strcmp(w->list[i].name, p->name) == 0 && w->list[i].count == count) {
            *t = &w->list[i];
            return AR_OK;
        }
    }
    return ar_error_set(AR_ERR_INTERNAL, "%s of %zu elements is no parameter of the config", p->name, count);
}

ar_status ari_full_weights_take(ari_full_weights *w, ar_ctx *ctx, ar_param *const *params, size_t n)
{
    const bool writes = ar_comm_rank(ctx->dp) == 0;
    full_tensor *t = NULL;
    for (size_t i = 0; i < n; i++) {
        AR_TRY(find(&t, w, params[i]));
        if (writes && params[i]->layout.replica == 0)
            ari_for_each_run(&params[i]->value, &params[i]->layout, write_run, t);
    }
    AR_TRY(ar_comm_barrier(ctx->world, ctx->queue, "weights"));
    for (size_t i = 0; i < n; i++) {
        AR_TRY(find(&t, w, params[i]));
        if (atomic_load(&t->covered) != t->count)
            return ar_error_set(AR_ERR_INTERNAL, "the ranks hold %zu of the %zu elements of %s",
                                atomic_load(&t->covered), t->count, t->name);
        struct comparison c = {.t = t};
        ari_for_each_run(&params[i]->value, &params[i]->layout, compare_run, &c);
        if (c.differs)
            return ar_error_set(AR_ERR_DATA,
                                "rank %d's copy of %s has other bits than that of the lowest rank that "
                                "holds it",
                                ar_comm_rank(ctx->world), t->name);
    }
    return AR_OK;
}

ar_status ari_full_weights_hash(const ari_full_weights *w, char hex[65])
{
    ar_st_tensor *list = NULL;
    AR_TRY(ari_alloc_zero((void **)&list, w->count, sizeof *list, "a list of weights"));
    for (size_t i = 0; i < w->count; i++) {
        const full_tensor *t = &w->list[i];
        list[i] = (ar_st_tensor){.name = t->name, .dtype = AR_F32, .ndim = t->ndim, .data = t->values};
        for (int d = 0; d < t->ndim; d++)
            list[i].shape[d] = t->shape[d];
    }
    const ar_status st = ari_tensors_hash(hex, list, w->count);
    free(list);
    return st;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/grads/grads_dump.h"

#include <stdlib.h>
#include <string.h>

#include "ref/core/size.h"
#include "verify/diagnose/order.h"

/* What one rank's reports go to. */
typedef struct ari_grads_tap {
    ari_gatherer *outputs;
    ar_dump_listener *own; /* NULL: none */
} ari_grads_tap;

/* Weights, gradients and what is an output: the tensors of a dump without activations. */
static bool is_result(void *user, const ar_tap_event *e)
{
    const ari_gatherer *g = user;
    if (e->pass == 'i' || e->pass == 'g')
        return true;
    for (size_t i = 0; i < g->count; i++) {
        if (g->list[i].pass == e->pass && strcmp(g->list[i].tap, e->name) == 0)
            return true;
    }
    return false;
}

ar_status ari_grads_taps_create(ari_grads_taps *t, ari_gatherer *outputs, const ar_grads_options *o)
{
    const size_t world = (size_t)ar_parallel_world(&o->run.parallel);
    *t = (ari_grads_taps){.outputs = outputs};
    if (o->per_rank || o->activations) {
        const ar_dump_listener_options options = {
            .first_copies = !o->per_rank, .wants = o->activations ? NULL : is_result, .wants_user = outputs};
        AR_TRY(ari_dump_ranks_create(&t->ranks, &o->run.parallel, &options));
    }
    AR_TRY(ari_alloc_zero((void **)&t->tap, world, sizeof *t->tap, "listeners of the ranks"));
    AR_TRY(ari_alloc_zero((void **)&t->user, world, sizeof *t->user, "listeners of the ranks"));
    for (size_t r = 0; r < world; r++) {
        t->tap[r] = (ari_grads_tap){outputs, t->ranks.ranks > 0 ? t->ranks.rank[r] : NULL};
        t->user[r] = &t->tap[r];
    }
    return AR_OK;
}

void ari_grads_taps_fini(ari_grads_taps *t)
{
    ari_dump_ranks_fini(&t->ranks);
    free(t->tap);
    free(t->user);
    *t = (ari_grads_taps){.outputs = NULL};
}

ar_status ari_grads_tap_fn(void *user, const ar_tap_event *event)
{
    const ari_grads_tap *t = user;
    AR_TRY(ari_gather_tap(t->outputs, event));
    return t->own ? ar_dump_listener_tap(t->own, event) : AR_OK;
}

/* --- putting together --------------------------------------------------------------------------------------------- */

/* The tensor of that name among those from `first` on; g->count: there is none. Ranks report in the same order but for
 * a few: *next is where to look first. */
static size_t find(const ari_gatherer *g, size_t first, size_t *next, const char *name)
{
    const size_t n = g->count - first;
    for (size_t k = 0; k < n; k++) {
        const size_t i = first + (*next + k) % n;
        if (strcmp(g->list[i].full.name, name) == 0) {
            *next = i - first + 1;
            return i;
        }
    }
    return g->count;
}

static ar_status merge_rank(ari_gatherer *g, size_t first, int file, int rank, const ar_dump_listener *l)
{
    size_t next = 0;
    ar_dump_value v;
    for (size_t i = 0; ar_dump_listener_at(l, i, &v); i++) {
        if (v.layout->replica != 0)
            continue;
        const size_t at = find(g, first, &next, v.name);
        if (at == g->count)
            AR_TRY(ari_gather_want(g, "", 0, v.name, v.layout->ndim, v.layout->shape, file));
        AR_TRY(ari_full_tensor_write(&g->list[at].full, rank, v.local, v.layout));
    }
    return AR_OK;
}

ar_status ari_grads_merge(ari_grads_taps *t, int file, bool keep)
{
    const size_t first = t->outputs->count;
    for (int r = 0; r < t->ranks.ranks; r++) {
        AR_TRY(merge_rank(t->outputs, first, file, r, t->ranks.rank[r]));
        if (!keep)
            ar_dump_listener_clear(t->ranks.rank[r]);
    }
    return AR_OK;
}

static int compare_keys(const void *a, const void *b)
{
    return ari_order_compare(a, b);
}

ar_status ari_grads_order(char **gives, const ari_gatherer *g, int file)
{
    ari_order_key *key = NULL;
    const char **name = NULL;
    size_t n = 0;
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, ari_alloc((void **)&key, g->count, sizeof *key, "an execution order"));
    AR_TRY_TO(done, st, ari_alloc((void **)&name, g->count, sizeof *name, "an execution order"));
    for (size_t i = 0; i < g->count; i++) {
        if (g->list[i].file == file)
            key[n++] = ari_order_of(g->list[i].full.name, NULL);
    }
    qsort(key, n, sizeof *key, compare_keys);
    for (size_t i = 0; i < n; i++)
        name[i] = key[i].name;
    st = ari_dump_order_text(gives, name, n);
done:
    free(name);
    free(key);
    return st;
}

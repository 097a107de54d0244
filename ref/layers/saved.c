/* SPDX-License-Identifier: Apache-2.0 */
/* State between a forward pass and the end of its backward pass: saved activations and deferred work. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "ref/layers/module_private.h"
#include "ref/layers/parts.h"

/* --- saved activations -------------------------------------------------------------------------------------------- */

typedef struct entry {
    const void *owner;
    int slot;
    ar_tensor tensor;
} entry;

/* A stack: backward removes entries in reverse order, so the searched entry is at or near the top. */
struct ar_saved {
    entry *entries;
    size_t count, capacity;
};

ar_status ar_saved_create(ar_saved **out)
{
    return ari_alloc_zero((void **)out, 1, sizeof(ar_saved), "saved activations");
}

void ari_saved_clear(ar_saved *s)
{
    if (s)
        s->count = 0;
}

void ar_saved_destroy(ar_saved *s)
{
    if (!s)
        return;
    free(s->entries);
    free(s);
}

size_t ari_saved_count(const ar_saved *s)
{
    return s ? s->count : 0;
}

void ari_saved_cut(ar_saved *s, size_t count)
{
    if (s)
        s->count = count;
}

ar_status ar_saved_push(ar_saved *s, const void *owner, int slot, const ar_tensor *t)
{
    if (!s)
        return AR_OK;
    AR_TRY(ARI_GROW(&s->entries, &s->capacity, s->count, "saved activations"));
    s->entries[s->count++] = (entry){owner, slot, *t};
    return AR_OK;
}

/* The newest entry under (owner, slot). */
static ar_status find_saved(size_t *index, const ar_saved *s, const void *owner, int slot)
{
    for (size_t i = s ? s->count : 0; i-- > 0;) {
        *index = i;
        if (s->entries[i].owner == owner && s->entries[i].slot == slot)
            return AR_OK;
    }
    return ar_error_set(AR_ERR_ARG, "backward of a module whose forward saved nothing");
}

ar_status ar_saved_pop(ar_saved *s, const void *owner, int slot, ar_tensor *t)
{
    size_t index = 0;
    AR_TRY(find_saved(&index, s, owner, slot));
    *t = s->entries[index].tensor;
    s->count--;
    for (size_t k = index; k < s->count; k++)
        s->entries[k] = s->entries[k + 1];
    return AR_OK;
}

ar_status ari_saved_newest(const ar_saved *s, const void *owner, int slot, ar_tensor *t)
{
    size_t index = 0;
    AR_TRY(find_saved(&index, s, owner, slot));
    *t = s->entries[index].tensor;
    return AR_OK;
}

/* --- what backward passes leave for later ------------------------------------------------------------------------- */

typedef struct ari_deferred_job {
    struct ari_deferred_job *next;
    ari_deferred_fn run;
    ar_tensor inputs[2]; /* data NULL: none */
    max_align_t job[];
} ari_deferred_job;

static void hold(ar_ctx *ctx, ari_deferred_job *l, int i, const ar_tensor *t)
{
    if (!t)
        return;
    l->inputs[i] = *t;
    ari_step_hold(ctx, t);
}

ar_status ari_defer(ar_ctx *ctx, ari_deferred_fn run, const void *job, size_t bytes, const ar_tensor *a,
                    const ar_tensor *b)
{
    ari_deferred *deferred = ctx->deferred;
    if (!deferred)
        return run(ctx, job);
    ari_deferred_job *l = calloc(1, sizeof *l + bytes);
    if (!l)
        return ar_error_set(AR_ERR_MEMORY, "no memory for what a backward pass leaves for later");
    l->run = run;
    memcpy(l->job, job, bytes);
    hold(ctx, l, 0, a);
    hold(ctx, l, 1, b);
    if (deferred->tail)
        deferred->tail->next = l;
    else
        deferred->head = l;
    deferred->tail = l;
    return AR_OK;
}

/* Empties the list. st: the reason why the work is dropped; AR_OK: runs the work up to the first failure. */
static ar_status empty(ar_ctx *ctx, ari_deferred *l, ar_status st)
{
    for (ari_deferred_job *node = l->head, *next_job = NULL; node; node = next_job) {
        next_job = node->next;
        st = st == AR_OK ? node->run(ctx, node->job) : st;
        for (int i = 0; i < 2; i++)
            ari_step_let_go(ctx, &node->inputs[i]);
        free(node);
    }
    *l = (ari_deferred){NULL};
    return st;
}

ar_status ari_deferred_run(ar_ctx *ctx, ari_deferred *l)
{
    return empty(ctx, l, AR_OK);
}

void ari_deferred_drop(ar_ctx *ctx, ari_deferred *l)
{
    empty(ctx, l, AR_ERR_ABORTED);
}

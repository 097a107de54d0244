/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of a step: allocation and lifetimes. */
#include <stdlib.h>
#include <string.h>

#include "anyrank/context.h"
#include "anyrank/queue.h"
#include "ref/context/context.h"
#include "ref/core/queue_impl.h"

static ari_owned *newest_owned(const ar_ctx *c)
{
    return c->owned.next;
}

static void forget_owned(ar_ctx *c, ari_owned *o)
{
    o->prev->next = o->next;
    o->next->prev = o->prev;
    ari_step_count_free(c, o->bytes);
}

static void release_owned(ar_ctx *c, ari_owned *o)
{
    forget_owned(c, o);
    if (o->destroy)
        o->destroy(c, o->buf.ptr);
    else
        ari_ctx_free(c, o->buf);
    free(o);
}

/* Releases a resource now, or when its last user releases it. Returns true if now. */
static bool give_back(ar_ctx *c, ari_owned *o)
{
    o->ended = o->holds > 0;
    if (o->ended)
        return false;
    release_owned(c, o);
    return true;
}

void ari_queue_drain(ar_queue *q)
{
    const ari_outcome saved = ari_outcome_of(AR_ERR_ABORTED);
    if (q && ar_queue_sync(q, 0) != AR_OK)
        (void)ari_outcome_status(&saved);
}

void ar_ctx_end_step(ar_ctx *c)
{
    /* A failed step may have left work in progress that uses this memory. */
    if (c->owned.next != &c->owned) {
        ari_queue_drain(c->overlapped.queue);
        for (int i = 0; i < ARI_TRANSFERS; i++)
            ari_queue_drain(c->transfer[i].queue);
    }
    /* the newest first, because objects may refer to older ones */
    for (ari_owned *o = newest_owned(c), *next_owned = NULL; o != &c->owned; o = next_owned) {
        next_owned = o->next;
        release_owned(c, o);
    }
    if (c->ledger)
        c->forget(c->ledger, NULL);
}

static ar_status record_owned(ar_ctx *c, ar_buf buf, size_t bytes, void (*destroy)(ar_ctx *, void *))
{
    ari_owned *o = malloc(sizeof *o);
    if (!o)
        return ar_error_set(AR_ERR_MEMORY, "no memory for a record of the step");
    *o = (ari_owned){.next = newest_owned(c),
                     .prev = &c->owned,
                     .number = ++c->newest_number,
                     .buf = buf,
                     .bytes = bytes,
                     .use = c->use,
                     .destroy = destroy,
                     .life = c->life};
    o->next->prev = o;
    c->owned.next = o;
    ari_step_count_alloc(c, bytes);
    return AR_OK;
}

ar_status ari_step_alloc(ar_ctx *c, ar_buf *out, size_t bytes)
{
    ar_buf b = {NULL};
    AR_TRY(ari_ctx_alloc(c, &b, bytes));
    const ar_status st = record_owned(c, b, bytes, NULL);
    if (st != AR_OK) {
        ari_ctx_free(c, b);
        return st;
    }
    *out = b;
    return AR_OK;
}

ar_status ari_step_own(ar_ctx *c, void *object, void (*destroy)(ar_ctx *c, void *object))
{
    const ar_buf b = {object};
    const ar_status st = record_owned(c, b, 0, destroy);
    if (st != AR_OK)
        destroy(c, object);
    return st;
}

void ari_step_disown(ar_ctx *c, void *object)
{
    for (ari_owned *o = object ? newest_owned(c) : &c->owned; o != &c->owned; o = o->next) {
        if (o->buf.ptr == object) {
            give_back(c, o);
            return;
        }
    }
}

static bool lies_in(const ari_owned *o, const ar_tensor *t)
{
    const char *begin = o->buf.ptr, *address = t ? t->data.ptr : NULL;
    return address && !o->destroy && address >= begin && address < begin + (o->bytes ? o->bytes : 1);
}

void ari_step_release_since(ar_ctx *c, uint64_t mark, const ar_tensor *retained)
{
    ari_owned *newer = &c->owned; /* the newest remaining resource: an object may end older ones together with itself */
    while (newer->next != &c->owned && newer->next->number > mark) {
        if (lies_in(newer->next, retained) || !give_back(c, newer->next))
            newer = newer->next;
    }
}

void ari_step_end_life(ar_ctx *c, int life)
{
    ari_owned *newer = &c->owned;
    while (newer->next != &c->owned) {
        if (newer->next->life != life || !give_back(c, newer->next))
            newer = newer->next;
    }
}

static ari_owned *memory_of(ar_ctx *c, const ar_tensor *t)
{
    ari_owned *o = newest_owned(c);
    while (o != &c->owned && !lies_in(o, t))
        o = o->next;
    return o != &c->owned ? o : NULL;
}

void ari_step_hold(ar_ctx *c, const ar_tensor *t)
{
    ari_owned *o = memory_of(c, t);
    if (!o)
        return;
    o->holds++;
    o->use = c->use;
}

void ari_step_let_go(ar_ctx *c, const ar_tensor *t)
{
    ari_owned *o = memory_of(c, t);
    if (o && --o->holds == 0 && o->ended)
        release_owned(c, o);
}

ar_status ari_step_take_out(ar_ctx *c, ar_buf *out, const ar_tensor *t)
{
    ari_owned *o = memory_of(c, t);
    if (!o || o->holds > 0)
        return ar_error_set(AR_ERR_ARG, "memory that is %s cannot be taken out of it", o ? "held" : "not the step's");
    *out = o->buf;
    forget_owned(c, o);
    free(o);
    return AR_OK;
}

void ari_step_free(ar_ctx *c, ar_buf b)
{
    ari_step_disown(c, b.ptr);
}

ar_status ar_ctx_tensor(ar_ctx *c, ar_tensor *t, ar_dtype dtype, int ndim, const size_t *shape)
{
    ar_tensor view;
    AR_TRY(ar_tensor_view(&view, dtype, ndim, shape, (ar_buf){NULL}));
    AR_TRY(ari_step_alloc(c, &view.data, ar_tensor_count(&view) * ar_dtype_bytes(dtype)));
    *t = view;
    if (c->ledger)
        c->forget(c->ledger, t->data.ptr);
    return AR_OK;
}

void ar_ctx_release(ar_ctx *c, ar_tensor *t)
{
    ari_step_free(c, t->data);
    t->data.ptr = NULL;
}

void ari_ctx_release_all(ar_ctx *c, ar_tensor *const *t, size_t n)
{
    for (size_t i = 0; i < n; i++)
        ar_ctx_release(c, t[i]);
}

ar_status ari_copy_of(ar_ctx *c, ar_tensor *y, const ar_tensor *x)
{
    AR_TRY(ar_ctx_tensor(c, y, x->dtype, x->ndim, x->shape));
    return ARI_KERNEL(c, copy_strided, y, x);
}

ar_status ari_take_rows(ar_ctx *c, ar_tensor *y, const ar_tensor *x, const ar_tensor *row_of, ar_cbuf w, size_t k)
{
    AR_TRY(ari_new_rows(c, y, x->dtype, row_of->shape[0], x->shape[1]));
    return ARI_KERNEL(c, gather_rows, y, x, ar_const(row_of->data), w, k);
}

void ari_release_placed(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x)
{
    if (y->data.ptr != x->data.ptr)
        ar_ctx_release(ctx, y);
}

ar_status ari_cast(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, ar_dtype dtype)
{
    *y = *x;
    if (x->dtype == dtype)
        return AR_OK;
    AR_TRY(ar_ctx_tensor(ctx, y, dtype, x->ndim, x->shape));
    return ARI_KERNEL(ctx, copy_strided, y, x);
}

void ari_step_claim(ar_ctx *c, const ar_tensor *t)
{
    ari_owned *o = memory_of(c, t);
    if (o)
        o->use = c->use;
}

void ari_step_stored(ar_ctx *c, size_t *max_bytes)
{
    if (c->bytes_now <= *max_bytes)
        return;
    *max_bytes = c->bytes_now;
    memset(c->stored, 0, sizeof c->stored);
    for (const ari_owned *o = newest_owned(c); o != &c->owned; o = o->next)
        c->stored[o->use] += o->bytes;
}

void ar_ctx_memory(const ar_ctx *c, size_t *current, size_t *peak)
{
    if (current)
        *current = c->bytes_now;
    if (peak)
        *peak = c->bytes_peak;
}

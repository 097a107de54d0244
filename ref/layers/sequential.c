/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "ref/core/size.h"
#include "ref/layers/parts.h"

typedef struct sequential_module {
    ar_module base;
    ar_module **child; /* [n] */
    size_t n;
    bool own;
} sequential_module;

static ar_status forward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                         const ar_batch *batch)
{
    const sequential_module *m = (const sequential_module *)base;
    ar_tensor in = *x;
    *y = in;
    for (size_t i = 0; i < m->n; i++) {
        AR_TRY(ar_module_forward(m->child[i], ctx, saved, y, &in, batch));
        in = *y;
    }
    return AR_OK;
}

/* The first child is not asked for a dx that nobody wants. */
static ar_status backward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dy,
                          const ar_batch *batch)
{
    const sequential_module *m = (const sequential_module *)base;
    ar_tensor d = *dy, next = d;
    for (size_t i = m->n; i-- > 0;) {
        AR_TRY(ar_module_backward(m->child[i], ctx, saved, i > 0 || dx ? &next : NULL, &d, batch));
        d = next;
    }
    if (dx)
        *dx = d;
    return AR_OK;
}

static size_t children(const ar_module *base, ar_module **out, size_t cap)
{
    const sequential_module *m = (const sequential_module *)base;
    for (size_t i = 0; i < m->n && i < cap; i++)
        out[i] = m->child[i];
    return m->n;
}

static void destroy(ar_module *base)
{
    sequential_module *m = (sequential_module *)base;
    for (size_t i = 0; m->own && i < m->n; i++)
        ar_module_destroy(m->child[i]);
    free(m->child);
    free(m);
}

ar_status ar_sequential_create(ar_module **gives, const char *name, ar_module *const *child, size_t n, bool own)
{
    static const ar_module_ops ops = {
        .kind = "sequential", .forward = forward, .backward = backward, .children = children, .destroy = destroy};
    sequential_module *m = NULL;
    ar_status st = AR_OK;
    AR_TRY(ari_alloc_zero((void **)&m, 1, sizeof *m, name));
    AR_TRY_TO(failed, st, ar_module_init(&m->base, &ops, name, AR_HELD_UNTOLD));
    AR_TRY_TO(failed, st, ari_alloc((void **)&m->child, n, sizeof *m->child, name));
    for (size_t i = 0; i < n; i++) {
        if (!child[i])
            AR_TRY_TO(failed, st, ar_error_set(AR_ERR_ARG, "%s: child %zu of %zu is NULL", name, i, n));
        m->child[i] = child[i];
    }
    m->n = n;
    m->own = own;
    *gives = &m->base;
    return AR_OK;
failed:
    destroy(&m->base);
    return st;
}

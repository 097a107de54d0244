/* SPDX-License-Identifier: Apache-2.0 */
/* A residual connection around a module. */
#include <stdlib.h>

#include "ref/core/text.h"
#include "ref/layers/layers_private.h"
#include "ref/layers/module_private.h"
#include "ref/layers/parts.h"

typedef struct residual_module {
    ar_module base;
    ar_module *branch;
    bool owns_branch;
} residual_module;

static ar_status residual_forward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                                  const ar_batch *batch)
{
    ar_tensor f;
    AR_TRY(ar_module_forward(((residual_module *)base)->branch, ctx, saved, &f, x, batch));
    return ar_add(ctx, y, x, &f);
}

static ar_status residual_backward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dy,
                                   const ar_batch *batch)
{
    ar_tensor through;
    AR_TRY(ar_module_backward(((residual_module *)base)->branch, ctx, saved, dx ? &through : NULL, dy, batch));
    return dx ? ar_add(ctx, dx, dy, &through) : AR_OK;
}

/* The backward pass does not need y. */
static ar_status residual_recompute(ar_module *base, ar_ctx *ctx, ar_saved *saved, const ar_tensor *x,
                                    const ar_batch *batch)
{
    return ari_module_recompute_saved(((residual_module *)base)->branch, ctx, saved, x, batch);
}

static void residual_destroy(ar_module *base)
{
    residual_module *m = (residual_module *)base;
    if (m->owns_branch)
        ar_module_destroy(m->branch);
    free(m);
}

ar_status ari_residual_create(ar_module **out, const char *name, ar_module *branch, ar_held placement, bool owns_branch)
{
    static const ar_module_ops ops = {.kind = "residual",
                                      .forward = residual_forward,
                                      .backward = residual_backward,
                                      .recompute = residual_recompute,
                                      .children_at = offsetof(residual_module, branch),
                                      .children_count = 1,
                                      .destroy = residual_destroy};
    residual_module *m = NULL;
    if (!branch)
        return ar_error_set(AR_ERR_ARG, "%s: a residual without a branch", ARI_SHOW(name));
    AR_TRY(ARI_MODULE_BEGIN(&m, &ops, name, placement));
    m->branch = branch;
    m->owns_branch = owns_branch;
    *out = &m->base;
    return AR_OK;
}

ar_status ar_residual_made(ar_module **out, const char *name, ar_module *const *child, size_t n, ar_held placement,
                           ar_status st)
{
    ar_module *line = NULL;
    AR_TRY(ar_sequential_made(&line, name, child, n, st));
    st = ari_residual_create(out, name, line, placement, true);
    if (st != AR_OK)
        ar_module_destroy(line);
    return st;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* A user's module on a rank of a run. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/layers/parts.h"
#include "verify/run/cluster_run.h"

ar_status ari_module_case_check(const ar_module_case *c)
{
    return c->name && c->build && c->batch
               ? AR_OK
               : ar_error_set(AR_ERR_ARG, "a module of one's own needs its name, build and batch");
}

ar_status ari_module_batches(ar_batch **out, const ar_module_case *c, size_t n)
{
    AR_TRY(ARI_ALLOC_ZERO(out, n, "batches"));
    for (size_t i = 0; i < n; i++) {
        ar_batch *b = &(*out)[i];
        AR_TRY(c->batch(c->user, (int)i + 1, b));
        if (b->batch == 0 || (!b->input && !b->input_ids))
            return ar_error_set(AR_ERR_ARG, "%s: the batch of step %zu has no samples, or no input", c->name, i + 1);
        if (b->batch != (*out)[0].batch)
            return ar_error_set(AR_ERR_ARG,
                                "%s: %zu samples in step %zu, %zu in step 1, expected as many in every step", c->name,
                                b->batch, i + 1, (*out)[0].batch);
    }
    return AR_OK;
}

ar_status ari_module_build(const ar_module_case *c, uint64_t seed, ar_ctx *ctx, ar_module **module, ar_loss **loss)
{
    *module = NULL;
    *loss = NULL;
    ARI_OWNED_BY(ar_module_destroy) ar_module *m = NULL;
    ARI_OWNED_BY(ar_loss_destroy) ar_loss *l = NULL;
    AR_TRY(c->build(c->user, ctx, &m, &l));
    if (!m || !l)
        return ar_error_set(AR_ERR_ARG, "%s: build gave no %s", c->name, m ? "loss" : "module");
    if (!c->own_weights)
        AR_TRY(ar_module_fresh(m, ctx, seed));
    ARI_GIVE(module, m);
    ARI_GIVE(loss, l);
    return AR_OK;
}

typedef struct looking {
    const ar_module_case *c;
    ar_status (*fn)(void *user, ar_param *const *params, size_t n);
    void *user;
} looking;

static ar_status look(void *user, ar_ctx *ctx)
{
    const looking *k = user;
    ARI_OWNED_BY(ar_module_destroy) ar_module *module = NULL;
    ARI_OWNED_BY(ar_loss_destroy) ar_loss *loss = NULL;
    ARI_OWNED ar_param **params = NULL;
    size_t n = 0;
    AR_TRY(ari_module_build(k->c, 0, ctx, &module, &loss));
    AR_TRY(ari_module_list(&params, &n, module));
    return k->fn(k->user, params, n);
}

ar_status ari_module_look(const ar_module_case *c, const ar_run *run,
                          ar_status (*fn)(void *user, ar_param *const *params, size_t n), void *user)
{
    looking k = {c, fn, user};
    ari_cluster_options o = {.run = *run, .body = look, .body_user = &k};
    ari_dry_memory unused;
    o.run.parallel = (ar_parallel){.tp = 1};
    return ari_cluster_dry(&unused, &o, 0, NULL);
}

/* --- uses of a module -------------------------------------------------------------------------------------------- */

typedef struct ari_use_name {
    char name[160];
    char pass;
    size_t start; /* first row of the part in the full tensor */
    int times;
} use_name;

static use_name *find_use(ari_use_names *n, const ar_tap_event *e, size_t start)
{
    for (size_t i = 0; i < n->count; i++) {
        use_name *u = &n->names[i];
        if (u->pass == e->pass && u->start == start && strcmp(u->name, e->name) == 0)
            return u;
    }
    return NULL;
}

static ar_status pass_on(void *user, const ar_tap_event *e)
{
    ari_use_names *n = user;
    const size_t start = e->layout->nbox > 0 && e->layout->ndim > 0 ? e->layout->box[0].global[0] : 0;
    if (e->step != n->step)
        n->count = 0;
    n->step = e->step;
    use_name *u = find_use(n, e, start);
    if (!u) {
        AR_TRY(ARI_GROW(&n->names, &n->capacity, n->count, "names of tensors"));
        u = &n->names[n->count++];
        *u = (use_name){.pass = e->pass, .start = start};
        snprintf(u->name, sizeof u->name, "%s", e->name);
    }
    if (++u->times == 1)
        return n->tap(n->tap_user, e);
    char name[sizeof u->name + 24];
    ar_tap_event renamed = *e;
    snprintf(name, sizeof name, "%s (use %d)", e->name, u->times);
    renamed.name = name;
    return n->tap(n->tap_user, &renamed);
}

void ari_use_names_begin(ari_use_names *n, ar_ctx *ctx)
{
    *n = (ari_use_names){.tap = ctx->tap, .tap_user = ctx->tap_user};
    if (!n->tap)
        return;
    ctx->tap = pass_on;
    ctx->tap_user = n;
}

void ari_use_names_end(ari_use_names *n, ar_ctx *ctx)
{
    ctx->tap = n->tap;
    ctx->tap_user = n->tap_user;
    free(n->names);
}

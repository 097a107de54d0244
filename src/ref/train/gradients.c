/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/train/gradients.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/context/context.h"
#include "ref/core/size.h"
#include "ref/layers/parts.h"

/* Destroys `made` and fails if a parameter is listed twice. */
static ar_status finish_create(ar_gradients **gives, ar_gradients *made)
{
    for (size_t i = 0; i < made->n; i++) {
        for (size_t k = 0; k < i; k++) {
            if (made->params[k] == made->params[i]) {
                const ar_status st =
                    ar_error_set(AR_ERR_ARG, "gradients are given the parameter %s twice", made->params[i]->name);
                ar_gradients_destroy(made);
                return st;
            }
        }
    }
    *gives = made;
    return AR_OK;
}

/* Takes over `params`. */
static ar_status create_gradients(ar_gradients **gives, ar_ctx *ctx, ar_param **params, size_t n)
{
    ar_gradients *made = NULL;
    const ar_status st = ari_alloc_zero((void **)&made, 1, sizeof *made, "a gradient manager");
    if (st != AR_OK) {
        free(params);
        return st;
    }
    made->ctx = ctx;
    made->params = params;
    made->n = n;
    return finish_create(gives, made);
}

ar_status ar_gradients_create(ar_gradients **gives, ar_ctx *ctx, ar_param *const *params, size_t n)
{
    ar_param **own = NULL;
    AR_TRY(ari_alloc((void **)&own, n, sizeof *own, "a list of parameters"));
    if (n > 0)
        memcpy(own, params, n * sizeof *own);
    return create_gradients(gives, ctx, own, n);
}

ar_status ar_gradients_create_module(ar_gradients **gives, ar_ctx *ctx, ar_module *m)
{
    ar_param **own = NULL;
    size_t n = 0;
    AR_TRY(ari_module_list(&own, &n, m));
    return create_gradients(gives, ctx, own, n);
}

void ar_gradients_destroy(ar_gradients *g)
{
    if (!g)
        return;
    free(g->finding);
    free(g->params);
    free(g);
}

size_t ar_gradients_trainable(const ar_gradients *g, ar_param **out, size_t cap)
{
    size_t n = 0;
    for (size_t i = 0; i < g->n; i++) {
        if (!g->params[i]->requires_grad)
            continue;
        if (n < cap)
            out[n] = g->params[i];
        n++;
    }
    return n;
}

static bool is_whole(const ar_layout *o)
{
    for (int d = 0; d < o->ndim; d++) {
        if (ar_layout_local(o, d) != o->shape[d])
            return false;
    }
    return true;
}

ar_param_kind ar_param_kind_of(const ar_param *p)
{
    if (p->spread)
        return AR_PARAM_PARTIAL;
    return p->layout.replicas > 1 || is_whole(&p->layout) ? AR_PARAM_REPLICATED : AR_PARAM_SHARDED;
}

const char *ar_param_kind_name(ar_param_kind k)
{
    static const char *const names[] = {
        [AR_PARAM_REPLICATED] = "replicated", [AR_PARAM_SHARDED] = "sharded", [AR_PARAM_PARTIAL] = "partial"};
    return names[k];
}

ar_status ar_gradients_zero(ar_gradients *g)
{
    for (size_t i = 0; i < g->n; i++)
        AR_TRY(ar_param_zero_grad(g->params[i], g->ctx));
    return AR_OK;
}

ar_status ar_gradients_sync(ar_gradients *g, ar_ddp *ddp)
{
    if (ddp)
        return ar_ddp_wait(ddp);
    ar_param **trainable = NULL;
    AR_TRY(ari_alloc((void **)&trainable, g->n, sizeof *trainable, "a list of parameters"));
    const size_t n = ar_gradients_trainable(g, trainable, g->n);
    const ar_status st = ar_params_reduce(trainable, n, g->ctx);
    free(trainable);
    return st;
}

ar_verdict ar_gradients_last(const ar_gradients *g)
{
    ar_verdict v = {.findings = g->findings, .finding = g->finding};
    for (size_t i = 0; i < g->findings; i++)
        v.warnings += g->finding[i].warning;
    v.errors = v.findings - v.warnings;
    v.ok = v.errors == 0;
    return v;
}

ar_status ar_gradients_verify(ar_gradients *g, ar_verdict *v, const ar_gradients_verify_options *o)
{
    ari_all_claims claims = {.own.words = NULL};
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, ari_gradients_exchange_claims(&claims, g, o));
    AR_TRY_TO(done, st, ari_gradients_judge(g, &claims, o));
    AR_TRY_TO(done, st, ari_gradients_share_findings(g));
    *v = ar_gradients_last(g);
done:
    ari_all_claims_free(&claims);
    return st;
}

ar_status ar_verdict_status(const ar_verdict *v)
{
    char text[512], more[48] = "";
    for (size_t i = 0; i < v->findings; i++) {
        if (v->finding[i].warning)
            continue;
        ar_finding_text(text, sizeof text, &v->finding[i]);
        if (v->errors > 1)
            snprintf(more, sizeof more, " (and %zu more)", v->errors - 1);
        return ar_error_set(AR_ERR_DATA, "%s%s", text, more);
    }
    return AR_OK;
}

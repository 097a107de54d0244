/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/train/gradients.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/context/context.h"
#include "ref/core/size.h"
#include "ref/layers/parts.h"

ar_status ar_gradients_create(ar_gradients **gives, ar_ctx *ctx, ar_param *const *params, size_t n)
{
    ARI_OWNED ar_gradients *made = NULL;
    for (size_t i = 0; i < n; i++) {
        for (size_t k = 0; k < i; k++) {
            if (params[k] == params[i])
                return ar_error_set(AR_ERR_ARG, "gradients are given the parameter %s twice", params[i]->name);
        }
    }
    AR_TRY(ARI_ALLOC_ZERO(&made, 1, "a gradient manager"));
    *made = (ar_gradients){.ctx = ctx, .n = n};
    AR_TRY(ARI_ALLOC(&made->params, n, "a list of parameters"));
    if (n > 0)
        memcpy(made->params, params, n * sizeof *params);
    *gives = made;
    made = NULL;
    return AR_OK;
}

ar_status ar_gradients_create_module(ar_gradients **gives, ar_ctx *ctx, ar_module *m)
{
    ARI_OWNED ar_param **params = NULL;
    size_t n = 0;
    AR_TRY(ari_module_list(&params, &n, m));
    return ar_gradients_create(gives, ctx, params, n);
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
    ARI_OWNED ar_param **trainable = NULL;
    AR_TRY(ARI_ALLOC(&trainable, g->n, "a list of parameters"));
    const size_t n = ar_gradients_trainable(g, trainable, g->n);
    return ar_params_reduce(trainable, n, g->ctx);
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
    ARI_ENDED(ari_all_claims_free) ari_all_claims claims = {.own.words = NULL};
    AR_TRY(ari_gradients_exchange_claims(&claims, g, o));
    AR_TRY(ari_gradients_judge(g, &claims, o));
    AR_TRY(ari_gradients_share_findings(g));
    *v = ar_gradients_last(g);
    return AR_OK;
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

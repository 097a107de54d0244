/* SPDX-License-Identifier: Apache-2.0 */
/* Values of a model's parameters: fresh ones, or given ones. */

#include "ref/context/context.h"
#include "ref/core/record.h"
#include "ref/core/size.h"
#include "ref/layers/faults.h"
#include "ref/layers/parts.h"
#include "ref/models/model.h"

typedef struct weight_source {
    uint64_t seed;
    const float *(*find)(void *, const char *, size_t); /* NULL: fresh */
    void *user;
} weight_source;

static ar_status set_one(ar_param *p, ar_ctx *ctx, const weight_source *s)
{
    if (!s->find) {
        AR_TRY(ar_param_fresh(p, ctx, s->seed));
    } else {
        char other[sizeof p->name];
        const size_t count = ari_volume(p->layout.shape, p->layout.ndim);
        const float *full = s->find(s->user, ari_fault_layer_name(other, sizeof other, ctx, p->name, true), count);
        if (!full)
            return ar_error_set(AR_ERR_NOT_FOUND, "the weights hold no tensor '%s' of %zu elements", p->name, count);
        AR_TRY(ar_param_set(p, ctx, full));
    }
    return AR_OK;
}

static ar_status set_all(ar_model *m, ar_ctx *ctx, weight_source *s)
{
    size_t n = 0;
    ARI_OWNED ar_param **all = NULL;
    ar_status st = AR_OK;
    AR_TRY(ari_module_list(&all, &n, ar_model_module(m)));
    ari_span_begin("weights");
    for (size_t i = 0; i < n; i++)
        AR_TRY_TO(done, st, set_one(all[i], ctx, s));
    AR_TRY_TO(done, st, ar_params_broadcast(all, n, ctx));
    for (size_t i = 0; i < n; i++)
        AR_TRY_TO(done, st, ari_value_tap(all[i], ctx, 'i'));
done:
    return ari_span_end(st);
}

ar_status ar_model_fresh(ar_model *m, ar_ctx *ctx, uint64_t seed)
{
    weight_source s = {.seed = seed};
    AR_TRY(ari_streams_check(ari_model_config(m), seed));
    return set_all(m, ctx, &s);
}

ar_status ar_model_set(ar_model *m, ar_ctx *ctx, const float *(*find)(void *, const char *, size_t), void *user)
{
    weight_source s = {.find = find, .user = user};
    return set_all(m, ctx, &s);
}

/* SPDX-License-Identifier: Apache-2.0 */
/* QK-Clip: queries and keys of a KV head, one of whose logits was above a bound in this step, are scaled by as much as
 * brings that logit down to it. A logit is an integer of the softmax, whose maximum no order changes. */
#include <math.h>
#include <stdlib.h>

#include "ref/core/size.h"
#include "ref/layers/attention/attention.h"
#include "ref/layers/share.h"
#include "ref/numerics/scalar.h"

static void forget(ari_attention *m)
{
    for (size_t i = 0; i < m->o.heads; i++)
        m->largest[i] = INT32_MIN;
}

ar_status ari_qk_clip_track(int32_t **gives, ari_attention *m, const ar_ctx *ctx)
{
    *gives = NULL;
    if (!ctx->tracks_logits)
        return AR_OK;
    if (!m->largest) {
        AR_TRY(ARI_ALLOC(&m->largest, m->o.heads, "largest logits"));
        forget(m);
    }
    *gives = m->largest;
    return AR_OK;
}

/* What the rows of this rank's KV head j, and of the queries that use it, are multiplied by. */
static float factor_of(const ari_attention *m, const ar_ctx *ctx, size_t j, double bound)
{
    const size_t query = (size_t)(ar_comm_rank(ctx->tp) / m->copies) * m->heads + j * (m->heads / m->kv_heads);
    const size_t first = query / m->group_full * m->group_full;
    int32_t most = INT32_MIN;
    for (size_t i = first; i < first + m->group_full; i++)
        most = m->largest[i] > most ? m->largest[i] : most;
    const double logit = (double)ari_key32_value(most);
    return logit > bound ? (float)sqrt(bound / logit) : 1.0f;
}

/* Each feature of q | k | v as the projections have them. */
static void fill(ari_attention *m, const ar_ctx *ctx, double bound)
{
    const size_t d = m->o.head_dim, group = m->heads / m->kv_heads, keys = m->heads * d,
                 each = m->o.by_head ? 3 * d : d;
    for (size_t i = 0; i < (m->heads + 2 * m->kv_heads) * d; i++)
        m->clip[i] = 1.0f;
    for (size_t h = 0; h < m->heads; h++) {
        const float f = factor_of(m, ctx, h / group, bound);
        float *q = m->clip + h * each, *k = m->o.by_head ? q + d : m->clip + keys + h / group * d;
        for (size_t i = 0; i < d; i++)
            q[i] = k[i] = f;
    }
}

static ar_status prepare(ari_attention *m, ar_ctx *ctx, double bound)
{
    const size_t n = m->o.heads, d = m->o.head_dim, start[3] = {0, m->heads * d, (m->heads + m->kv_heads) * d};
    int32_t *largest;
    AR_TRY(ari_qk_clip_track(&largest, m, ctx));
    if (!m->clip)
        AR_TRY(ARI_ALLOC(&m->clip, start[2] + m->kv_heads * d, "factors of QK-Clip"));
    AR_TRY(ari_combine(ctx, ctx->tp, largest, n, AR_I32, AR_MAX, m->base.name));
    if (!ar_faulty(ctx, AR_FAULT_qk_clip_local))
        AR_TRY(ari_combine(ctx, ctx->dp, largest, n, AR_I32, AR_MAX, m->base.name));
    if (!ctx->device->hollow)
        fill(m, ctx, bound);
    for (int i = 0; i < m->qkv.n; i++) {
        m->qkv.weight[i]->clip = m->clip + start[i];
        m->qkv.bias[i].clip = m->clip + start[i];
    }
    forget(m);
    return AR_OK;
}

typedef struct clipping {
    ar_ctx *ctx;
    double bound;
} clipping;

static ar_status prepare_each(void *user, ar_module *m)
{
    const clipping *c = user;
    ari_attention *attention = ari_attention_of(m);
    return attention ? prepare(attention, c->ctx, c->bound) : AR_OK;
}

ar_status ari_qk_clip_prepare(ar_module *m, ar_ctx *ctx, double bound)
{
    return bound > 0.0 ? ari_module_each(m, prepare_each, &(clipping){ctx, bound}) : AR_OK;
}

ar_status ari_qk_clip_param(ar_param *p, ar_ctx *ctx)
{
    const bool shared = ari_value_is_shared(p);
    const size_t start = shared ? p->share->start : 0, n = shared ? p->share->count : ar_tensor_count(&p->value);
    const bool across = p->transposed && !shared; /* a share's elements are in the order of the layer's matrix */
    const size_t rows = p->value.ndim == 1 ? 1 : p->value.shape[1], inputs = p->transposed ? p->value.shape[0] : rows;
    const ar_tensor t = ar_tensor_flat(AR_F32, shared ? p->share->value : p->value.data, n);
    float *host = NULL;
    if (!p->clip || n == 0 || ctx->device->hollow)
        return AR_OK;
    AR_TRY(ARI_ALLOC(&host, n, p->name));
    ar_status st = ar_ctx_download(ctx, host, &t);
    for (size_t i = 0; i < n && st == AR_OK; i++)
        host[i] *= p->clip[across ? i % rows : (start + i) / inputs];
    if (st == AR_OK)
        st = ar_ctx_upload(ctx, &t, host);
    free(host);
    return st;
}

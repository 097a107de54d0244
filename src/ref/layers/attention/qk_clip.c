/* SPDX-License-Identifier: Apache-2.0 */
/* QK-Clip: queries and keys of a KV head, one of whose logits was above a bound in this step, are scaled by as much as
 * brings that logit down to it. A logit is an integer of the softmax, whose maximum no order changes. */
#include <math.h>
#include <stdlib.h>

#include "ref/core/size.h"
#include "ref/layers/attention/attention.h"
#include "ref/numerics/scalar.h"

ar_status ari_qk_clip_track(int32_t **gives, ari_attention *m, const ar_ctx *ctx)
{
    *gives = NULL;
    if (!ctx->tracks_logits)
        return AR_OK;
    const bool fresh = !m->largest;
    if (fresh)
        AR_TRY(ARI_ALLOC(&m->largest, m->o.heads, "largest logits"));
    for (size_t i = 0; i < m->o.heads && (fresh || m->largest_step != ctx->step); i++)
        m->largest[i] = INT32_MIN;
    m->largest_step = ctx->step;
    *gives = m->largest;
    return AR_OK;
}

/* What brings the logits of this rank's KV head j, and of the queries that use it, down to the bound. */
static double ratio_of(const ari_attention *m, const ar_ctx *ctx, size_t j, double bound)
{
    const size_t query = (size_t)(ar_comm_rank(ctx->tp) / m->copies) * m->heads + j * (m->heads / m->kv_heads);
    const size_t first = query / m->group_full * m->group_full;
    int32_t most = INT32_MIN;
    for (size_t i = first; i < first + m->group_full; i++)
        most = m->largest[i] > most ? m->largest[i] : most;
    const double logit = (double)ari_key32_value(most);
    return logit > bound ? bound / logit : 1.0;
}

/* Each feature of q | k | v as the projections have them; of latent attention, where k | v stand head by head and all
 * heads take the last features of a key, it is the query's that are scaled by all. */
static void fill(ari_attention *m, const ar_ctx *ctx, double bound)
{
    const size_t d = m->o.head_dim, group = m->heads / m->kv_heads, plain = d - m->o.latent.rope_dim;
    const size_t keys = m->heads * d, each = m->latent ? plain + m->value_dim : d;
    for (size_t i = 0; i < m->clips; i++)
        m->clip[i] = 1.0f;
    for (size_t h = 0; h < m->heads; h++) {
        const double ratio = ratio_of(m, ctx, h / group, bound);
        float *q = m->clip + h * (m->o.by_head ? 3 * d : d);
        float *k = m->o.by_head ? q + d : m->clip + keys + h / group * each;
        for (size_t i = 0; i < d; i++)
            q[i] = (float)(i < plain ? sqrt(ratio) : ratio);
        for (size_t i = 0; i < plain; i++)
            k[i] = (float)sqrt(ratio);
    }
}

static ar_status prepare(ari_attention *m, ar_ctx *ctx, double bound)
{
    const size_t n = m->o.heads, d = m->o.head_dim, start[3] = {0, m->heads * d, (m->heads + m->kv_heads) * d};
    int32_t *largest;
    AR_TRY(ari_qk_clip_track(&largest, m, ctx));
    if (!m->clip) {
        m->clips = start[2] + m->kv_heads * (m->latent ? m->value_dim : d);
        AR_TRY(ARI_ALLOC(&m->clip, m->clips, "factors of QK-Clip"));
    }
    AR_TRY(ari_combine(ctx, ctx->tp, largest, n, AR_I32, AR_MAX, m->base.name));
    if (!ar_faulty(ctx, AR_FAULT_qk_clip_local))
        AR_TRY(ari_combine(ctx, ctx->dp, largest, n, AR_I32, AR_MAX, m->base.name));
    if (!ctx->device->hollow)
        fill(m, ctx, bound);
    ari_latent_clip(m, m->clip, m->clip + start[1]);
    for (int i = 0; i < m->qkv.n; i++) {
        m->qkv.weight[i]->clip = m->clip + start[i];
        m->qkv.bias[i].clip = m->clip + start[i];
    }
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

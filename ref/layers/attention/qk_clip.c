/* SPDX-License-Identifier: Apache-2.0 */
/* QK-Clip: if a logit exceeds a bound in this step, the queries and keys of its KV head are scaled so that the logit
 * equals the bound. A logit is an integer of the softmax, whose maximum does not depend on the order. */
#include <math.h>

#include "ref/core/tensor_private.h"
#include "ref/layers/attention/attention.h"
#include "ref/numerics/scalar.h"

ar_status ari_qk_clip_track(int32_t **out, ari_attention *m, const ar_ctx *ctx)
{
    *out = NULL;
    if (!ctx->tracks_logits)
        return AR_OK;
    const bool fresh = !m->largest;
    if (fresh)
        AR_TRY(ARI_ALLOC(&m->largest, m->o.heads, "largest logits"));
    for (size_t i = 0; i < m->o.heads && (fresh || m->largest_step != ctx->step); i++)
        m->largest[i] = INT32_MIN;
    m->largest_step = ctx->step;
    *out = m->largest;
    return AR_OK;
}

/* Returns the factor that reduces the logits of a query's KV head, and of the queries that use the head, to the
 * bound. */
static double ratio_of(const ari_attention *m, size_t query, double bound)
{
    const size_t first_query = query / m->group_full * m->group_full;
    int32_t group_max = INT32_MIN;
    for (size_t i = first_query; i < first_query + m->group_full; i++)
        group_max = m->largest[i] > group_max ? m->largest[i] : group_max;
    const double logit = (double)ari_key32_value(group_max);
    return logit > bound ? bound / logit : 1.0;
}

/* Returns the number of features of q | k | v for some heads. */
static size_t features_of(const ari_attention *m, size_t heads, size_t kv_heads)
{
    const size_t d = m->o.head_dim;
    return heads * d + kv_heads * (d + (m->latent ? m->value_dim : d));
}

/* Fills the factor of each feature of q | k | v for heads from first_head on, in the projections' order. In latent
 * attention, where k | v are grouped by head and all heads share a key's last features, these are scaled on the query's
 * side. */
static void fill(float *clip, const ari_attention *m, size_t first_head, size_t heads, size_t kv_heads, double bound)
{
    const size_t d = m->o.head_dim, group = heads / kv_heads, plain = d - m->o.latent.rope_dim;
    const size_t kv_width = m->latent ? plain + m->value_dim : d;
    for (size_t i = 0; i < features_of(m, heads, kv_heads); i++)
        clip[i] = 1.0f;
    for (size_t h = 0; h < heads; h++) {
        const double ratio = ratio_of(m, first_head + h / group * group, bound);
        float *q = clip + h * (m->o.by_head ? 3 * d : d);
        float *k = m->o.by_head ? q + d : clip + heads * d + h / group * kv_width;
        for (size_t i = 0; i < d; i++)
            q[i] = (float)(i < plain ? sqrt(ratio) : ratio);
        for (size_t i = 0; i < plain; i++)
            k[i] = (float)sqrt(ratio);
    }
}

/* Attaches the factors. A plan may shard a projection along its inputs: then it has the outputs of all heads, while the
 * rank's attention has some. */
static void attach_clips(ari_attention *m, float *local, float *full)
{
    const size_t d = m->o.head_dim;
    ari_latent_clip(m, local, local + m->heads * d);
    for (int i = 0; i < m->qkv.n; i++) {
        ar_param *w = m->qkv.weight[i];
        const int outputs = w->transposed ? 1 : 0;
        const bool is_full = ari_layout_local(&w->layout, outputs) == w->layout.shape[outputs];
        const size_t q = is_full ? m->o.heads : m->heads, k = is_full ? m->o.kv_heads : m->kv_heads;
        w->clip = m->qkv.bias[i].clip = (is_full ? full : local) + (i > 0 ? q * d : 0) + (i > 1 ? k * d : 0);
    }
}

static ar_status prepare(ari_attention *m, ar_ctx *ctx, double bound)
{
    const size_t n = m->o.heads, local_count = features_of(m, m->heads, m->kv_heads);
    int32_t *largest;
    AR_TRY(ari_qk_clip_track(&largest, m, ctx));
    if (!m->clip)
        AR_TRY(ARI_ALLOC(&m->clip, local_count + features_of(m, n, m->o.kv_heads), "factors of QK-Clip"));
    AR_TRY(ari_combine(ctx, ctx->tp, largest, n, AR_I32, AR_MAX, m->base.name));
    AR_TRY(ari_combine(ctx, ctx->dp, largest, n, AR_I32, AR_MAX, m->base.name));
    AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_LOGITS_MAX, .name = m->base.name));
    if (!ctx->device->hollow) {
        fill(m->clip, m, (size_t)(ar_comm_rank(ctx->tp) / m->copies) * m->heads, m->heads, m->kv_heads, bound);
        fill(m->clip + local_count, m, 0, n, m->o.kv_heads, bound);
    }
    attach_clips(m, m->clip, m->clip + local_count);
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

/* SPDX-License-Identifier: Apache-2.0 */
/* Projections of latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1). Every rank multiplies the input by
 * small replicated matrices and normalises the results. Matrices sharded by heads turn these into queries, keys and
 * values. A key's last features come directly from the input's projection and are shared by all heads. Gradients of
 * values that all heads use are summed over the heads here, so they are complete on every rank: gradients of the
 * replicated matrices need no further sum over the tensor-parallel ranks. */
#include <stdlib.h>

#include "anyrank/module.h"
#include "ref/context/context_private.h"
#include "ref/layers/attention/attention.h"
#include "ref/layers/parts.h"

enum { SAVED_X, SAVED_MEAN, SAVED_RSTD };
enum { QUERIES, KEYS }; /* low-rank paths */

/* A path's norm and the layer after it. */
typedef struct latent_path {
    char norm_name[ARI_PART_PATH], name[ARI_PART_PATH];
    ar_param gain;
    size_t rank;
    ari_linear layer;
} latent_path;

typedef struct ari_latent {
    char down_name[2][ARI_PART_PATH];
    ari_linear down;      /* down-projections of queries, if they have a rank, and of keys; both use the input */
    latent_path paths[2]; /* paths of queries and of keys; queries without a rank have only the layer, which uses the
                             input */
} ari_latent;

static size_t key_width(const ari_attention *m)
{
    return m->o.latent.kv_rank + m->o.latent.rope_dim;
}

static bool queries_have_rank(const ari_attention *m)
{
    return m->o.latent.q_rank > 0;
}

/* Features [first_feature, first_feature + n) of t, contiguous. */
static ar_status take_features(ar_ctx *ctx, ar_tensor *y, const ar_tensor *t, size_t first_feature, size_t n)
{
    const ar_tensor src = ar_tensor_slice(t, 2, first_feature, n);
    return ari_copy_of(ctx, y, &src);
}

static ar_status put_features(ar_ctx *ctx, const ar_tensor *t, size_t first_feature, const ar_tensor *x)
{
    const ar_tensor dst = ar_tensor_slice(t, 2, first_feature, x->shape[2]);
    return ARI_KERNEL(ctx, copy_strided, &dst, x);
}

/* --- forward ------------------------------------------------------------------------------------------------------ */

/* Computes y = the path's layer, applied to its norm of features [first_feature, first_feature + rank) of the
 * replicated matrices' result. */
static ar_status climb(latent_path *p, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *low,
                       size_t first_feature)
{
    ar_tensor x, normed;
    ar_norm_saved rows;
    AR_TRY(take_features(ctx, &x, low, first_feature, p->rank));
    AR_TRY(ar_norm_forward(ctx, AR_NORM_RMS, &normed, &rows, &x, &p->gain, NULL, AR_LATENT_EPS));
    AR_TRY(ari_tap_full(ctx, p->norm_name, NULL, 'f', &normed));
    AR_TRY(ar_saved_push(saved, p, SAVED_X, &x));
    AR_TRY(ar_saved_push(saved, p, SAVED_MEAN, &rows.mean));
    AR_TRY(ar_saved_push(saved, p, SAVED_RSTD, &rows.rstd));
    return ari_linear_forward(&p->layer, ctx, saved, y, &normed, AR_ACT_NONE, NULL);
}

static ar_status tap_down(const ari_attention *m, ar_ctx *ctx, const ar_tensor *low)
{
    const size_t query_rank = m->o.latent.q_rank;
    const ar_tensor parts[2] = {ar_tensor_slice(low, 2, 0, query_rank),
                                ar_tensor_slice(low, 2, query_rank, key_width(m))};
    for (int i = queries_have_rank(m) ? QUERIES : KEYS; i <= KEYS; i++)
        AR_TRY(ari_tap_full(ctx, m->latent->down_name[i], NULL, 'f', &parts[i]));
    return AR_OK;
}

static ar_status tap_up(const ari_attention *m, ar_ctx *ctx, int which, const ar_tensor *y)
{
    return ari_tap_copies(ctx, m->latent->paths[which].name, NULL, 'f', y, 2, y->shape[2] / m->heads * m->o.heads,
                          m->copies);
}

/* Views of q | k | v or of their gradients: queries, keys without and with positions, values, [b, s, heads, d]; and of
 * the key layer's output: keys without positions, and values. */
typedef struct latent_views {
    ar_tensor q, k, k_rope, v, up_k, up_v;
} latent_views;

static latent_views views_of(const ari_attention *m, const ar_tensor *qkv, const ar_tensor *up)
{
    const size_t d = m->o.head_dim, rope = m->o.latent.rope_dim, qk_width = m->heads * d, plain = d - rope;
    const ar_tensor k = ar_tensor_slice(qkv, 2, qk_width, qk_width),
                    v = ar_tensor_slice(qkv, 2, 2 * qk_width, m->heads * m->value_dim);
    const ar_tensor keys = ari_heads_view(&k, 0, m->heads, 1, d);
    const ar_tensor up_heads = ari_heads_view(up, 0, m->heads, 1, plain + m->value_dim);
    return (latent_views){.q = ar_tensor_slice(qkv, 2, 0, qk_width),
                          .k = ar_tensor_slice(&keys, 3, 0, plain),
                          .k_rope = ar_tensor_slice(&keys, 3, plain, rope),
                          .v = ari_heads_view(&v, 0, m->heads, 1, m->value_dim),
                          .up_k = ar_tensor_slice(&up_heads, 3, 0, plain),
                          .up_v = ar_tensor_slice(&up_heads, 3, plain, m->value_dim)};
}

static ar_status join(ari_attention *m, ar_ctx *ctx, ar_tensor *qkv, const ar_tensor *q, const ar_tensor *low,
                      const ar_tensor *up)
{
    const size_t rope = m->o.latent.rope_dim, rope_start = low->shape[2] - rope;
    AR_TRY(ari_like(ctx, qkv, q, m->heads * (2 * m->o.head_dim + m->value_dim)));
    const latent_views views = views_of(m, qkv, up);
    ar_tensor shared = ar_tensor_slice(low, 2, rope_start, rope);
    shared = ari_heads_view(&shared, 0, m->heads, 0, rope); /* every head gets the same features */
    AR_TRY(ARI_KERNEL(ctx, copy_strided, &views.q, q));
    AR_TRY(ARI_KERNEL(ctx, copy_strided, &views.k, &views.up_k));
    AR_TRY(ARI_KERNEL(ctx, copy_strided, &views.k_rope, &shared));
    AR_TRY(ARI_KERNEL(ctx, copy_strided, &views.v, &views.up_v));
    return ARI_NOTE(ctx, .kind = ARI_LEDGER_JOIN, .input = {q, up, low}, .out = {qkv});
}

ar_status ari_latent_forward(ari_attention *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *qkv, const ar_tensor *x)
{
    ari_latent *l = m->latent;
    ar_tensor low, q, up;
    if (!queries_have_rank(m))
        AR_TRY(ari_linear_forward(&l->paths[QUERIES].layer, ctx, saved, &q, x, AR_ACT_NONE, NULL));
    AR_TRY(ari_linear_forward(&l->down, ctx, saved, &low, x, AR_ACT_NONE, NULL));
    AR_TRY(tap_down(m, ctx, &low));
    if (queries_have_rank(m))
        AR_TRY(climb(&l->paths[QUERIES], ctx, saved, &q, &low, 0));
    AR_TRY(tap_up(m, ctx, QUERIES, &q));
    AR_TRY(climb(&l->paths[KEYS], ctx, saved, &up, &low, m->o.latent.q_rank));
    AR_TRY(tap_up(m, ctx, KEYS, &up));
    AR_TRY(join(m, ctx, qkv, &q, &low, &up));
    ARI_RELEASE(ctx, &up, &q, &low);
    return AR_OK;
}

/* --- backward ----------------------------------------------------------------------------------------------------- */

/* Computes y [b, s, d] as the sum over all heads of x [b, s, heads, d], a contraction with ones, whichever ranks have
 * the heads. */
static ar_status sum_over_heads(const ari_attention *m, ar_ctx *ctx, ar_tensor *y, const ar_tensor *x)
{
    const size_t heads = x->shape[2], rows[3] = {x->shape[0], x->shape[1] * x->shape[3], heads};
    const size_t ones_shape[3] = {x->shape[0], 1, heads}, out[3] = {x->shape[0], x->shape[1], x->shape[3]};
    const bool is_split = ari_placed_by_features(m->split.first.output) && ar_comm_size(ctx->tp) > 1;
    ar_comm *const group = is_split ? ctx->tp : NULL;
    const ar_operand *a = NULL, *b = NULL;
    ar_sum *s = NULL;
    ar_tensor turned, ones, sums;
    AR_TRY(ar_ctx_tensor(ctx, &turned, x->dtype, 3, rows));
    const ar_tensor dst = {.dtype = x->dtype,
                           .ndim = 4,
                           .shape = {x->shape[0], x->shape[1], heads, x->shape[3]},
                           .stride = {turned.stride[0], (ptrdiff_t)(x->shape[3] * heads), 1, (ptrdiff_t)heads},
                           .data = turned.data};
    AR_TRY(ARI_KERNEL(ctx, copy_strided, &dst, x));
    AR_TRY(ar_ctx_tensor(ctx, &ones, AR_F32, 3, ones_shape));
    AR_TRY(ARI_KERNEL(ctx, fill, &ones, 1.0f));
    AR_TRY(ar_ctx_tensor(ctx, y, x->dtype, 3, out));
    AR_TRY(ar_tensor_view(&sums, x->dtype, 3, (size_t[3]){rows[0], rows[1], 1}, y->data));
    const ar_parts terms = {.n = 1, .part = {turned}}, units = {.n = 1, .part = {ones}};
    AR_TRY(ctx->arith->operand_b(ctx, &b, &units, false, m->o.heads, group, NULL, m->base.name));
    AR_TRY(ctx->arith->operand_a(ctx, &a, &terms, b, m->base.name));
    AR_TRY(ctx->arith->contract(ctx, &s, a, b));
    if (group)
        AR_TRY(ctx->arith->fold(ctx, s, ctx->queue, group, ari_faulty(ctx, "latent_key_grad_local") ? AR_KEEP : AR_ALL,
                                m->base.name));
    AR_TRY(ctx->arith->round(ctx, &sums, s, NULL));
    if (ari_ctx_sp(ctx) && ari_faulty(ctx, "sp_latent_key_grad_summed"))
        AR_TRY(ARI_KERNEL(ctx, scale, y, y, (float)ar_comm_size(ctx->tp)));
    ctx->arith->operand_done(ctx, a);
    ctx->arith->operand_done(ctx, b);
    ARI_RELEASE(ctx, &turned, &ones);
    return ARI_NOTE(ctx, .kind = ARI_LEDGER_JOIN, .input = {x}, .out = {y});
}

/* Computes features [first_feature, first_feature + rank) of dlow from the gradient of the path's output. */
static ar_status descend(latent_path *p, ar_ctx *ctx, ar_saved *saved, const ar_tensor *dlow, size_t first_feature,
                         const ar_tensor *dy)
{
    ar_tensor d, x;
    ar_norm_saved rows;
    AR_TRY(ari_linear_backward(&p->layer, ctx, saved, &d, dy, p->name, NULL));
    AR_TRY(ar_saved_pop(saved, p, SAVED_RSTD, &rows.rstd));
    AR_TRY(ar_saved_pop(saved, p, SAVED_MEAN, &rows.mean));
    AR_TRY(ar_saved_pop(saved, p, SAVED_X, &x));
    AR_TRY(ari_norm_gradients(ctx, AR_NORM_RMS, &d, NULL, &d, &x, &rows, &p->gain, NULL, NULL, true));
    AR_TRY(ari_tap_full(ctx, p->norm_name, NULL, 'b', &d));
    AR_TRY(put_features(ctx, dlow, first_feature, &d));
    ARI_RELEASE(ctx, &d, &rows.rstd, &rows.mean, &x);
    return AR_OK;
}

/* Propagates through keys and values to the output of the replicated matrices; other features are left unchanged. */
static ar_status keys_backward(ari_attention *m, ar_ctx *ctx, ar_saved *saved, const ar_tensor *dlow,
                               const ar_tensor *dqkv)
{
    const size_t rope = m->o.latent.rope_dim;
    ar_tensor up, shared;
    AR_TRY(ari_like(ctx, &up, dqkv, m->heads * (m->o.head_dim - rope + m->value_dim)));
    const latent_views views = views_of(m, dqkv, &up);
    AR_TRY(ARI_KERNEL(ctx, copy_strided, &views.up_k, &views.k));
    AR_TRY(ARI_KERNEL(ctx, copy_strided, &views.up_v, &views.v));
    AR_TRY(sum_over_heads(m, ctx, &shared, &views.k_rope));
    AR_TRY(ari_tap_full(ctx, m->base.name, "k_shared", 'b', &shared));
    AR_TRY(put_features(ctx, dlow, dlow->shape[2] - rope, &shared));
    ar_ctx_release(ctx, &shared);
    AR_TRY(descend(&m->latent->paths[KEYS], ctx, saved, dlow, m->o.latent.q_rank, &up));
    ar_ctx_release(ctx, &up);
    return AR_OK;
}

/* Adds the queries' part of the input's gradient. If queries have no low-rank projection, the gradient is a sum of two
 * terms, each rounded. */
static ar_status add_queries(ari_attention *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dq)
{
    latent_path *p = &m->latent->paths[QUERIES];
    ar_tensor extra;
    AR_TRY(ari_linear_backward(&p->layer, ctx, saved, dx ? &extra : NULL, dq, NULL, NULL));
    if (!dx)
        return AR_OK;
    AR_TRY(ari_add_gradient(ctx, dx, &extra));
    return ari_tap_placed(ctx, m->base.name, NULL, 'b', dx, m->o.hidden, ari_placed_gradient(m->split.first.input));
}

ar_status ari_latent_backward(ari_attention *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dqkv)
{
    ari_latent *l = m->latent;
    const bool rank = queries_have_rank(m);
    ar_tensor dlow, dq;
    AR_TRY(ari_like(ctx, &dlow, dqkv, m->o.latent.q_rank + key_width(m)));
    AR_TRY(take_features(ctx, &dq, dqkv, 0, m->heads * m->o.head_dim));
    AR_TRY(keys_backward(m, ctx, saved, &dlow, dqkv));
    if (rank)
        AR_TRY(descend(&l->paths[QUERIES], ctx, saved, &dlow, 0, &dq));
    AR_TRY(ari_linear_backward(&l->down, ctx, saved, dx, &dlow, rank ? m->base.name : NULL, NULL));
    ar_ctx_release(ctx, &dlow);
    if (!rank)
        AR_TRY(add_queries(m, ctx, saved, dx, &dq));
    ar_ctx_release(ctx, &dq);
    return AR_OK;
}

/* --- construction ------------------------------------------------------------------------------------------------- */

static ar_status check_options(const ari_attention *m)
{
    const ar_attention_options *o = &m->o;
    const ar_latent *l = &o->latent;
    if (o->kv_heads != o->heads || o->fused || o->transposed || o->qk_norm != AR_QK_NORM_NONE)
        return ar_error_set(AR_ERR_ARG,
                            "%s: latent attention has a key and a value for each of its %zu heads, and no "
                            "other norms; expected such options",
                            m->base.name, o->heads);
    if (l->rope_dim == 0 || l->rope_dim >= o->head_dim || l->value_dim == 0)
        return ar_error_set(AR_ERR_ARG,
                            "%s: %zu of %zu features of a key turn, and values have %zu; expected fewer, "
                            "and one or more of each",
                            m->base.name, l->rope_dim, o->head_dim, l->value_dim);
    if (m->split.first.style == AR_STYLE_ROWWISE)
        return ar_error_set(AR_ERR_ARG, "%s: queries, keys and values of latent attention are colwise or replicate",
                            m->base.name);
    return AR_OK;
}

static ar_status name_parts(const ari_attention *m, ari_latent *l)
{
    const ar_attention_options *o = &m->o;
    const bool rank = queries_have_rank(m);
    const struct {
        char *path;
        const char *leaf;
    } names[] = {{l->down_name[KEYS], o->kv_a},   {l->paths[KEYS].norm_name, o->kv_a_norm},
                 {l->paths[KEYS].name, o->kv_b},  {l->paths[QUERIES].name, rank ? o->q_b : o->q},
                 {l->down_name[QUERIES], o->q_a}, {l->paths[QUERIES].norm_name, o->q_a_norm}};
    for (size_t i = 0; i < (rank ? 6 : 4); i++)
        AR_TRY(ari_path(names[i].path, ARI_PART_PATH, m->base.name, names[i].leaf));
    return AR_OK;
}

static ar_status init_down(const ari_attention *m, ari_latent *l, ar_ctx *ctx)
{
    ari_linear_spec s = {.split = {AR_STYLE_REPLICATE, m->split.first.input, ari_replicated},
                         .in_features = m->o.hidden,
                         .bias = m->o.qkv_bias};
    if (queries_have_rank(m))
        s.part[s.n++] = (ari_linear_part){.name = l->down_name[QUERIES], .out = m->o.latent.q_rank};
    s.part[s.n++] = (ari_linear_part){.name = l->down_name[KEYS], .out = key_width(m)};
    AR_TRY(ari_linear_init(&l->down, ctx, &s));
    l->down.shared = m->o.latent.rope_dim;
    return AR_OK;
}

/* A layer whose outputs are cut by heads, of `per_head` features. */
static ar_status init_path(const ari_attention *m, latent_path *p, ar_ctx *ctx, size_t rank, size_t per_head)
{
    ari_linear_spec s = {.split = m->split.first,
                         .n = 1,
                         .part = {{.name = p->name, .out = m->o.heads * per_head}},
                         .in_features = rank > 0 ? rank : m->o.hidden};
    p->rank = rank;
    if (rank > 0) {
        s.split.input = ari_replicated;
        AR_TRY(ari_norm_gain_init(&p->gain, ctx, p->norm_name, rank, false));
        p->gain.spread = false; /* every rank has all tokens */
    }
    return ari_linear_init(&p->layer, ctx, &s);
}

ar_status ari_latent_create(ari_attention *m, ar_ctx *ctx)
{
    const ar_latent *o = &m->o.latent;
    if (o->kv_rank == 0)
        return AR_OK;
    AR_TRY(check_options(m));
    AR_TRY(ARI_ALLOC_ZERO(&m->latent, 1, "latent attention"));
    AR_TRY(name_parts(m, m->latent));
    AR_TRY(init_down(m, m->latent, ctx));
    AR_TRY(init_path(m, &m->latent->paths[QUERIES], ctx, o->q_rank, m->o.head_dim));
    return init_path(m, &m->latent->paths[KEYS], ctx, o->kv_rank, m->o.head_dim - o->rope_dim + o->value_dim);
}

void ari_latent_destroy(ari_attention *m)
{
    if (!m->latent)
        return;
    ari_linear_fini(&m->latent->down);
    for (int i = QUERIES; i <= KEYS; i++) {
        ar_param_fini(&m->latent->paths[i].gain);
        ari_linear_fini(&m->latent->paths[i].layer);
    }
    free(m->latent);
}

void ari_latent_clip(ari_attention *m, const float *queries, const float *keys)
{
    const float *const clip[2] = {queries, keys};
    for (int i = QUERIES; m->latent && i <= KEYS; i++)
        m->latent->paths[i].layer.weight[0]->clip = clip[i];
}

size_t ari_latent_params(ari_attention *m, ar_param **out, size_t cap)
{
    ari_latent *l = m->latent;
    ari_linear *const first = queries_have_rank(m) ? &l->down : &l->paths[QUERIES].layer;
    ari_linear *const second = queries_have_rank(m) ? &l->paths[QUERIES].layer : &l->down;
    size_t n = ari_linear_params(first, out, cap);
    for (int i = QUERIES; i <= KEYS; i++) {
        if (l->paths[i].rank > 0 && n < cap)
            out[n] = &l->paths[i].gain;
        n += l->paths[i].rank > 0;
        ari_linear *const layer = i == QUERIES ? second : &l->paths[i].layer;
        n += ari_linear_params(layer, out + (n < cap ? n : cap), n < cap ? cap - n : 0);
    }
    return n;
}

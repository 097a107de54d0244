/* SPDX-License-Identifier: Apache-2.0 */
/* RMSNorms of queries and keys between their projections and the rotation. Each rank has all features of its heads, so
 * nothing is communicated. The heads share the gain, whose gradient is a sum over heads and tokens. A norm over all
 * heads first gathers the other ranks' heads, as in Hugging Face's tensor-parallel plan. */
#include "anyrank/module.h"
#include "ref/layers/attention/attention.h"

enum {
    SAVED_NORM = 8,
    OF_EACH = 3
}; /* keys of saved values, first for queries and then for keys: the normalised value, means, deviations */

typedef struct normed {
    ari_qk_norm *norm;
    int which;                    /* 0: queries, 1: keys */
    size_t heads, total_heads, d; /* number of heads on this rank and in the model */
    int copies;                   /* number of neighbouring ranks with the same heads */
    bool cut;                     /* true if ranks have different heads */
} normed;

static normed normed_of(ari_attention *m, const ar_ctx *ctx, int which)
{
    const bool cut = ar_comm_size(ctx->tp) > 1 && ari_placed_by_features(m->split.first.output);
    return (normed){.norm = &m->norm,
                    .which = which,
                    .heads = which == 0 ? m->heads : m->kv_heads,
                    .total_heads = which == 0 ? m->o.heads : m->o.kv_heads,
                    .d = m->o.head_dim,
                    .copies = cut ? (which == 0 ? m->copies : m->kv_copies) : 1,
                    .cut = cut};
}

bool ari_qk_normed(const ari_attention *m)
{
    return m->o.qk_norm != AR_QK_NORM_NONE;
}

/* --- construction ------------------------------------------------------------------------------------------------- */

ar_status ari_qk_norm_init(ari_attention *m, ar_ctx *ctx)
{
    const char *const leaf[2] = {m->o.q_norm ? m->o.q_norm : "q_norm", m->o.k_norm ? m->o.k_norm : "k_norm"};
    for (int i = 0; i < 2 && ari_qk_normed(m); i++) {
        const normed n = normed_of(m, ctx, i);
        const bool by_head = m->o.qk_norm == AR_QK_NORM_HEAD;
        AR_TRY(ari_path(m->norm.name[i], sizeof m->norm.name[i], m->base.name, leaf[i]));
        AR_TRY(ari_norm_gain_init(&m->norm.gain[i], ctx, m->norm.name[i], by_head ? n.d : n.total_heads * n.d,
                                  m->o.norm_plus_one));
        m->norm.gain[i].spread = by_head && n.cut;
    }
    return AR_OK;
}

void ari_qk_norm_fini(ari_attention *m)
{
    ar_param_fini(&m->norm.gain[0]);
    ar_param_fini(&m->norm.gain[1]);
}

size_t ari_qk_norm_params(ari_attention *m, ar_param **out, size_t cap)
{
    const size_t n = ari_qk_normed(m) ? 2 : 0;
    for (size_t i = 0; i < n && i < cap; i++)
        out[i] = &m->norm.gain[i];
    return n;
}

/* --- all heads of a token ----------------------------------------------------------------------------------------- */

/* Views [b, s, heads, d], contiguous, as rows of `heads` heads. */
static ar_tensor as_features(const ar_tensor *t)
{
    const size_t width = t->shape[2] * t->shape[3];
    return (ar_tensor){.dtype = t->dtype,
                       .ndim = 3,
                       .shape = {t->shape[0], t->shape[1], width},
                       .stride = {(ptrdiff_t)(t->shape[1] * width), (ptrdiff_t)width, 1},
                       .data = t->data};
}

ar_tensor ari_heads_view(const ar_tensor *features, size_t first_head, size_t heads, size_t every, size_t d)
{
    return (ar_tensor){.dtype = features->dtype,
                       .ndim = 4,
                       .shape = {features->shape[0], features->shape[1], heads, d},
                       .stride = {features->stride[0], features->stride[1], (ptrdiff_t)(every * d), 1},
                       .data = ar_buf_at(features->data, first_head * d * ar_dtype_bytes(features->dtype))};
}

/* Copies this rank's [b, s, heads, d] to contiguous memory. */
static ar_status pack_heads(const normed *n, ar_ctx *ctx, ar_tensor *packed, const ar_tensor *local)
{
    const size_t shape[4] = {local->shape[0], local->shape[1], n->heads, n->d};
    AR_TRY(ar_ctx_tensor(ctx, packed, local->dtype, 4, shape));
    return ARI_KERNEL(ctx, copy_strided, packed, local);
}

/* Gathers a new tensor [b, s, all heads * d] from every rank's [b, s, heads, d]; copies on several ranks are equal. */
static ar_status all_heads(const normed *n, ar_ctx *ctx, ar_tensor *full, const ar_tensor *local)
{
    const ari_features width = {1, {n->heads * n->d * (size_t)ar_comm_size(ctx->tp)}};
    const ar_tp_redistribution change = {ari_shard_features, ari_replicated};
    ar_tensor packed, gathered;
    AR_TRY(pack_heads(n, ctx, &packed, local));
    packed = as_features(&packed);
    *full = packed;
    if (!n->cut)
        return AR_OK;
    AR_TRY(ari_tp_redistribute(ctx, &gathered, &packed, &width, change, n->norm->name[n->which], true));
    *full = gathered;
    if (n->copies == 1)
        return AR_OK;
    AR_TRY(ari_like(ctx, full, &gathered, n->total_heads * n->d));
    const ar_tensor dst = ari_heads_view(full, 0, n->total_heads, 1, n->d),
                    src = ari_heads_view(&gathered, 0, n->total_heads, (size_t)n->copies, n->d);
    AR_TRY(ARI_KERNEL(ctx, copy_strided, &dst, &src));
    ar_ctx_release(ctx, &gathered);
    return AR_OK;
}

/* Returns this rank's heads of the full tensor. */
static ar_tensor own_heads(const normed *n, const ar_ctx *ctx, const ar_tensor *full)
{
    const size_t first_head = n->cut ? (size_t)(ar_comm_rank(ctx->tp) / n->copies) * n->heads : 0;
    return ari_heads_view(full, first_head, n->heads, 1, n->d);
}

/* Records that this rank's heads are taken out of the full tensor. */
static ar_status note_own(const ari_attention *m, ar_ctx *ctx, int which, const ar_tensor *full, const ar_tensor *local)
{
    return ARI_NOTE(ctx, .kind = ARI_LEDGER_REDISTRIBUTE, .name = m->norm.name[which], .input = {full}, .out = {local},
                    .input_placement = &ari_replicated, .output_placement = &ari_shard_features);
}

/* --- forward ------------------------------------------------------------------------------------------------------ */

static ar_status save_rows(const normed *n, ar_saved *saved, const ar_tensor *x, const ar_norm_saved *rows)
{
    const int slot = SAVED_NORM + OF_EACH * n->which;
    AR_TRY(ar_saved_push(saved, n->norm, slot, x));
    AR_TRY(ar_saved_push(saved, n->norm, slot + 1, &rows->mean));
    return ar_saved_push(saved, n->norm, slot + 2, &rows->rstd);
}

ar_status ari_qk_norm_forward(ari_attention *m, ar_ctx *ctx, ar_saved *saved, int which, ar_tensor *y,
                              ar_tensor *memory, const ar_tensor *x)
{
    const normed n = normed_of(m, ctx, which);
    const bool by_head = m->o.qk_norm == AR_QK_NORM_HEAD;
    ar_norm_saved rows;
    ar_tensor input;
    AR_TRY((by_head ? pack_heads : all_heads)(&n, ctx, &input, x));
    AR_TRY(ar_norm_forward(ctx, AR_NORM_RMS, memory, &rows, &input, &m->norm.gain[which], NULL, m->o.norm_eps));
    AR_TRY(save_rows(&n, saved, &input, &rows));
    *y = by_head ? *memory : own_heads(&n, ctx, memory);
    return by_head || !n.cut ? AR_OK : note_own(m, ctx, which, memory, y);
}

/* --- backward ----------------------------------------------------------------------------------------------------- */

ar_status ari_qk_norm_backward(ari_attention *m, ar_ctx *ctx, ar_saved *saved, int which, const ar_tensor *g)
{
    const normed n = normed_of(m, ctx, which);
    const bool by_head = m->o.qk_norm == AR_QK_NORM_HEAD;
    const bool counts = !by_head || !n.cut || ar_comm_rank(ctx->tp) % n.copies == 0;
    const int slot = SAVED_NORM + OF_EACH * which;
    ar_norm_saved rows;
    ar_tensor x, d;
    AR_TRY(ar_saved_pop(saved, n.norm, slot + 2, &rows.rstd));
    AR_TRY(ar_saved_pop(saved, n.norm, slot + 1, &rows.mean));
    AR_TRY(ar_saved_pop(saved, n.norm, slot, &x));
    AR_TRY((by_head ? pack_heads : all_heads)(&n, ctx, &d, g));
    AR_TRY(ari_norm_gradients(ctx, AR_NORM_RMS, &d, NULL, &d, &x, &rows, &m->norm.gain[which], NULL, NULL, counts));
    const ar_tensor local = by_head ? d : own_heads(&n, ctx, &d);
    AR_TRY(ARI_KERNEL(ctx, copy_strided, g, &local));
    if (!by_head && n.cut)
        AR_TRY(note_own(m, ctx, which, &d, g));
    ARI_RELEASE(ctx, &d, &rows.rstd, &rows.mean, &x);
    return AR_OK;
}

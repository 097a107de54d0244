/* SPDX-License-Identifier: Apache-2.0 */
/* Muon updates a matrix as a whole. Every rank that holds a part of the matrix copies its part of the momentum into
 * zeros. The ranks add these as integers, which preserves the bits. Then each rank makes the same matrix orthogonal and
 * uses its own part of the result. With `shards`, tensor-parallel ranks leave the matrix sharded along its longer side
 * and sum X X^T and the norm over that side. */
#include "anyrank/arith.h"
#include "ref/context/context.h"
#include "ref/context/context_private.h"
#include "ref/core/tensor_private.h"
#include "ref/layers/parts.h"
#include "ref/record/ledger.h"
#include "ref/train/optimizer.h"

ar_optimizer_kind ari_update_kind(const ar_optimizer_options *o, const ar_param *p)
{
    return o->kind != AR_OPTIMIZER_MUON || p->matrix ? o->kind : AR_OPTIMIZER_ADAMW;
}

/* --- the whole matrix --------------------------------------------------------------------------------------------- */

/* Returns true if tensor-parallel ranks hold different parts of the parameter. */
static bool is_split(const ar_param *p)
{
    return p->layout.nbox != 1 || p->layout.box[0].extent[0] != p->layout.shape[0] ||
           p->layout.box[0].extent[1] != p->layout.shape[1];
}

/* Returns true if data-parallel ranks keep state for different parts of the parameter, whether or not they reduced its
 * gradient. */
static bool is_shared(const ar_optimizer *o, const ar_ctx *ctx, const ar_param *p)
{
    return o->ddp && ar_comm_size(ari_ctx_shard(ctx, p->expert)) > 1;
}

static size_t outputs_of(const ar_param *p)
{
    return p->layout.shape[p->transposed ? 1 : 0];
}

static size_t inputs_of(const ar_param *p)
{
    return p->layout.ndim == 1 ? 1 : p->layout.shape[p->transposed ? 0 : 1];
}

/* Returns true if each tensor-parallel rank has a part of the longer side of each of the parameter's matrices. */
static bool stays_cut(const ar_optimizer *o, const ar_param *p)
{
    const bool by_outputs = ari_layout_local(&p->layout, p->transposed ? 1 : 0) < outputs_of(p);
    if (!o->options.shards || !is_split(p) || p->layout.replicas > 1)
        return false;
    for (int i = 0; i < p->blocks || i == 0; i++) {
        if (((p->blocks > 0 ? p->block[i] : outputs_of(p)) > inputs_of(p)) != by_outputs)
            return false;
    }
    return true;
}

/* Returns true if the matrix is assembled in separate memory and not in the state's layout: a shard is a range of the
 * matrix's elements in row order. s: NULL if this rank has no shard. */
static bool is_apart(const ar_optimizer *o, const ar_ctx *ctx, const ar_param *p, const ari_state *s)
{
    const bool gathers = is_split(p) && !stays_cut(o, p) && !ari_faulty(ctx, "muon_of_shards");
    return is_shared(o, ctx, p) || !s->is_full || gathers;
}

/* Copies the boxes of a layout between the full matrix and a tensor of the parameter's shape. */
static ar_status move_boxes(ar_ctx *ctx, const ar_tensor *full, const ar_tensor *local, const ar_layout *o, bool out)
{
    for (size_t i = 0; i < o->nbox; i++) {
        const ar_box *b = &o->box[i];
        ar_tensor full_slice = *full, local_slice = *local;
        for (int d = 0; d < o->ndim; d++) {
            full_slice = ar_tensor_slice(&full_slice, d, b->global[d], b->extent[d]);
            local_slice = ar_tensor_slice(&local_slice, d, b->local[d], b->extent[d]);
        }
        AR_TRY(ARI_KERNEL(ctx, copy_strided, out ? &full_slice : &local_slice, out ? &local_slice : &full_slice));
    }
    return AR_OK;
}

/* Copies this rank's elements to their positions in a matrix of zeros; cut: positions in the rank's part of the
 * matrix. */
static ar_status lay_out(const ar_tensor *full, ar_ctx *ctx, const ari_state *s, ar_buf run, bool cut)
{
    ar_layout o;
    ar_tensor local;
    AR_TRY(ARI_KERNEL(ctx, zero, full->data, ar_tensor_count(full) * sizeof(float)));
    if (!s || (is_split(s->param) && s->param->layout.replica > 0)) /* the first copy counts */
        return AR_OK;
    if (cut)
        return ari_share_put(ctx, ar_const(run), s->param, full, s->start, s->count);
    AR_TRY(ari_state_layout(&o, s, ctx));
    AR_TRY(ari_state_begin(&local, s, ctx, run, true));
    AR_TRY(move_boxes(ctx, full, &local, &o, true));
    return ari_state_end(&local, s, ctx, run, false);
}

static ar_status add_parts(const ar_tensor *full, ar_ctx *ctx, const ar_param *p, ar_comm *group)
{
    return ar_comm_all_reduce(group, ctx->queue, full->data, ar_const(full->data), ar_tensor_count(full), AR_I32,
                              AR_SUM, p->name);
}

static ar_status gather_matrix(const ar_tensor *full, const ar_optimizer *o, ar_ctx *ctx, const ar_param *p,
                               const ari_state *s, ar_buf run)
{
    AR_TRY(lay_out(full, ctx, s, run, stays_cut(o, p)));
    if (is_split(p) && !stays_cut(o, p))
        AR_TRY(add_parts(full, ctx, p, ctx->tp));
    if (is_shared(o, ctx, p))
        AR_TRY(add_parts(full, ctx, p, ari_ctx_shard(ctx, p->expert)));
    return ARI_NOTE(ctx, .kind = ARI_LEDGER_MATRIX, .name = p->name);
}

static ar_status take_own(ar_ctx *ctx, const ar_tensor *full, const ari_state *s, ar_buf run, bool cut)
{
    ar_layout o;
    ar_tensor local;
    if (cut)
        return ari_share_get(ctx, run, s->param, full, s->start, s->count);
    AR_TRY(ari_state_layout(&o, s, ctx));
    AR_TRY(ari_state_begin(&local, s, ctx, run, false));
    AR_TRY(move_boxes(ctx, full, &local, &o, false));
    return ari_state_end(&local, s, ctx, run, true);
}

/* --- Newton-Schulz ------------------------------------------------------------------------------------------------ */

static const char tag[] = "muon";

/* Common properties of a parameter's matrices. group: the ranks with the other parts of the longer side; NULL: the
 * matrix is full. */
typedef struct rule {
    double rate;
    bool match_rms;
    ar_comm *group;
} rule;

static ar_status combine_over(ar_comm *group, ar_ctx *ctx, const ar_tensor *t, ar_op op)
{
    return group ? ar_comm_all_reduce(group, ctx->queue, t->data, ar_const(t->data), t->shape[0], t->dtype, op, tag)
                 : AR_OK;
}

/* The sum of integers of the gradients' norm (norm.c). */
static ar_status norm_of(float *norm, ar_ctx *ctx, const ar_tensor *x, ar_comm *group)
{
    const size_t scalar_shape = 1, pair_shape = 2, row[2] = {1, ar_tensor_count(x)};
    int32_t e = ARI_EXP_ZERO;
    int64_t squares[2] = {0, 0};
    ar_tensor exponent, sums, flat;
    AR_TRY(ar_tensor_view(&flat, AR_F32, 2, row, x->data));
    AR_TRY(ar_ctx_tensor(ctx, &exponent, AR_I32, 1, &scalar_shape));
    AR_TRY(ar_ctx_tensor(ctx, &sums, AR_I64, 1, &pair_shape));
    AR_TRY(ar_ctx_upload(ctx, &sums, squares));
    AR_TRY(ARI_KERNEL(ctx, row_exponents, exponent.data, &flat, (ar_cbuf){NULL}, +1, false, false));
    AR_TRY(combine_over(group, ctx, &exponent, AR_MAX));
    AR_TRY(ARI_KERNEL(ctx, sum_squares, sums.data, x, ar_const(exponent.data)));
    AR_TRY(combine_over(group, ctx, &sums, AR_SUM));
    AR_TRY(ar_ctx_download(ctx, &e, &exponent));
    AR_TRY(ar_ctx_download(ctx, squares, &sums));
    ARI_RELEASE(ctx, &sums, &exponent);
    *norm = ari_norm_value(squares[0], squares[1], e);
    return AR_OK;
}

/* Computes y[i,j] = sum over k of a[i,k]*b[j,k], where the k_full terms are divided among the ranks of k_over; ranks of
 * rows_over have different rows of b. */
static ar_status contract(ar_ctx *ctx, const ar_tensor *y, const ar_tensor *a, const ar_tensor *b, size_t k_full,
                          ar_comm *k_over, ar_comm *rows_over)
{
    const ar_parts lhs = {.n = 1, .part = {*a}}, right = {.n = 1, .part = {*b}};
    const ar_operand *oa = NULL, *ob = NULL;
    ar_sum *sum = NULL;
    AR_TRY(ctx->arith->operand_b(ctx, &ob, &right, true, k_full, k_over, rows_over, tag));
    AR_TRY(ctx->arith->operand_a(ctx, &oa, &lhs, ob, tag));
    AR_TRY(ctx->arith->contract(ctx, &sum, oa, ob));
    if (k_over)
        AR_TRY(ctx->arith->fold(ctx, sum, ctx->queue, k_over, AR_ALL, tag));
    AR_TRY(ctx->arith->round(ctx, y, sum, NULL));
    ctx->arith->operand_done(ctx, oa);
    ctx->arith->operand_done(ctx, ob);
    return AR_OK;
}

/* Computes y = p*y + q*x; x is overwritten. */
static ar_status combine(ar_ctx *ctx, const ar_tensor *y, float p, const ar_tensor *x, float q)
{
    AR_TRY(ARI_KERNEL(ctx, scale, y, y, p));
    if (q != 1.0f)
        AR_TRY(ARI_KERNEL(ctx, scale, x, x, q));
    return ARI_KERNEL(ctx, add, y, y, x);
}

/* Orthogonalises x [m, n] with m <= n, or this rank's columns of it. */
static ar_status iterate(ar_ctx *ctx, const ar_tensor *x, size_t n, ar_comm *group)
{
    const size_t square[2] = {x->shape[0], x->shape[0]};
    const ar_tensor across = ari_tensor_transposed(x);
    ar_tensor gram, power, product;
    AR_TRY(ar_ctx_tensor(ctx, &gram, AR_F32, 2, square));
    AR_TRY(ar_ctx_tensor(ctx, &power, AR_F32, 2, square));
    AR_TRY(ar_ctx_tensor(ctx, &product, AR_F32, 2, x->shape));
    for (int i = 0; i < ARI_MUON_STEPS; i++) {
        AR_TRY(contract(ctx, &gram, x, x, n, group, NULL));
        AR_TRY(contract(ctx, &power, &gram, &gram, x->shape[0], NULL, NULL));
        AR_TRY(combine(ctx, &gram, ARI_MUON_B, &power, ARI_MUON_C));
        AR_TRY(contract(ctx, &product, &gram, &across, x->shape[0], NULL, group));
        AR_TRY(combine(ctx, x, ARI_MUON_A, &product, 1.0f));
    }
    ARI_RELEASE(ctx, &product, &power, &gram);
    return ARI_NOTE(ctx, .kind = ARI_LEDGER_MATRIX, .name = tag);
}

/* muon_padding_rows: each tensor-parallel rank's rows are padded with zeros to a multiple of 16, which does not change
 * X X^T and the norm. */
static size_t rows_of(const ar_ctx *ctx, size_t rows)
{
    const size_t align = 16, ranks = (size_t)ar_comm_size(ctx->tp), rank_rows = (rows + ranks - 1) / ranks;
    return ari_faulty(ctx, "muon_padding_rows") ? ranks * ((rank_rows + align - 1) / align * align) : rows;
}

/* Replaces a block [rows, cols] of the matrix, or this rank's part of it, by its update. */
static ar_status orthogonalise(ar_ctx *ctx, const ar_tensor *block, const rule *r, size_t rows, size_t cols)
{
    const ar_tensor wide = rows > cols ? ari_tensor_transposed(block) : *block;
    float norm = 0.0f;
    ar_tensor x;
    AR_TRY(ari_copy_of(ctx, &x, &wide));
    AR_TRY(norm_of(&norm, ctx, &x, r->group));
    AR_TRY(ARI_KERNEL(ctx, scale, &x, &x, ari_muon_normed(norm)));
    AR_TRY(iterate(ctx, &x, rows > cols ? rows : cols, r->group));
    AR_TRY(ARI_KERNEL(ctx, scale, &x, &x, ari_muon_rate(r->rate, rows_of(ctx, rows), cols, r->match_rms)));
    AR_TRY(ARI_KERNEL(ctx, copy_strided, &wide, &x));
    ar_ctx_release(ctx, &x);
    return AR_OK;
}

static ar_status each_block(ar_ctx *ctx, const ar_tensor *full, const ar_param *p, const rule *r)
{
    ar_tensor matrix = p->transposed ? ari_tensor_transposed(full) : *full;
    const size_t outputs = outputs_of(p);
    const size_t row[2] = {1, outputs};
    size_t row_offset = 0;
    if (p->layout.ndim == 1)
        AR_TRY(ar_tensor_view(&matrix, AR_F32, 2, row, full->data));
    if (p->blocks == 0)
        return orthogonalise(ctx, &matrix, r, r->group ? outputs : matrix.shape[0],
                             r->group ? inputs_of(p) : matrix.shape[1]);
    for (int i = 0; i < p->blocks; i++) {
        const size_t block_rows = p->block[i] * matrix.shape[0] / outputs; /* all rows, or those of a shard */
        const size_t rows = i + 1 < p->blocks ? block_rows : matrix.shape[0] - row_offset;
        const ar_tensor block = ar_tensor_slice(&matrix, 0, row_offset, rows);
        AR_TRY(orthogonalise(ctx, &block, r, r->group ? p->block[i] : rows, r->group ? inputs_of(p) : block.shape[1]));
        row_offset += rows;
    }
    return AR_OK;
}

/* --- an update ---------------------------------------------------------------------------------------------------- */

/* Updates the state's weights by x: in place, or through a copy of the value. */
static ar_status update_weights(ar_ctx *ctx, const ari_state *s, const ar_tensor *x, const ari_optimizer_constants *k)
{
    ar_param *p = s->param;
    ar_tensor run = {.data = {NULL}};
    ari_update_part part = {.weight = p->value.data, .master = s->part.master};
    if (s->is_full)
        return ari_update_apply(ctx, &part, x, k);
    if (ari_value_is_shared(p)) {
        part.weight = p->share->value;
        return ari_update_apply(ctx, &part, x, k);
    }
    AR_TRY(ar_ctx_tensor(ctx, &run, p->value.dtype, 1, &s->count));
    part.weight = run.data;
    AR_TRY(ari_share_get(ctx, run.data, p, &p->value, s->start, s->count));
    AR_TRY(ari_update_apply(ctx, &part, x, k));
    AR_TRY(ari_share_put(ctx, ar_const(run.data), p, &p->value, s->start, s->count));
    ar_ctx_release(ctx, &run);
    return AR_OK;
}

ar_status ari_muon_step(const ar_optimizer *o, ar_ctx *ctx, const ar_param *p, const ari_state *s, const ar_tensor *g)
{
    const ari_optimizer_constants k = ari_update_constants(&o->clock, &o->options, p, ctx);
    const size_t count = s ? s->count : 0;
    const bool is_separate = is_apart(o, ctx, p, s), cut = stays_cut(o, p);
    ar_tensor u, full;
    AR_TRY(ar_ctx_tensor(ctx, &u, AR_F32, 1, &count));
    if (s) {
        const ari_update_part direction = {.weight = u.data, .m = s->part.m};
        AR_TRY(ari_update_apply(ctx, &direction, g, &k));
    }
    if (is_separate) {
        AR_TRY(ar_ctx_tensor(ctx, &full, AR_F32, p->layout.ndim, cut ? p->value.shape : p->layout.shape));
        AR_TRY(gather_matrix(&full, o, ctx, p, s, u.data));
    } else {
        AR_TRY(ar_tensor_view(&full, AR_F32, p->value.ndim, p->value.shape, u.data));
    }
    const rule r = {.rate = k.rate,
                    .match_rms = o->options.match_rms,
                    .group = cut && !ari_faulty(ctx, "muon_of_shards") ? ctx->tp : NULL};
    AR_TRY(each_block(ctx, &full, p, &r));
    if (s && is_separate)
        AR_TRY(take_own(ctx, &full, s, u.data, cut));
    if (s)
        AR_TRY(update_weights(ctx, s, &u, &k));
    if (is_separate)
        ar_ctx_release(ctx, &full);
    ar_ctx_release(ctx, &u);
    return AR_OK;
}

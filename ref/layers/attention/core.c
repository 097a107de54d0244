/* SPDX-License-Identifier: Apache-2.0 */
/* Attention in blocks of rows, so that a matrix of all scores never exists. The backward pass recomputes the
 * probabilities from each row's maximum and sum (Dao et al. 2022, arXiv:2205.14135; the sums are exact: numerics.md,
 * section 4). */
#include "ref/layers/attention/core.h"

#include <stdio.h>
#include <string.h>

#include "anyrank/config.h"
#include "ref/context/context_private.h"
#include "ref/core/lane.h"
#include "ref/core/names.h"
#include "ref/core/tensor_private.h"
#include "ref/layers/attention/context_parallel.h"
#include "ref/numerics/digest.h"
#include "ref/numerics/scalar.h"
#include "ref/placement/parallel_private.h"

enum { SAVED_CORE = 16 }; /* key for this module's values, in addition to the owner's saved values */

/* State shared by all blocks. */
typedef struct pass {
    const ari_core *c;
    ar_ctx *ctx;
    const ari_core_saved *state;
    ar_mask mask;
    float scale;                 /* scale of the softmax's input: 1 with a cap */
    float inner;                 /* scale of the cap's input */
    ar_cbuf sinks;               /* of this rank's heads; NULL: no sinks */
    ar_tensor row_max, most_sum; /* the rows' maximum and sum without sinks, if QK-Clip needs them and there are
                                    sinks */
    ari_score_blocks blocks;
    size_t matrices, group, rows; /* matrices: b * kv_heads; group: query heads per KV head; rows: queries per head */
    size_t key_dim, value_dim;    /* features of queries and keys, of values */
} pass;

/* For a dry run that only measures memory: drops blocks that need no more memory than another block, but leaves at
 * least two of several. Parts of operands must be views. Without documents, all samples and heads are equal. */
static void thin_blocks(ari_score_blocks *b)
{
    size_t *const repeats[] = {&b->group, &b->kv_heads, &b->samples};
    b->thin = true;
    for (size_t i = 0, limit = 2; i < 3 && !b->full_matrices && !b->visible; i++) {
        *repeats[i] = *repeats[i] < limit ? *repeats[i] : limit;
        limit = *repeats[i] > 1 ? 1 : limit;
    }
}

static ar_cbuf sinks_of(const ari_core *c)
{
    return c->sinks ? ar_cbuf_at(ar_const(c->sinks->value.data), c->first_sink * sizeof(float)) : (ar_cbuf){NULL};
}

static pass pass_of(const ari_core *c, ar_ctx *ctx, const ari_core_saved *state, const ar_tensor *k, const ar_tensor *v)
{
    const ari_order order = ari_core_order(c);
    pass p = {.c = c,
              .ctx = ctx,
              .state = state,
              .mask = ari_core_mask(c, state),
              .scale = c->cap > 0.0 ? 1.0f : ari_softmax_scale(c->query_scalar),
              .inner = ari_softmax_scale(c->query_scalar),
              .sinks = sinks_of(c),
              .matrices = state->batch * c->kv_heads,
              .group = c->heads / c->kv_heads,
              .rows = ari_positions_count(&c->rows),
              .key_dim = k->shape[3],
              .value_dim = v->shape[3]};
    p.blocks = ari_score_blocks_of(&order, state->visible, state->batch, c->kv_heads, p.group,
                                   ctx->device->block_bytes / sizeof(float), ar_comm_size(ctx->ring) > 1);
    if (ctx->device->thin)
        thin_blocks(&p.blocks);
    return p;
}

/* --- blocks ------------------------------------------------------------------------------------------------------- */

static ar_scores scores_of(const pass *p, const ar_part *block_part)
{
    return (ar_scores){
        .kv_heads = p->c->kv_heads, .group = p->group, .rows = p->rows, .seq = p->c->seq, .part = *block_part};
}

/* Return the part of a tensor [b * kv_heads, .., width] that has a block's rows, or a block's keys. */
static ar_part rows_part(const ar_part *block_part, size_t width)
{
    return (ar_part){block_part->matrix, block_part->matrices, block_part->row, block_part->rows, 0, width};
}

static ar_part keys_part(const ar_part *block_part, size_t width)
{
    return (ar_part){block_part->matrix, block_part->matrices, block_part->col, block_part->cols, 0, width};
}

static ar_part turned(const ar_part *block_part)
{
    return (ar_part){block_part->matrix, block_part->matrices, block_part->col,
                     block_part->cols,   block_part->row,      block_part->rows};
}

static ar_status new_block(ar_ctx *ctx, ar_tensor *t, const ar_part *block_part)
{
    const size_t shape[3] = {block_part->matrices, block_part->rows, block_part->cols};
    return ar_ctx_tensor(ctx, t, AR_F32, 3, shape);
}

/* --- views and whole operands ------------------------------------------------------------------------------------- */

/* Contiguous [b, heads, rows, d] as [b * kv_heads, group * rows, d]. */
static ar_tensor by_matrix(const pass *p, const ar_tensor *t)
{
    const size_t rows = t->shape[1] / p->c->kv_heads * t->shape[2], d = t->shape[3];
    return (ar_tensor){.dtype = t->dtype,
                       .ndim = 3,
                       .shape = {p->matrices, rows, d},
                       .stride = {(ptrdiff_t)(rows * d), (ptrdiff_t)d, 1},
                       .data = t->data};
}

static ar_status right(const pass *p, const ar_operand **out, const ar_tensor *b, bool scale)
{
    const ar_parts parts = {.n = 1, .part = {*b}};
    return p->ctx->arith->operand_b(p->ctx, out, &parts, scale, b->shape[2], NULL, NULL, p->c->name);
}

static ar_status left(const pass *p, const ar_operand **out, const ar_tensor *a, const ar_operand *b)
{
    const ar_parts parts = {.n = 1, .part = {*a}};
    return p->ctx->arith->operand_a(p->ctx, out, &parts, b, p->c->name);
}

static void release_operands(const pass *p, const ar_operand *const *operands, size_t n)
{
    for (size_t i = 0; i < n; i++)
        p->ctx->arith->operand_done(p->ctx, operands[i]);
}

/* Computes y = the product of a block's parts of two operands: its scores, with keys as columns, or (of_terms) a sum
 * over its keys. A block with all keys is limited to those that a query sees; others end where their queries' keys
 * do. */
static ar_status multiply_heads(const pass *p, const ar_tensor *y, const ar_operand *a, const ar_operand *b,
                                bool of_terms)
{
    const ar_band band = {(const int32_t *)p->state->visible_union, p->rows, of_terms};
    const ar_epilogue epilogue = {.act = AR_ACT_NONE, .band = p->blocks.full_matrices ? &band : NULL};
    ar_sum *s = NULL;
    AR_TRY(p->ctx->arith->contract(p->ctx, &s, a, b));
    return p->ctx->arith->round(p->ctx, y, s, &epilogue);
}

/* Computes y = (the block's rows of a) (the block's keys of b)^T; both operands are whole and have d columns. */
static ar_status rows_by_keys(const pass *p, const ar_tensor *y, const ar_part *block_part, size_t d,
                              const ar_operand *a, const ar_operand *b)
{
    const ar_operand *part[2] = {NULL};
    const ar_part of_a = rows_part(block_part, d), of_b = keys_part(block_part, d);
    AR_TRY(p->ctx->arith->operand_part(p->ctx, &part[0], a, &of_a));
    AR_TRY(p->ctx->arith->operand_part(p->ctx, &part[1], b, &of_b));
    AR_TRY(multiply_heads(p, y, part[0], part[1], false));
    release_operands(p, part, 2);
    return AR_OK;
}

/* The block's rows of y [matrices, rows, d] = block times the block's keys of b [matrices, d, keys]. */
static ar_status block_by_values(const pass *p, const ar_tensor *y, const ar_part *block_part, const ar_tensor *block,
                                 const ar_operand *b)
{
    const ar_operand *part[2] = {NULL};
    const ar_part of_y = rows_part(block_part, y->shape[2]);
    const ar_part of_b = {block_part->matrix, block_part->matrices, 0, y->shape[2], block_part->col, block_part->cols};
    const ar_tensor dst = ari_tensor_part(y, &of_y);
    AR_TRY(p->ctx->arith->operand_part(p->ctx, &part[1], b, &of_b));
    AR_TRY(left(p, &part[0], block, part[1]));
    AR_TRY(multiply_heads(p, &dst, part[0], part[1], true));
    release_operands(p, part, 2);
    return AR_OK;
}

/* Returns the number of visible keys summed over all queries: the size of one product for a head's scores. */
static double pairs_of(const ari_order *o)
{
    const size_t rows = ari_positions_count(&o->rows);
    double pairs = 0.0;
    for (size_t i = 0; i < rows; i++) {
        const ari_keys keys = ari_order_keys(o, ari_positions_at(&o->rows, i));
        pairs += (double)(keys.end - keys.begin);
    }
    return pairs;
}

/* Counts the work of `n` products each over features of keys and of values that order leaves, for virtual time and a
 * record. Extra work at a block's edge and recomputation are not counted, because they depend on the device. */
static void count_work(const pass *p, double n)
{
    if (!ari_lane_is_virtual(ari_lane_self()) && !p->ctx->ledger)
        return;
    const double heads = (double)(p->matrices * p->group), width = (double)(p->key_dim + p->value_dim);
    const double multiply_adds = n * heads * pairs_of(&p->blocks.order) * width;
    ari_ledger_work(p->ctx, multiply_adds);
    ari_work_scores(&(ari_gpu_scores){.flops = 2.0 * multiply_adds,
                                      .positions = (double)ari_positions_count(&p->blocks.order.rows),
                                      .head = width / 2.0,
                                      .backward = n > 1.0});
}

/* --- dropout and taps --------------------------------------------------------------------------------------------- */

/* Computes y = dropout(x) for a block [matrices, rows, keys]; y may be x. */
static ar_status drop_block(const pass *p, const ar_part *block_part, const ar_tensor *y, const ar_tensor *x)
{
    const ari_core *c = p->c;
    const size_t first_head = ari_faulty(p->ctx, "dropout_same_mask_in_shard") ? 0 : c->head_start;
    for (size_t i = 0; i < block_part->matrices * block_part->rows;) {
        const size_t matrix = block_part->matrix + i / block_part->rows, row = block_part->row + i % block_part->rows,
                     query = row % p->rows;
        const size_t run = c->rows.count[0], to_edge = (query < run ? run : p->rows) - query;
        const size_t left_here = block_part->rows - i % block_part->rows, n = to_edge < left_here ? to_edge : left_here;
        const size_t shape[4] = {1, 1, n, block_part->cols}, start = i * block_part->cols * sizeof(float);
        const size_t head = first_head + matrix % c->kv_heads * p->group + row / p->rows;
        const size_t place[4] = {matrix / c->kv_heads, head, ari_positions_at(&c->rows, query), block_part->col};
        ar_tensor dst, src;
        AR_TRY(ar_tensor_view(&dst, AR_F32, 4, shape, ar_buf_at(y->data, start)));
        AR_TRY(ar_tensor_view(&src, AR_F32, 4, shape, ar_buf_at(x->data, start)));
        AR_TRY(ari_drop_heads(c->dropout, p->ctx, &dst, &src, place));
        i += n;
    }
    return AR_OK;
}

/* Returns the probabilities that weight the values: a separate tensor after dropout, or the probabilities
 * themselves. */
static ar_status weights_of(const pass *p, const ar_part *block_part, ar_tensor *weights, const ar_tensor *probs)
{
    *weights = *probs;
    if (!ari_dropout_on(p->ctx))
        return AR_OK;
    AR_TRY(new_block(p->ctx, weights, block_part));
    return drop_block(p, block_part, weights, probs);
}

static void release_weights(const pass *p, ar_tensor *weights)
{
    if (ari_dropout_on(p->ctx))
        ar_ctx_release(p->ctx, weights);
}

static bool is_digested(const pass *p)
{
    return p->c->seq > AR_SCORES_WHOLE;
}

/* Allocates all scores of a kind if a listener wants them; it is the only tensor of this size. If there are many keys
 * it holds digests of the rows, which are meaningful only if bits are equal. ndim 0: no listener. */
static ar_status begin_tap(const pass *p, ar_tensor *full_scores)
{
    const size_t shape[3] = {p->matrices, p->group * p->rows, is_digested(p) ? ARI_DIGEST : p->c->seq};
    *full_scores = (ar_tensor){.ndim = 0};
    if (!ari_tapped(p->ctx) ||
        (is_digested(p) && strcmp(p->ctx->arith->name, ari_numerics_names[AR_NUMERICS_EXACT]) != 0))
        return AR_OK;
    AR_TRY(ar_ctx_tensor(p->ctx, full_scores, AR_F32, 3, shape));
    return ARI_KERNEL(p->ctx, zero, full_scores->data, ar_tensor_count(full_scores) * sizeof(float));
}

/* A block has all keys that its rows see. */
static ar_status tap_digests(const pass *p, const ar_tensor *full_scores, const ar_part *block_part,
                             const ar_tensor *block)
{
    const size_t rows = block_part->matrices * block_part->rows;
    ARI_OWNED float *values = NULL, *digest = NULL;
    if (p->ctx->device->hollow)
        return AR_OK;
    AR_TRY(ARI_ALLOC(&values, rows * block_part->cols, "a block of scores"));
    AR_TRY(ARI_ALLOC(&digest, rows * ARI_DIGEST, "digests of scores"));
    AR_TRY(ar_ctx_download(p->ctx, values, block));
    for (size_t r = 0; r < rows; r++) {
        uint64_t sum = 0;
        for (size_t i = 0; i < block_part->cols; i++)
            sum += ari_digest_term(values[r * block_part->cols + i], block_part->col + i);
        for (int i = 0; i < ARI_DIGEST; i++)
            digest[r * ARI_DIGEST + (size_t)i] = ari_digest_number(sum, i);
    }
    for (size_t m = 0; m < block_part->matrices; m++) {
        const ar_part part = {block_part->matrix + m, 1, block_part->row, block_part->rows, 0, ARI_DIGEST};
        const ar_tensor dst = ari_tensor_part(full_scores, &part);
        AR_TRY(ar_ctx_upload(p->ctx, &dst, digest + m * block_part->rows * ARI_DIGEST));
    }
    return AR_OK;
}

static ar_status tap_block(const pass *p, const ar_tensor *full_scores, const ar_part *block_part,
                           const ar_tensor *block)
{
    if (full_scores->ndim == 0)
        return AR_OK;
    if (is_digested(p))
        return tap_digests(p, full_scores, block_part, block);
    const ar_tensor dst = ari_tensor_part(full_scores, block_part);
    return ARI_KERNEL(p->ctx, copy_strided, &dst, block);
}

static ar_status tap_whole(const pass *p, ar_tensor *full_scores, const char *part, char direction)
{
    const size_t shape[4] = {p->state->batch, p->c->heads, p->rows, full_scores->shape[2]};
    char name[32];
    ar_tensor t;
    if (full_scores->ndim == 0)
        return AR_OK;
    snprintf(name, sizeof name, "%s%s", part, is_digested(p) ? ARI_DIGESTED : "");
    AR_TRY(ar_tensor_view(&t, AR_F32, 4, shape, full_scores->data));
    AR_TRY(ari_tap_queries(p->ctx, p->c->name, name, direction, &t, p->c->heads_full, p->c->head_start, p->c->copies,
                           &p->c->rows, p->c->seq));
    ar_ctx_release(p->ctx, full_scores);
    return AR_OK;
}

/* --- forward ------------------------------------------------------------------------------------------------------ */

static ar_status measure_without_sinks(const pass *p, const ar_tensor *scores, const ar_scores *block)
{
    ar_tensor probs;
    AR_TRY(ar_ctx_tensor(p->ctx, &probs, AR_F32, 3, scores->shape));
    AR_TRY(ARI_KERNEL(p->ctx, softmax_forward, probs.data, ar_const(scores->data), (ar_cbuf){NULL}, p->row_max.data,
                      p->most_sum.data, false, p->scale, block, &p->mask));
    ar_ctx_release(p->ctx, &probs);
    return AR_OK;
}

/* Computes scores, and with or without the rows' saved sums the probabilities. bare: receives the scores before the
 * cap; NULL: not needed. */
static ar_status probabilities(const pass *p, ar_tensor *probs, ar_tensor *bare, const ar_part *block_part,
                               const ar_operand *q, const ar_operand *k, bool is_known)
{
    const ar_scores block = scores_of(p, block_part);
    const bool has_bare = p->c->cap > 0.0 && bare;
    AR_TRY(new_block(p->ctx, probs, block_part));
    if (has_bare)
        AR_TRY(new_block(p->ctx, bare, block_part));
    AR_TRY(rows_by_keys(p, has_bare ? bare : probs, block_part, p->key_dim, q, k));
    if (p->c->cap > 0.0)
        AR_TRY(ARI_KERNEL(p->ctx, softcap, probs, has_bare ? bare : probs, p->inner, p->c->cap));
    if (p->row_max.ndim > 0)
        AR_TRY(measure_without_sinks(p, probs, &block));
    const bool left_out = ari_faulty(p->ctx, "sinks_left_out");
    return ARI_KERNEL(p->ctx, softmax_forward, probs->data, ar_const(probs->data),
                      left_out ? (ar_cbuf){NULL} : p->sinks, p->state->max.data, p->state->sum.data, is_known, p->scale,
                      &block, &p->mask);
}

typedef struct forward_operands {
    const ar_operand *k, *q, *v_t;
} forward_operands;

static ar_status forward_block(const pass *p, const ar_part *block_part, const ar_tensor *o,
                               const forward_operands *operands, const ar_tensor heard[2])
{
    ar_tensor probs, weights;
    AR_TRY(probabilities(p, &probs, NULL, block_part, operands->q, operands->k, false));
    AR_TRY(tap_block(p, &heard[0], block_part, &probs));
    AR_TRY(weights_of(p, block_part, &weights, &probs));
    AR_TRY(tap_block(p, &heard[1], block_part, &weights));
    AR_TRY(block_by_values(p, o, block_part, &weights, operands->v_t));
    release_weights(p, &weights);
    ar_ctx_release(p->ctx, &probs);
    return AR_OK;
}

/* Maximum and sum of every row. */
static ar_status new_row_sums(ari_core_saved *state, ar_ctx *ctx, const ari_core *c)
{
    const size_t rows = state->batch * c->heads * ari_positions_count(&c->rows);
    AR_TRY(ar_ctx_tensor(ctx, &state->max, AR_I32, 1, &rows));
    return ar_ctx_tensor(ctx, &state->sum, AR_F64, 1, &rows);
}

/* Saves a host object of the step by its address. */
static ar_status push_kept(ar_saved *saved, const void *owner, ari_core_saved *state)
{
    const ar_tensor t = {.dtype = AR_U8, .ndim = 1, .shape = {sizeof *state}, .stride = {1}, .data = {state}};
    return ar_saved_push(saved, owner, SAVED_CORE, &t);
}

/* Records the rows' largest logits, which the softmax subtracts; with sinks, those that it would subtract without
 * them. */
static ar_status note_largest(const pass *p)
{
    const ari_core *c = p->c;
    const size_t n = ar_tensor_count(&p->state->max);
    ARI_OWNED int32_t *rows = NULL;
    if (!c->largest || p->ctx->device->hollow)
        return AR_OK;
    AR_TRY(ARI_ALLOC(&rows, n, "largest logits"));
    const ar_status st = ar_ctx_download(p->ctx, rows, p->row_max.ndim > 0 ? &p->row_max : &p->state->max);
    for (size_t i = 0; i < n && st == AR_OK; i++) {
        int32_t *head_max = &c->largest[c->head_start + i / p->rows % c->heads];
        *head_max = rows[i] > *head_max ? rows[i] : *head_max;
    }
    return st;
}

ar_status ari_core_forward(const ari_core *c, ar_ctx *ctx, ar_saved *saved, const void *owner, ar_tensor *o,
                           const ar_tensor *q, const ar_tensor *k, const ar_tensor *v, const ar_batch *batch)
{
    forward_operands operands = {NULL, NULL, NULL};
    ari_core_saved *state = NULL;
    ar_tensor heard[2] = {{.ndim = 0}, {.ndim = 0}};
    AR_TRY(ari_core_masks(c, ctx, &state, batch));
    AR_TRY(new_row_sums(state, ctx, c));
    pass p = pass_of(c, ctx, state, k, v);
    if (c->largest && c->sinks) {
        AR_TRY(ar_ctx_tensor(ctx, &p.row_max, AR_I32, 1, state->max.shape));
        AR_TRY(ar_ctx_tensor(ctx, &p.most_sum, AR_F64, 1, state->sum.shape));
    }
    AR_TRY(ar_ctx_tensor(ctx, o, q->dtype, 4, (size_t[4]){q->shape[0], q->shape[1], q->shape[2], p.value_dim}));
    const ar_tensor queries = by_matrix(&p, q), keys = by_matrix(&p, k), values = by_matrix(&p, v);
    const ar_tensor values_t = ari_tensor_transposed(&values), out = by_matrix(&p, o);
    AR_TRY(right(&p, &operands.k, &keys, false));
    AR_TRY(left(&p, &operands.q, &queries, operands.k));
    AR_TRY(right(&p, &operands.v_t, &values_t, true));
    AR_TRY(begin_tap(&p, &heard[0]));
    if (ari_dropout_on(ctx))
        AR_TRY(begin_tap(&p, &heard[1]));
    for (ar_part block_part = {0}; ari_next_block(&p.blocks, &block_part);)
        AR_TRY(forward_block(&p, &block_part, &out, &operands, heard));
    count_work(&p, 1.0);
    AR_TRY(note_largest(&p));
    ARI_RELEASE(ctx, &p.most_sum, &p.row_max);
    release_operands(&p, (const ar_operand *const[]){operands.q, operands.k, operands.v_t}, 3);
    AR_TRY(tap_whole(&p, &heard[0], "probs", 'f'));
    AR_TRY(tap_whole(&p, &heard[1], ARI_DROPPED_PROBS, 'f'));
    return push_kept(saved, owner, state);
}

/* --- backward ----------------------------------------------------------------------------------------------------- */

typedef struct backward_operands {
    const ar_operand *q, *k, *dout, *v, *k_t;
    ar_blocks *dk, *dv;
} backward_operands;

/* A block's probabilities after dropout, and gradients of its scores. */
typedef struct block_gradients {
    ar_tensor probs, weights, ds;
} block_gradients;

static void release_gradients(const pass *p, block_gradients *g)
{
    release_weights(p, &g->weights);
    ar_ctx_release(p->ctx, &g->probs);
    ar_ctx_release(p->ctx, &g->ds);
}

/* Computes a block's gradients from saved values. dot: for each row the sum of probabilities times their gradients;
 * is_known: dot was computed before. */
static ar_status gradients_of(const pass *p, block_gradients *g, const ar_part *block_part,
                              const backward_operands *operands, const ar_tensor *dot, bool is_known,
                              const ar_tensor *heard)
{
    const ar_scores block = scores_of(p, block_part);
    ar_tensor dprobs, bare;
    AR_TRY(probabilities(p, &g->probs, &bare, block_part, operands->q, operands->k, true));
    AR_TRY(weights_of(p, block_part, &g->weights, &g->probs));
    AR_TRY(new_block(p->ctx, &dprobs, block_part));
    AR_TRY(rows_by_keys(p, &dprobs, block_part, p->value_dim, operands->dout, operands->v));
    if (ari_dropout_on(p->ctx))
        AR_TRY(drop_block(p, block_part, &dprobs, &dprobs));
    g->ds = dprobs;
    if (heard->ndim > 0)
        AR_TRY(new_block(p->ctx, &g->ds, block_part));
    AR_TRY(ARI_KERNEL(p->ctx, softmax_backward, g->ds.data, ar_const(g->probs.data), dprobs.data, dot->data, is_known,
                      p->scale, &block, &p->mask));
    if (p->c->cap > 0.0) {
        AR_TRY(ARI_KERNEL(p->ctx, softcap_backward, &g->ds, &g->ds, &bare, p->inner, p->c->cap));
        ar_ctx_release(p->ctx, &bare);
    }
    AR_TRY(tap_block(p, heard, block_part, &dprobs));
    if (heard->ndim > 0)
        ar_ctx_release(p->ctx, &dprobs);
    return AR_OK;
}

/* Calls f with the pieces of a block's transpose whose rows (keys) belong to one ring rank, in that rank's order. */
static ar_status each_place(const pass *p, ar_blocks *s, const ar_part *block_part, const ar_tensor *block,
                            ar_status (*f)(ar_ctx *ctx, ar_blocks *s, const ar_part *block_part, const ar_tensor *a))
{
    const ar_part full_part = turned(block_part);
    const ar_tensor a = ari_tensor_transposed(block);
    const int places = ar_comm_size(p->ctx->ring), local_place = ar_comm_rank(p->ctx->ring);
    const size_t end = full_part.row + full_part.rows;
    size_t row = 0;
    for (int place = 0; place < places; place++) {
        const ar_positions positions = ari_ring_positions(p->ctx, p->c->seq, place);
        const bool is_included = place == local_place || !ari_faulty(p->ctx, "ring_kv_grad_local");
        for (int run = 0; run < 2; row += positions.count[run++]) {
            const size_t begin = positions.first[run] > full_part.row ? positions.first[run] : full_part.row;
            const size_t run_end = positions.first[run] + positions.count[run], stop = run_end < end ? run_end : end;
            if (positions.count[run] == 0 || begin >= stop || !is_included)
                continue;
            ar_part piece = full_part;
            piece.row = row + (begin - positions.first[run]);
            piece.rows = stop - begin;
            const ar_tensor rows = ar_tensor_slice(&a, 1, begin - full_part.row, piece.rows);
            AR_TRY(f(p->ctx, s, &piece, &rows));
        }
    }
    return AR_OK;
}

static ar_status each_gradient(const pass *p, const backward_operands *operands, const ar_part *block_part,
                               const block_gradients *g,
                               ar_status (*f)(ar_ctx *ctx, ar_blocks *s, const ar_part *block_part, const ar_tensor *a))
{
    AR_TRY(each_place(p, operands->dk, block_part, &g->ds, f));
    return each_place(p, operands->dv, block_part, &g->weights, f);
}

static ar_status all_measured(const pass *p, const backward_operands *operands)
{
    AR_TRY(p->ctx->arith->blocks_measured(p->ctx, operands->dk));
    return p->ctx->arith->blocks_measured(p->ctx, operands->dv);
}

/* Adds the sums once all exponents are known; a single block is still in memory. */
static ar_status add_blocks(const pass *p, const backward_operands *operands, const ar_tensor *dot, block_gradients *g,
                            size_t blocks)
{
    AR_TRY(all_measured(p, operands));
    for (ar_part block_part = {0}; ari_next_block(&p->blocks, &block_part);) {
        if (blocks > 1) {
            release_gradients(p, g);
            AR_TRY(gradients_of(p, g, &block_part, operands, dot, true, &(ar_tensor){.ndim = 0}));
        }
        AR_TRY(each_gradient(p, operands, &block_part, g, p->ctx->arith->blocks_add));
    }
    return AR_OK;
}

/* Computes a term of each row for its head's sink; the terms of heads on other ranks are zero. */
static ar_status sink_gradients(const pass *p, const ar_tensor *dot)
{
    const ari_core *c = p->c;
    if (!c->sinks)
        return AR_OK;
    const size_t heads = c->sinks->value.shape[0], shape[3] = {p->state->batch, p->rows, heads};
    ar_tensor terms;
    AR_TRY(ar_ctx_tensor(p->ctx, &terms, AR_F32, 3, shape));
    if (heads > c->heads)
        AR_TRY(ARI_KERNEL(p->ctx, zero, terms.data, ar_tensor_count(&terms) * sizeof(float)));
    const ar_tensor local_terms = ar_tensor_slice(&terms, 2, c->first_sink, c->heads), rows = ari_tensor_rows(&terms);
    AR_TRY(ARI_KERNEL(p->ctx, sinks_backward, &local_terms, p->sinks, ar_const(p->state->max.data),
                      ar_const(p->state->sum.data), ar_const(dot->data)));
    AR_TRY(p->ctx->arith->grad_rows(p->ctx, c->sinks, &rows, (ar_cbuf){NULL}));
    ar_ctx_release(p->ctx, &terms);
    return AR_OK;
}

/* Computes D, dQ, and the exponents of dK and dV. If a block contains all terms for its keys, its sums follow at once,
 * otherwise after all blocks have been measured. */
static ar_status go_back(const pass *p, const backward_operands *operands, const ar_tensor *dq, const ar_tensor *heard)
{
    const bool at_once = p->blocks.full_matrices && !p->c->replicas;
    ar_tensor dot;
    block_gradients g;
    size_t blocks = 0;
    AR_TRY(ar_ctx_tensor(p->ctx, &dot, AR_F64, 1, p->state->sum.shape));
    if (at_once)
        AR_TRY(all_measured(p, operands));
    for (ar_part block_part = {0}; ari_next_block(&p->blocks, &block_part);) {
        if (blocks++ > 0)
            release_gradients(p, &g);
        AR_TRY(gradients_of(p, &g, &block_part, operands, &dot, false, heard));
        AR_TRY(block_by_values(p, dq, &block_part, &g.ds, operands->k_t));
        AR_TRY(each_gradient(p, operands, &block_part, &g, p->ctx->arith->blocks_measure));
        if (at_once)
            AR_TRY(each_gradient(p, operands, &block_part, &g, p->ctx->arith->blocks_add));
    }
    if (!at_once)
        AR_TRY(add_blocks(p, operands, &dot, &g, blocks));
    if (blocks > 0)
        release_gradients(p, &g);
    AR_TRY(sink_gradients(p, &dot));
    ar_ctx_release(p->ctx, &dot);
    return AR_OK;
}

/* Begins the contraction that computes a KV head's dK and dV over (query heads of its group x queries), whichever ranks
 * hold them. */
static ar_status begin_blocks(const pass *p, ar_blocks **out, const ar_tensor *b)
{
    ar_comm *ring = p->ctx->ring;
    const ar_tensor b_t = ari_tensor_transposed(b);
    const ar_blocks_options o = {.rows = p->c->seq,
                                 .k_full = p->c->group_full * p->c->seq,
                                 .places = ar_comm_size(ring) > 1 ? ring : NULL,
                                 .replicas = p->c->replicas,
                                 .tag = p->c->name};
    return p->ctx->arith->blocks_begin(p->ctx, out, &b_t, &o);
}

static ar_status end_blocks(const pass *p, ar_tensor *y, const ar_tensor *operand, ar_blocks *s)
{
    const size_t places = (size_t)ar_comm_size(p->ctx->ring);
    const size_t shape[4] = {p->state->batch, p->c->kv_heads, p->c->seq / places, operand->shape[3]};
    const ar_fold fold = ari_faulty(p->ctx, "kv_replica_grad_local") ? AR_KEEP : AR_ALL;
    AR_TRY(ar_ctx_tensor(p->ctx, y, operand->dtype, 4, shape));
    return p->ctx->arith->blocks_end(p->ctx, y, s, fold);
}

ar_status ari_core_backward(const ari_core *c, ar_ctx *ctx, ar_saved *saved, const void *owner, ar_tensor g[3],
                            const ar_tensor *dout, const ar_tensor *q, const ar_tensor *k, const ar_tensor *v)
{
    backward_operands operands = {.q = NULL};
    ar_tensor heard, saved_state;
    AR_TRY(ar_saved_pop(saved, owner, SAVED_CORE, &saved_state));
    pass p = pass_of(c, ctx, saved_state.data.ptr, k, v);
    const ar_tensor queries = by_matrix(&p, q), keys = by_matrix(&p, k), values = by_matrix(&p, v);
    const ar_tensor out = by_matrix(&p, dout), keys_t = ari_tensor_transposed(&keys);
    AR_TRY(ar_ctx_tensor(ctx, &g[0], q->dtype, 4, q->shape));
    const ar_tensor dq = by_matrix(&p, &g[0]);
    AR_TRY(right(&p, &operands.k, &keys, false));
    AR_TRY(left(&p, &operands.q, &queries, operands.k));
    AR_TRY(right(&p, &operands.v, &values, false));
    AR_TRY(left(&p, &operands.dout, &out, operands.v));
    AR_TRY(right(&p, &operands.k_t, &keys_t, true));
    AR_TRY(begin_blocks(&p, &operands.dk, &queries));
    AR_TRY(begin_blocks(&p, &operands.dv, &out));
    AR_TRY(begin_tap(&p, &heard));
    AR_TRY(go_back(&p, &operands, &dq, &heard));
    count_work(&p, 2.0);
    release_operands(&p, (const ar_operand *const[]){operands.q, operands.k, operands.dout, operands.v, operands.k_t},
                     5);
    AR_TRY(tap_whole(&p, &heard, "probs", 'b'));
    AR_TRY(end_blocks(&p, &g[1], k, operands.dk));
    AR_TRY(end_blocks(&p, &g[2], v, operands.dv));
    ari_step_disown(ctx, saved_state.data.ptr);
    return AR_OK;
}

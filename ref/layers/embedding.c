/* SPDX-License-Identifier: Apache-2.0 */
#include <stddef.h>

#include "ref/context/context_private.h"
#include "ref/core/record.h"
#include "ref/core/tensor_private.h"
#include "ref/layers/batch_private.h"
#include "ref/layers/faults.h"
#include "ref/layers/layers_private.h"
#include "ref/placement/parallel_private.h"

typedef struct embedding {
    ar_module base;
    ar_embedding_split split;
    size_t vocab, h, positions;
    size_t start, rows; /* ids on this rank */
    size_t columns;     /* number of features in a row */
    bool learned;
    float scale; /* factor of the rows; 0: none */
    bool pads;
    int64_t pad_id;
    char token_name[96];      /* name of the token rows' tap; the module's name is that of the sum */
    ari_dropout dropout;      /* dropout of the sum */
    ar_param token, position; /* the module's parameters are an array */
} embedding;

enum { SAVED_ROWS, SAVED_POSITION_ROWS };

static ar_status init_token(embedding *e, ar_ctx *ctx, double range)
{
    char name[160];
    ar_layout layout;
    const size_t shape[2] = {e->vocab, e->h};
    const int n = ar_comm_size(ctx->tp), r = ar_comm_rank(ctx->tp);
    AR_TRY(ari_path(name, sizeof name, e->token_name, "weight"));
    e->rows = e->vocab;
    e->columns = e->h;
    if (e->split == AR_EMBEDDING_VOCAB) {
        AR_TRY(ari_layout_shard_uneven(&layout, 2, shape, 0, r, n));
        ari_local_ids(ctx, e->vocab, &e->start, &e->rows);
    } else if (e->split == AR_EMBEDDING_WHOLE) {
        AR_TRY(ari_layout_replicate(&layout, 2, shape, r, n));
    } else {
        if (ar_layout_shard(&layout, 2, shape, 1, r, n) != AR_OK)
            return ar_error_set(AR_ERR_INDIVISIBLE,
                                "%s: its %zu columns cannot be split over %d ranks; use a tp that divides them", name,
                                e->h, n);
        e->columns = e->h / (size_t)n;
    }
    AR_TRY(ar_param_init(&e->token, ctx, name, &layout, false));
    /* a rank without rows still has columns; otherwise its matrix would be [0, 0] */
    e->token.value.shape[1] = e->columns;
    e->token.init = AR_INIT_NORMAL;
    e->token.init_range = range;
    e->token.fan_in = e->h;
    e->token.fan_out = e->vocab;
    e->token.adds = AR_ADDS_BY_TOKEN;
    return AR_OK;
}

static ar_status init_position(embedding *e, ar_ctx *ctx, const char *path, double range)
{
    const size_t shape[2] = {e->positions, e->h};
    AR_TRY(ar_param_init_whole(&e->position, ctx, path, "weight", 2, shape, AR_INIT_NORMAL));
    e->position.init_range = range;
    /* each rank adds the rows of its positions */
    e->position.spread = ari_ctx_sp(ctx) && !ari_faulty(ctx, "sp_position_grad_local");
    e->position.matrix = false;
    e->position.adds = AR_ADDS_BY_POSITION;
    e->learned = true;
    return AR_OK;
}

static ar_status check_batch(const embedding *e, const ar_ctx *ctx, const ar_batch *batch)
{
    for (size_t i = 0; i < batch->batch * batch->seq; i++) {
        if (batch->input_ids[i] < 0 || (size_t)batch->input_ids[i] >= e->vocab)
            return ar_error_set(AR_ERR_DATA, "input_ids[%zu, %zu] is %lld, the vocabulary has %zu ids", i / batch->seq,
                                i % batch->seq, (long long)batch->input_ids[i], e->vocab);
    }
    if (e->learned && batch->seq > e->positions)
        return ar_error_set(AR_ERR_SHAPE, "a sequence of %zu is longer than the %zu positions of the model", batch->seq,
                            e->positions);
    AR_TRY(ari_batch_check(batch, e->learned ? e->positions : SIZE_MAX));
    return ari_check_sequence(ctx, batch->seq);
}

/* Returns true if the rows of all tokens are ordered by the ranks that hold the positions. With a division by hidden
 * size they are ordered by sequence, because the exchange divides both dimensions. */
static bool rank_major(const embedding *e, const ar_ctx *ctx)
{
    return ari_ctx_sp(ctx) && e->split != AR_EMBEDDING_HIDDEN;
}

/* Returns the number of a sequence's positions that this rank has inside the tensor-parallel regions, or (stream)
 * between them. */
static size_t own_count(const ar_ctx *ctx, const ar_batch *batch, bool stream)
{
    const ar_positions local_positions = ari_local_positions(ctx, batch->seq, stream);
    return ari_positions_count(&local_positions);
}

/* Computes the local row for each token, -1 if another rank holds it; with `gradient` the row to which its gradient is
 * added, -1: none. */
static ar_status own_rows(embedding *e, ar_ctx *ctx, ar_tensor *row_of, const ar_batch *batch, bool gradient)
{
    const size_t n = batch->batch * own_count(ctx, batch, false);
    ARI_OWNED int64_t *host = NULL;
    ar_tensor ids;
    AR_TRY(ARI_ALLOC(&host, n, "ids"));
    for (size_t i = 0; i < n; i++) {
        const int64_t id = batch->input_ids[ari_token_at(ctx, batch, i, rank_major(e, ctx))];
        host[i] = gradient && id == e->pad_id ? -1 : id;
    }
    AR_TRY(ari_numbers(ctx, &ids, AR_I64, n, host));
    AR_TRY(ar_ctx_tensor(ctx, row_of, AR_I64, 1, &n));
    AR_TRY(ARI_KERNEL(ctx, rows_in_range, row_of->data, ar_const(ids.data), n, (int64_t)e->start, (int64_t)e->rows));
    ar_ctx_release(ctx, &ids);
    return AR_OK;
}

/* Computes the rows of this rank's positions between the regions. */
static ar_status position_rows(ar_ctx *ctx, ar_tensor *row_of, const ar_batch *batch)
{
    ar_positions local_positions = ari_local_positions(ctx, batch->seq, true);
    const size_t count = ari_positions_count(&local_positions);
    if (ari_faulty(ctx, "positions_local"))
        local_positions = ari_positions_full(count);
    return ari_token_positions(ctx, row_of, batch, &local_positions);
}

/* Returns the dtype in which a sum selects values of dtype t, and the number of such words per value. One rank has the
 * value and the others zero bits. Bit patterns are summed as integers so that -0 does not become +0. */
static ar_dtype selected_as(ar_dtype t, size_t *words)
{
    *words = t == AR_F32 ? 1 : ar_dtype_bytes(t);
    return t == AR_F32 ? AR_I32 : AR_U8;
}

/* Computes y [.., s/N, f] = the local positions of rows [tokens, f] in rank order. One rank has each value and the
 * others zero bits, so the sum is a selection. `y` has its shape. */
static ar_status select_tokens(ar_ctx *ctx, const ar_tensor *y, const ar_tensor *rows, const char *tag)
{
    ARI_OWNED size_t *counts = NULL;
    size_t words;
    const ar_dtype word_dtype = selected_as(y->dtype, &words);
    AR_TRY(ari_equal_counts(&counts, ctx->tp, ar_tensor_count(y) * words));
    const ar_status st =
        ar_comm_reduce_scatter(ctx->tp, ctx->queue, y->data, ar_const(rows->data), counts, word_dtype, AR_SUM, tag);
    return st;
}

/* Selects rows of a table divided by vocabulary: one rank has the row, the others add zero bits. */
static ar_status select_rows(embedding *e, ar_ctx *ctx, ar_tensor *token, const ar_tensor *full)
{
    size_t words;
    const ar_dtype word_dtype = selected_as(full->dtype, &words);
    *token = *full;
    if (!ari_ctx_sp(ctx))
        return ar_comm_all_reduce(ctx->tp, ctx->queue, full->data, ar_const(full->data), ar_tensor_count(full) * words,
                                  word_dtype, AR_SUM, e->token.name);
    AR_TRY(ari_like_own_tokens(ctx, token, full, e->h));
    return select_tokens(ctx, token, full, e->token.name);
}

/* Runs on every rank: the rank's positions are consecutive rows. */
static ar_status own_rows_of(embedding *e, ar_ctx *ctx, ar_tensor *token, const ar_tensor *full)
{
    *token = *full;
    if (!ari_ctx_sp(ctx))
        return AR_OK;
    AR_TRY(ari_like_own_tokens(ctx, token, full, e->h));
    const size_t bytes = ar_tensor_count(token) * ar_dtype_bytes(token->dtype);
    return ARI_KERNEL(ctx, copy, token->data, ar_const(ar_buf_at(full->data, (size_t)ar_comm_rank(ctx->tp) * bytes)),
                      bytes);
}

/* Computes y [b, s, columns] from rows of a table, in the table's dtype. */
static ar_status take_rows(ar_ctx *ctx, ar_tensor *y, const ar_param *table, const size_t shape[3],
                           const ar_tensor *row_of)
{
    AR_TRY(ar_ctx_tensor(ctx, y, table->value.dtype, 3, shape));
    return ARI_KERNEL(ctx, gather_rows, y, &table->value, ar_const(row_of->data), (ar_cbuf){NULL}, 1);
}

/* Converts to the dtype of activations; only for 16-bit weights this is a copy. Ends x. */
static ar_status as_activation(ar_ctx *ctx, ar_tensor *y, ar_tensor *x)
{
    AR_TRY(ari_cast(ctx, y, x, ctx->activations));
    ari_release_placed(ctx, x, y);
    return AR_OK;
}

static ar_status note_rows(embedding *e, ar_ctx *ctx, const ar_tensor *row_of, const ar_tensor *y,
                           ar_placement out_placement)
{
    static const ar_placement rows = {AR_SHARD, 0}, columns = {AR_SHARD, 1}; /* also for a table with one row */
    const ar_placement *placed = e->split == AR_EMBEDDING_VOCAB    ? &rows
                                 : e->split == AR_EMBEDDING_HIDDEN ? &columns
                                                                   : NULL;
    return ARI_NOTE(ctx, .kind = ARI_LEDGER_EMBEDDING, .name = e->token.name, .input = {row_of}, .out = {y},
                    .param = &(ar_param *){&e->token}, .params = 1, .placed = placed,
                    .output_placement = &out_placement);
}

/* Computes the tokens' rows, [b, s, h], for this rank's positions between the regions. */
static ar_status token_rows(embedding *e, ar_ctx *ctx, ar_tensor *token, const ar_tensor *row_of, const ar_batch *batch)
{
    const size_t shape[3] = {batch->batch, own_count(ctx, batch, false), e->columns};
    ar_tensor rows, full;
    AR_TRY(take_rows(ctx, &rows, &e->token, shape, row_of));
    AR_TRY(ari_fault_token_rows(ctx, &rows, &e->token, e->start, e->rows, batch));
    AR_TRY(as_activation(ctx, &full, &rows));
    if (e->split == AR_EMBEDDING_HIDDEN)
        AR_TRY(note_rows(e, ctx, row_of, &full, ari_shard_features));
    if (e->split == AR_EMBEDDING_HIDDEN)
        AR_TRY(ari_features_to_stream(ctx, token, &full, e->token.name));
    else
        AR_TRY(e->split == AR_EMBEDDING_VOCAB ? select_rows(e, ctx, token, &full) : own_rows_of(e, ctx, token, &full));
    ari_release_placed(ctx, &full, token);
    ari_work_moves(ARI_GPU_MOVES_EMBEDDING, false, ar_tensor_count(token));
    return e->split == AR_EMBEDDING_HIDDEN ? AR_OK : note_rows(e, ctx, row_of, token, ari_placed_stream(ctx));
}

/* Adds learned positions after the selection, so that each rank adds only those that it holds. Ends `token`. */
static ar_status add_positions(embedding *e, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, ar_tensor *token,
                               const ar_batch *batch)
{
    ar_tensor position_ids, rows, position;
    AR_TRY(position_rows(ctx, &position_ids, batch));
    AR_TRY(take_rows(ctx, &rows, &e->position, token->shape, &position_ids));
    AR_TRY(as_activation(ctx, &position, &rows));
    AR_TRY(ari_like(ctx, y, token, e->h));
    AR_TRY(ARI_KERNEL(ctx, add, y, token, &position));
    ari_work_moves(ARI_GPU_MOVES_POSITIONS, false, ar_tensor_count(y));
    AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_POSITIONS, .name = e->position.name, .input = {token}, .out = {y},
                    .param = &(ar_param *){&e->position}, .params = 1));
    ARI_RELEASE(ctx, &position, token);
    return ar_saved_push(saved, e, SAVED_POSITION_ROWS, &position_ids);
}

ar_status ari_embedding_forward_as(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_batch *batch,
                                   const char *name)
{
    embedding *e = (embedding *)base;
    ar_tensor row_of, token;
    AR_TRY(check_batch(e, ctx, batch));
    AR_TRY(own_rows(e, ctx, &row_of, batch, false));
    AR_TRY(token_rows(e, ctx, &token, &row_of, batch));
    if (saved && e->pads) {
        ar_ctx_release(ctx, &row_of);
        AR_TRY(own_rows(e, ctx, &row_of, batch, true));
    }
    AR_TRY(ar_saved_push(saved, e, SAVED_ROWS, &row_of));
    if (e->scale > 0.0f)
        AR_TRY(ARI_KERNEL(ctx, scale, &token, &token, e->scale));
    AR_TRY(ari_tap_tokens(ctx, name, NULL, 'f', &token));
    *y = token;
    if (!e->learned)
        return AR_OK;
    AR_TRY(add_positions(e, ctx, saved, y, &token, batch));
    if (ari_dropout_on(ctx))
        return ari_drop_tokens(&e->dropout, ctx, 'f', y, y);
    return ari_tap_tokens(ctx, base->name, NULL, 'f', y);
}

/* Scales the terms, in place unless they are dy itself. */
static ar_status scale_terms(const embedding *e, ar_ctx *ctx, ar_tensor *terms, const ar_tensor *dy)
{
    const ar_tensor unscaled = *terms;
    if (unscaled.data.ptr == dy->data.ptr)
        AR_TRY(ar_like(ctx, terms, &unscaled));
    return ARI_KERNEL(ctx, scale, terms, &unscaled, e->scale);
}

/* Computes the tokens' gradient. A token's row may be on any rank, so each rank gets the gradients of all positions,
 * ordered by row number. */
static ar_status token_gradient(embedding *e, ar_ctx *ctx, const ar_tensor *dy, const ar_tensor *row_of)
{
    ar_tensor terms = ari_tensor_rows(dy), local_dy;
    if (e->split == AR_EMBEDDING_HIDDEN) {
        AR_TRY(ari_stream_to_features(ctx, &local_dy, dy, e->token.name));
        terms = ari_tensor_rows(&local_dy);
    } else if (ari_ctx_sp(ctx)) {
        AR_TRY(ari_gather_rank_major(ctx, &terms, dy, e->token.name));
        AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_REDISTRIBUTE, .name = e->token.name, .input = {dy}, .out = {&terms},
                        .input_placement = &ari_shard_tokens, .output_placement = &ari_replicated));
    }
    if (e->scale > 0.0f)
        AR_TRY(scale_terms(e, ctx, &terms, dy));
    AR_TRY(ctx->arith->grad_rows(ctx, &e->token, &terms, ar_const(row_of->data)));
    AR_TRY(ari_note_gradient(ctx, &e->token, row_of, &terms));
    ari_release_placed(ctx, &terms, dy);
    return AR_OK;
}

static ar_status forward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                         const ar_batch *batch)
{
    (void)x;
    if (!batch || !batch->input_ids)
        return ar_error_set(AR_ERR_ARG, "%s: an embedding takes the batch's input_ids, and it has none", base->name);
    return ari_embedding_forward_as(base, ctx, saved, y, batch, ((embedding *)base)->token_name);
}

ar_status ari_embedding_backward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dy,
                                 const ar_batch *batch)
{
    embedding *e = (embedding *)base;
    ar_tensor row_of, position_ids, dsum = *dy;
    (void)batch;
    if (dx)
        return ar_error_set(AR_ERR_ARG, "%s: ids have no gradient; an embedding is the first of its modules",
                            base->name);
    if (e->learned && ari_dropout_on(ctx)) {
        AR_TRY(ari_like(ctx, &dsum, dy, e->h));
        AR_TRY(ari_drop_tokens(&e->dropout, ctx, '\0', &dsum, dy));
    }
    AR_TRY(ar_saved_pop(saved, e, SAVED_ROWS, &row_of));
    /* A mistake leaves the gradient of a tied weight to the LM head. */
    if (e->token.uses == 1 || !ari_faulty(ctx, "embedding_tied_once"))
        AR_TRY(token_gradient(e, ctx, &dsum, &row_of));
    if (!e->learned)
        return AR_OK;
    const ar_tensor terms = ari_tensor_rows(&dsum);
    AR_TRY(ar_saved_pop(saved, e, SAVED_POSITION_ROWS, &position_ids));
    AR_TRY(ctx->arith->grad_rows(ctx, &e->position, &terms, ar_const(position_ids.data)));
    return ari_note_gradient(ctx, &e->position, NULL, &dsum);
}

/* --- as a module -------------------------------------------------------------------------------------------------- */

static ar_status init(embedding *e, ar_ctx *ctx, const char *token, const char *position, double range)
{
    AR_TRY(ari_path(e->token_name, sizeof e->token_name, token, NULL));
    AR_TRY(ari_dropout_init(&e->dropout, e->base.name, NULL, e->h, e->positions));
    AR_TRY(init_token(e, ctx, range));
    return position ? init_position(e, ctx, position, range) : AR_OK;
}

ar_status ar_embedding_create(ar_module **out, ar_ctx *ctx, ar_embedding_split split, const char *token, size_t vocab,
                              size_t h, double init_range, const char *position, size_t positions, const char *sum)
{
    static const ar_module_ops ops = {.kind = "embedding",
                                      .forward = forward,
                                      .backward = ari_embedding_backward,
                                      .params_at = offsetof(embedding, token),
                                      .params_count = 2,
                                      .takes_ids = true};
    embedding *e = NULL;
    AR_TRY(ARI_MODULE_BEGIN(&e, &ops, sum ? sum : token, AR_HELD_UNKNOWN));
    e->split = split;
    e->vocab = vocab;
    e->h = h;
    e->positions = positions;
    return ari_module_end(out, &e->base, init(e, ctx, token, position, init_range));
}

void ari_embedding_scale(ar_module *e, double factor)
{
    ((embedding *)e)->scale = (float)factor;
}

void ari_embedding_pad(ar_module *e, size_t id)
{
    ((embedding *)e)->pads = true;
    ((embedding *)e)->pad_id = (int64_t)id;
}

ar_param *ari_embedding_token(ar_module *e)
{
    return &((embedding *)e)->token;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "ref/core/size.h"
#include "ref/layers/parts.h"

struct ar_embedding {
    size_t vocab, h, positions;
    size_t start, rows; /* this rank's ids */
    bool learned;
    char token_name[96], sum_name[96];
    ar_param token, position;
};

enum { SAVED_ROWS, SAVED_POSITION_ROWS };

static ar_status init_token(ar_embedding *e, ar_ctx *ctx, double range)
{
    char name[160];
    ar_layout layout;
    const size_t shape[2] = {e->vocab, e->h};
    const int n = ar_comm_size(ctx->tp), r = ar_comm_rank(ctx->tp);
    AR_TRY(ari_path(name, sizeof name, e->token_name, "weight"));
    AR_TRY(ar_layout_shard_uneven(&layout, 2, shape, 0, r, n));
    ar_split_uneven(e->vocab, n, r, &e->start, &e->rows);
    AR_TRY(ar_param_init(&e->token, ctx, name, &layout, false));
    /* A rank without rows still has columns, or its matrix would be [0, 0]. */
    e->token.value.shape[1] = e->h;
    e->token.init = AR_INIT_NORMAL;
    e->token.init_range = range;
    e->token.fan_in = e->h;
    e->token.fan_out = e->vocab;
    return AR_OK;
}

static ar_status init_position(ar_embedding *e, ar_ctx *ctx, const char *path, double range)
{
    char name[160];
    ar_layout layout;
    const size_t shape[2] = {e->positions, e->h};
    AR_TRY(ari_path(name, sizeof name, path, "weight"));
    AR_TRY(ar_layout_replicate(&layout, 2, shape, ar_comm_rank(ctx->tp), ar_comm_size(ctx->tp)));
    AR_TRY(ar_param_init(&e->position, ctx, name, &layout, false));
    e->position.init = AR_INIT_NORMAL;
    e->position.init_range = range;
    e->position.fan_in = e->h;
    e->position.fan_out = e->positions;
    e->learned = true;
    return AR_OK;
}

ar_status ar_embedding_create(ar_embedding **gives, ar_ctx *ctx, const char *token, size_t vocab, size_t h,
                              double init_range, const char *position, size_t positions, const char *sum)
{
    ar_embedding *e = NULL;
    AR_TRY(ari_alloc_zero((void **)&e, 1, sizeof *e, token));
    e->vocab = vocab;
    e->h = h;
    e->positions = positions;
    ar_status st = AR_OK;
    AR_TRY_TO(failed, st, ari_path(e->token_name, sizeof e->token_name, token, NULL));
    AR_TRY_TO(failed, st, ari_path(e->sum_name, sizeof e->sum_name, sum ? sum : token, NULL));
    AR_TRY_TO(failed, st, init_token(e, ctx, init_range));
    if (position)
        AR_TRY_TO(failed, st, init_position(e, ctx, position, init_range));
    *gives = e;
    return AR_OK;
failed:
    ar_embedding_destroy(e);
    return st;
}

void ar_embedding_destroy(ar_embedding *e)
{
    if (!e)
        return;
    ar_param_fini(&e->token);
    ar_param_fini(&e->position);
    free(e);
}

ar_param *ar_embedding_token(ar_embedding *e)
{
    return &e->token;
}

ar_param *ar_embedding_position(ar_embedding *e)
{
    return e->learned ? &e->position : NULL;
}

static ar_status check_ids(const ar_embedding *e, const ar_batch *batch)
{
    for (size_t i = 0; i < batch->batch * batch->seq; i++) {
        if (batch->input_ids[i] < 0 || (size_t)batch->input_ids[i] >= e->vocab)
            return ar_error_set(AR_ERR_DATA, "input_ids[%zu, %zu] is %lld, the vocabulary has %zu ids", i / batch->seq,
                                i % batch->seq, (long long)batch->input_ids[i], e->vocab);
    }
    if (e->learned && batch->seq > e->positions)
        return ar_error_set(AR_ERR_SHAPE, "a sequence of %zu is longer than the %zu positions of the model", batch->seq,
                            e->positions);
    return AR_OK;
}

/* Which local row each token takes, -1 where another rank holds it. */
static ar_status own_rows(ar_embedding *e, ar_ctx *ctx, ar_tensor *row_of, const ar_batch *batch)
{
    const size_t n = batch->batch * batch->seq;
    ar_tensor ids;
    AR_TRY(ar_ctx_tensor(ctx, &ids, AR_I64, 1, &n));
    AR_TRY(ar_ctx_tensor(ctx, row_of, AR_I64, 1, &n));
    AR_TRY(ar_ctx_upload(ctx, &ids, batch->input_ids));
    AR_TRY(ctx->device->ops->rows_in_range(ctx->device, ctx->queue, row_of->data, ar_const(ids.data), n,
                                           (int64_t)e->start, (int64_t)e->rows));
    ar_ctx_release(ctx, &ids);
    return AR_OK;
}

static ar_status position_rows(ar_ctx *ctx, ar_tensor *row_of, const ar_batch *batch)
{
    const size_t n = batch->batch * batch->seq;
    int64_t *host = NULL;
    AR_TRY(ari_alloc((void **)&host, n, sizeof *host, "positions"));
    for (size_t i = 0; i < n; i++)
        host[i] = (int64_t)(i % batch->seq);
    ar_status st = ar_ctx_tensor(ctx, row_of, AR_I64, 1, &n);
    if (st == AR_OK)
        st = ar_ctx_upload(ctx, row_of, host);
    free(host);
    return st;
}

/* The mistake of two owners: the last row of a shard also answers for the first id of the next. */
static ar_status edge_twice(ar_embedding *e, ar_ctx *ctx, const ar_tensor *y, const ar_batch *batch)
{
    const size_t n = batch->batch * batch->seq;
    for (size_t i = 0; i < n && e->rows > 0; i++) {
        if ((size_t)batch->input_ids[i] != e->start + e->rows)
            continue;
        const size_t row_bytes = e->h * sizeof(float);
        AR_TRY(ctx->device->ops->copy(ctx->device, ctx->queue, ar_buf_at(y->data, i * row_bytes),
                                      ar_cbuf_at(ar_const(e->token.value.data), (e->rows - 1) * row_bytes), row_bytes));
    }
    return AR_OK;
}

ar_status ar_embedding_forward(ar_embedding *e, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_batch *batch)
{
    const ar_device_ops *dev = ctx->device->ops;
    const size_t n = batch->batch * batch->seq, shape[3] = {batch->batch, batch->seq, e->h};
    ar_tensor row_of, token;
    ar_ctx_place(ctx, batch);
    AR_TRY(check_ids(e, batch));
    AR_TRY(own_rows(e, ctx, &row_of, batch));
    AR_TRY(ar_ctx_tensor(ctx, &token, AR_F32, 3, shape));
    AR_TRY(dev->gather_rows(ctx->device, ctx->queue, token.data, &e->token.value, ar_const(row_of.data), n));
    if (ar_faulty(ctx, AR_FAULT_embedding_edge_twice))
        AR_TRY(edge_twice(e, ctx, &token, batch));
    /* A selection: one rank has the row, the others zero bits. */
    AR_TRY(ar_comm_all_reduce(ctx->tp, ctx->queue, token.data, ar_const(token.data), n * e->h, AR_I32, AR_SUM,
                              e->token.name));
    AR_TRY(ar_saved_push(saved, e, SAVED_ROWS, &row_of));
    AR_TRY(ari_tap_whole(ctx, e->token_name, NULL, 'f', &token));
    *y = token;
    if (!e->learned)
        return AR_OK;
    ar_tensor at, position;
    AR_TRY(position_rows(ctx, &at, batch));
    AR_TRY(ar_ctx_tensor(ctx, &position, AR_F32, 3, shape));
    AR_TRY(ar_ctx_tensor(ctx, y, AR_F32, 3, shape));
    AR_TRY(dev->gather_rows(ctx->device, ctx->queue, position.data, &e->position.value, ar_const(at.data), n));
    AR_TRY(dev->add(ctx->device, ctx->queue, y->data, ar_const(token.data), ar_const(position.data), n * e->h));
    AR_TRY(ar_saved_push(saved, e, SAVED_POSITION_ROWS, &at));
    ar_ctx_release(ctx, &position);
    return ari_tap_whole(ctx, e->sum_name, NULL, 'f', y);
}

ar_status ar_embedding_backward(ar_embedding *e, ar_ctx *ctx, ar_saved *saved, const ar_tensor *dy,
                                const ar_batch *batch)
{
    ar_tensor row_of, at;
    ar_ctx_place(ctx, batch);
    const ar_tensor terms = ar_tensor_rows(dy);
    AR_TRY(ar_saved_pop(saved, e, SAVED_ROWS, &row_of));
    AR_TRY(ctx->arith->grad_rows(ctx, &e->token, &terms, ar_const(row_of.data)));
    if (!e->learned)
        return AR_OK;
    AR_TRY(ar_saved_pop(saved, e, SAVED_POSITION_ROWS, &at));
    return ctx->arith->grad_rows(ctx, &e->position, &terms, ar_const(at.data));
}

/* SPDX-License-Identifier: Apache-2.0 */
/* The terms of one gradient's sum, of which several ranks have rows, go to the rank that computes it: in a model that is
 * wider than a part of a sample is long they are fewer than a matrix has sums, and each has no more bytes than its
 * storage. Where each rank computes a slice of the gradient (ar_param.sliced), all rows of x go to all ranks, and of dy
 * each gets its columns. */
#include <stdlib.h>

#include "ref/arith/exact.h"
#include "ref/comm/comm_private.h"
#include "ref/context/context.h"
#include "ref/core/size.h"
#include "ref/core/tensor_private.h"

void ari_moved_rows_end(ari_moved_rows *m)
{
    if (!m->ctx)
        return;
    ar_ctx_release(m->ctx, &m->arrive);
    ar_ctx_release(m->ctx, &m->leave);
    free(m->sent);
}

/* Own rows in the order in which they leave: by the rank that they go to, of each by blocks. */
static ar_status list_leaving(ari_moved_rows *m, const ari_row_blocks *of)
{
    const size_t *own = of->rows + (size_t)ar_comm_rank(of->over) * of->blocks;
    ARI_OWNED int64_t *list = NULL;
    size_t n = 0, all = 0;
    for (size_t b = 0; b < of->blocks; b++)
        all += own[b];
    AR_TRY(ARI_ALLOC(&list, all, "rows that leave"));
    for (int rank = 0; rank < ar_comm_size(of->over); rank++) {
        const size_t before = n;
        for (size_t b = 0, at = 0; b < of->blocks; at += own[b++]) {
            for (size_t i = 0; i < own[b] && of->owner[b] == rank; i++)
                list[n++] = (int64_t)(at + i);
        }
        m->sent[rank] = n - before;
    }
    return ari_numbers(m->ctx, &m->leave, AR_I64, all, list);
}

/* All of them, in the order in which they are. */
static void count_leaving(ari_moved_rows *m, const ari_row_blocks *of)
{
    const size_t *own = of->rows + (size_t)ar_comm_rank(of->over) * of->blocks;
    for (int rank = 0; rank < ar_comm_size(of->over); rank++) {
        m->sent[rank] = 0;
        for (size_t b = 0; b < of->blocks; b++)
            m->sent[rank] += own[b];
    }
}

static bool comes_here(const ari_row_blocks *of, size_t block)
{
    return !of->owner || of->owner[block] == ar_comm_rank(of->over);
}

/* Where in what arrives the rows of each own block are: rank after rank has sent those of all blocks. */
static ar_status list_arriving(ari_moved_rows *m, const ari_row_blocks *of)
{
    const size_t ranks = (size_t)ar_comm_size(of->over);
    ARI_OWNED size_t *next = NULL; /* of each rank's rows in what arrives */
    ARI_OWNED int64_t *list = NULL;
    size_t n = 0;
    AR_TRY(ARI_ALLOC(&next, ranks, "rows that arrive"));
    for (size_t r = 0; r < ranks; r++) {
        next[r] = m->rows;
        for (size_t b = 0; b < of->blocks; b++)
            m->rows += comes_here(of, b) ? of->rows[r * of->blocks + b] : 0;
        m->sent[ranks + r] = m->rows - next[r];
    }
    AR_TRY(ARI_ALLOC(&list, m->rows, "rows that arrive"));
    for (size_t b = 0; b < of->blocks; b++) {
        for (size_t r = 0; r < ranks && comes_here(of, b); r++) {
            for (size_t i = 0; i < of->rows[r * of->blocks + b]; i++)
                list[n++] = (int64_t)next[r]++;
        }
    }
    return ari_numbers(m->ctx, &m->arrive, AR_I64, m->rows, list);
}

ar_status ari_moved_rows_init(ari_moved_rows *m, ar_ctx *ctx, const ari_row_blocks *of)
{
    *m = (ari_moved_rows){.ctx = ctx, .over = of->over, .sliced = !of->owner};
    AR_TRY(ARI_ALLOC(&m->sent, 2 * (size_t)ar_comm_size(of->over), "numbers of rows"));
    if (m->sliced)
        count_leaving(m, of);
    else
        AR_TRY(list_leaving(m, of));
    return list_arriving(m, of);
}

/* Elements of rows of so many features that go to each rank, then those that come from each. */
static ar_status count_elements(size_t **gives, const ari_moved_rows *m, size_t features)
{
    const size_t ranks = (size_t)ar_comm_size(m->over);
    ARI_OWNED size_t *counts = NULL;
    AR_TRY(ARI_ALLOC(&counts, 2 * ranks, "elements to exchange"));
    for (size_t r = 0; r < 2 * ranks; r++)
        counts[r] = m->sent[r] * features;
    ARI_GIVE(gives, counts);
    return AR_OK;
}

/* y = what came, in the order of the blocks. */
static ar_status put_in_order(ar_tensor *y, ar_tensor *came, const ari_moved_rows *m)
{
    AR_TRY(ari_take_rows(m->ctx, y, came, &m->arrive, (ar_cbuf){NULL}, 1));
    ar_ctx_release(m->ctx, came);
    return AR_OK;
}

/* y = x, or where its rows do not follow each other a copy; ari_release_placed. */
static ar_status together(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x)
{
    *y = *x;
    if (ari_tensor_is_contiguous(x))
        return AR_OK;
    AR_TRY(ari_new_rows(ctx, y, x->dtype, x->shape[0], x->shape[1]));
    return ARI_KERNEL(ctx, copy_strided, y, x);
}

ar_status ari_move_rows(ar_tensor *y, const ar_tensor *x, const ari_moved_rows *m, const char *tag)
{
    ar_ctx *ctx = m->ctx;
    const size_t ranks = (size_t)ar_comm_size(m->over);
    ARI_OWNED size_t *counts = NULL;
    ar_tensor sent, came;
    AR_TRY(count_elements(&counts, m, x->shape[1]));
    AR_TRY(ari_new_rows(ctx, &came, x->dtype, m->rows, x->shape[1]));
    if (m->sliced) {
        AR_TRY(together(ctx, &sent, x));
        AR_TRY(ar_comm_all_gather(m->over, ctx->queue, came.data, ar_const(sent.data), counts + ranks, x->dtype, tag));
        ari_release_placed(ctx, &sent, x);
        return put_in_order(y, &came, m);
    }
    AR_TRY(ari_take_rows(ctx, &sent, x, &m->leave, (ar_cbuf){NULL}, 1));
    AR_TRY(
        ar_comm_all_to_all(m->over, ctx->queue, came.data, ar_const(sent.data), counts, counts + ranks, x->dtype, tag));
    ar_ctx_release(ctx, &sent);
    return put_in_order(y, &came, m);
}

/* Each rank gets its slice of the columns of all rows: what goes to one lies together. */
static ar_status move_columns(ar_tensor *y, const ar_tensor *x, const ari_moved_rows *m, const char *tag)
{
    ar_ctx *ctx = m->ctx;
    const size_t rows = x->shape[0], cols = x->shape[1], width = ar_dtype_bytes(x->dtype);
    const int ranks = ar_comm_size(m->over);
    ARI_OWNED size_t *counts = NULL;
    size_t start = 0, own = 0;
    ar_tensor sent, came;
    ari_comm_slice(cols, ranks, ar_comm_rank(m->over), &start, &own);
    AR_TRY(count_elements(&counts, m, own));
    AR_TRY(ari_new_rows(ctx, &sent, x->dtype, rows, cols));
    AR_TRY(ari_new_rows(ctx, &came, x->dtype, m->rows, own));
    for (int r = 0; r < ranks; r++) {
        size_t n = 0;
        ari_comm_slice(cols, ranks, r, &start, &n);
        const ar_tensor from = ar_tensor_slice(x, 1, start, n);
        ar_tensor to = sent;
        to.shape[1] = n;
        to.stride[0] = (ptrdiff_t)n;
        to.data = ar_buf_at(sent.data, rows * start * width);
        counts[r] = rows * n;
        if (counts[r] > 0)
            AR_TRY(ARI_KERNEL(ctx, copy_strided, &to, &from));
    }
    AR_TRY(
        ar_comm_all_to_all(m->over, ctx->queue, came.data, ar_const(sent.data), counts, counts + ranks, x->dtype, tag));
    ar_ctx_release(ctx, &sent);
    return put_in_order(y, &came, m);
}

ar_status ari_move_terms(ar_tensor *y, const ar_tensor *dy, const ari_moved_rows *m, const char *tag)
{
    return (m->sliced ? move_columns : ari_move_rows)(y, dy, m, tag);
}

ar_status ari_exact_add_sliced(ar_ctx *ctx, const ar_row_sum *sum, size_t rows, const ar_tensor *terms, ar_cbuf row_of,
                               const char *tag)
{
    ar_comm *over = ctx->sequence;
    const size_t ranks = (size_t)ar_comm_size(over), cols = terms->shape[1], n = ranks * terms->shape[0];
    ARI_OWNED size_t *counts = NULL;
    size_t start = 0, own = 0;
    ar_tensor sent, all, row_of_all;
    AR_TRY(ari_equal_counts(&counts, over, ar_tensor_count(terms)));
    AR_TRY(ari_new_rows(ctx, &all, terms->dtype, n, cols));
    AR_TRY(together(ctx, &sent, terms));
    AR_TRY(ar_comm_all_gather(over, ctx->queue, all.data, ar_const(sent.data), counts, all.dtype, tag));
    ari_release_placed(ctx, &sent, terms);
    AR_TRY(ar_ctx_tensor(ctx, &row_of_all, AR_I64, 1, &n));
    for (size_t r = 0; r < ranks; r++)
        counts[r] = terms->shape[0];
    AR_TRY(ar_comm_all_gather(over, ctx->queue, row_of_all.data, row_of, counts, AR_I64, tag));
    ari_comm_slice(rows, (int)ranks, ar_comm_rank(over), &start, &own);
    AR_TRY(ARI_KERNEL(ctx, rows_in_range, row_of_all.data, ar_const(row_of_all.data), n, (int64_t)start, (int64_t)own));
    AR_TRY(ARI_KERNEL(ctx, acc_add, ar_buf_at(sum->t, start * cols), ar_buf_at(sum->hl, start * cols * sizeof(int64_t)),
                      sum->narrow, rows, &all, ar_const(row_of_all.data)));
    ARI_RELEASE(ctx, &all, &row_of_all);
    return AR_OK;
}

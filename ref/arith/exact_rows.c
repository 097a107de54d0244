/* SPDX-License-Identifier: Apache-2.0 */
/* Terms of a gradient's sum whose rows are spread over several ranks are sent to the rank that computes the sum. If a
 * model is wider than a rank's part of a sample is long, the terms are fewer than the sums of the matrix, and each term
 * has no more bytes than its storage type. */
#include <stdlib.h>

#include "ref/arith/exact.h"
#include "ref/context/context.h"
#include "ref/core/size.h"

void ari_moved_rows_end(ari_moved_rows *m)
{
    if (!m->ctx)
        return;
    ar_ctx_release(m->ctx, &m->arrive);
    ar_ctx_release(m->ctx, &m->leave);
    free(m->sent);
}

/* Lists this rank's rows in sending order: by destination rank, then by block. */
static ar_status list_leaving(ari_moved_rows *m, const ari_row_blocks *row_blocks)
{
    const size_t *local_rows = row_blocks->rows + (size_t)ar_comm_rank(row_blocks->group) * row_blocks->blocks;
    ARI_OWNED int64_t *list = NULL;
    size_t n = 0, total = 0;
    for (size_t b = 0; b < row_blocks->blocks; b++)
        total += local_rows[b];
    AR_TRY(ARI_ALLOC(&list, total, "rows that leave"));
    for (int rank = 0; rank < ar_comm_size(row_blocks->group); rank++) {
        const size_t before = n;
        for (size_t b = 0, row = 0; b < row_blocks->blocks; row += local_rows[b++]) {
            for (size_t i = 0; i < local_rows[b] && row_blocks->owner[b] == rank; i++)
                list[n++] = (int64_t)(row + i);
        }
        m->sent[rank] = n - before;
    }
    return ari_numbers(m->ctx, &m->leave, AR_I64, total, list);
}

static bool comes_here(const ari_row_blocks *row_blocks, size_t block)
{
    return row_blocks->owner[block] == ar_comm_rank(row_blocks->group);
}

/* Lists where the rows of each local block are in the received data: the ranks' rows follow one another, each rank's
 * for all blocks. */
static ar_status list_arriving(ari_moved_rows *m, const ari_row_blocks *row_blocks)
{
    const size_t ranks = (size_t)ar_comm_size(row_blocks->group);
    ARI_OWNED size_t *next_row = NULL; /* of each rank's rows in the received data */
    ARI_OWNED int64_t *list = NULL;
    size_t n = 0;
    AR_TRY(ARI_ALLOC(&next_row, ranks, "rows that arrive"));
    for (size_t r = 0; r < ranks; r++) {
        next_row[r] = m->rows;
        for (size_t b = 0; b < row_blocks->blocks; b++)
            m->rows += comes_here(row_blocks, b) ? row_blocks->rows[r * row_blocks->blocks + b] : 0;
        m->sent[ranks + r] = m->rows - next_row[r];
    }
    AR_TRY(ARI_ALLOC(&list, m->rows, "rows that arrive"));
    for (size_t b = 0; b < row_blocks->blocks; b++) {
        for (size_t r = 0; r < ranks && comes_here(row_blocks, b); r++) {
            for (size_t i = 0; i < row_blocks->rows[r * row_blocks->blocks + b]; i++)
                list[n++] = (int64_t)next_row[r]++;
        }
    }
    return ari_numbers(m->ctx, &m->arrive, AR_I64, m->rows, list);
}

ar_status ari_moved_rows_init(ari_moved_rows *m, ar_ctx *ctx, const ari_row_blocks *row_blocks)
{
    *m = (ari_moved_rows){.ctx = ctx, .group = row_blocks->group};
    AR_TRY(ARI_ALLOC(&m->sent, 2 * (size_t)ar_comm_size(row_blocks->group), "numbers of rows"));
    AR_TRY(list_leaving(m, row_blocks));
    return list_arriving(m, row_blocks);
}

/* Counts the elements of rows with `features` features that go to each rank, then those that come from each. */
static ar_status count_elements(size_t **out, const ari_moved_rows *m, size_t features)
{
    const size_t ranks = (size_t)ar_comm_size(m->group);
    ARI_OWNED size_t *counts = NULL;
    AR_TRY(ARI_ALLOC(&counts, 2 * ranks, "elements to exchange"));
    for (size_t r = 0; r < 2 * ranks; r++)
        counts[r] = m->sent[r] * features;
    ARI_GIVE(out, counts);
    return AR_OK;
}

ar_status ari_move_rows(ar_tensor *y, const ar_tensor *x, const ari_moved_rows *m, const char *tag)
{
    ar_ctx *ctx = m->ctx;
    const size_t ranks = (size_t)ar_comm_size(m->group);
    ARI_OWNED size_t *counts = NULL;
    ar_tensor sent, received;
    AR_TRY(count_elements(&counts, m, x->shape[1]));
    AR_TRY(ari_new_rows(ctx, &received, x->dtype, m->rows, x->shape[1]));
    AR_TRY(ari_take_rows(ctx, &sent, x, &m->leave, (ar_cbuf){NULL}, 1));
    AR_TRY(ar_comm_all_to_all(m->group, ctx->queue, received.data, ar_const(sent.data), counts, counts + ranks,
                              x->dtype, tag));
    ar_ctx_release(ctx, &sent);
    AR_TRY(ari_take_rows(ctx, y, &received, &m->arrive, (ar_cbuf){NULL}, 1));
    ar_ctx_release(ctx, &received);
    return AR_OK;
}

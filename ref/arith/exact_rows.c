/* SPDX-License-Identifier: Apache-2.0 */
/* The terms of one gradient's sum, of which several ranks have rows, go to the rank that computes it: in a model that is
 * wider than a part of a sample is long they are fewer than a matrix has sums, and each has no more bytes than its
 * storage. */
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

static bool comes_here(const ari_row_blocks *of, size_t block)
{
    return of->owner[block] == ar_comm_rank(of->over);
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
    *m = (ari_moved_rows){.ctx = ctx, .over = of->over};
    AR_TRY(ARI_ALLOC(&m->sent, 2 * (size_t)ar_comm_size(of->over), "numbers of rows"));
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

ar_status ari_move_rows(ar_tensor *y, const ar_tensor *x, const ari_moved_rows *m, const char *tag)
{
    ar_ctx *ctx = m->ctx;
    const size_t ranks = (size_t)ar_comm_size(m->over);
    ARI_OWNED size_t *counts = NULL;
    ar_tensor sent, came;
    AR_TRY(count_elements(&counts, m, x->shape[1]));
    AR_TRY(ari_new_rows(ctx, &came, x->dtype, m->rows, x->shape[1]));
    AR_TRY(ari_take_rows(ctx, &sent, x, &m->leave, (ar_cbuf){NULL}, 1));
    AR_TRY(
        ar_comm_all_to_all(m->over, ctx->queue, came.data, ar_const(sent.data), counts, counts + ranks, x->dtype, tag));
    ar_ctx_release(ctx, &sent);
    AR_TRY(ari_take_rows(ctx, y, &came, &m->arrive, (ar_cbuf){NULL}, 1));
    ar_ctx_release(ctx, &came);
    return AR_OK;
}

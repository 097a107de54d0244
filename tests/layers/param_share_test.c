/* SPDX-License-Identifier: Apache-2.0 */
/* Shares of a parameter: runs of its matrix's elements, in memory and in the Hugging Face shape. */
#include "ref/layers/share.h"
#include "tests/support/test.h"

#include "ref/context/context.h"
#include "support/rank_run.h"

enum { MOST = 120 };

static size_t count_of(int ndim, const size_t *shape)
{
    size_t count = 1;
    for (int d = 0; d < ndim; d++)
        count *= shape[d];
    return count;
}

/* Walks the boxes in their order; the elements met must be start, start + 1, .. */
static size_t walk(const ari_run_box *b, int ndim, const size_t *shape, size_t expected)
{
    const size_t count = count_of(ndim, b->extent);
    for (size_t i = 0; i < count; i++, expected++) {
        size_t rest = i, index = 0, stride = 1;
        for (int d = ndim - 1; d >= 0; d--) {
            index += (b->origin[d] + rest % b->extent[d]) * stride;
            rest /= b->extent[d];
            stride *= shape[d];
        }
        cr_assert_eq(index, expected, "element %zu, expected %zu", index, expected);
    }
    return expected;
}

Test(param_share, the_boxes_of_a_run_are_its_elements_in_order)
{
    static const size_t shapes[][AR_MAX_DIMS] = {{7}, {5, 4}, {1, 9}, {9, 1}, {3, 2, 4}, {2, 3, 2, 4}};
    static const int dims[] = {1, 2, 2, 2, 3, 4};
    for (size_t s = 0; s < sizeof dims / sizeof *dims; s++) {
        const size_t all = count_of(dims[s], shapes[s]);
        for (size_t start = 0; start <= all; start++) {
            for (size_t count = 0; start + count <= all; count++) {
                ari_run_box box[ARI_RUN_BOXES];
                const size_t n = ari_run_boxes(box, dims[s], shapes[s], start, count);
                size_t next = start;
                cr_assert_leq(n, ARI_RUN_BOXES);
                for (size_t i = 0; i < n; i++)
                    next = walk(&box[i], dims[s], shapes[s], next);
                cr_expect_eq(next, start + count, "shape %zu, [%zu, +%zu): up to %zu", s, start, count, next);
            }
        }
    }
}

Test(param_share, a_matrix_run_is_at_most_three_boxes)
{
    static const size_t shape[2] = {6, 5};
    ari_run_box box[ARI_RUN_BOXES];
    cr_expect_eq(ari_run_boxes(box, 2, shape, 3, 20), 3);
    cr_expect_eq(ari_run_boxes(box, 2, shape, 5, 10), 1);
    cr_expect_eq(ari_run_boxes(box, 2, shape, 11, 3), 1);
    cr_expect_eq(ari_run_boxes(box, 2, shape, 13, 3), 2);
}

Test(param_share, a_number_is_one_box)
{
    ari_run_box box[ARI_RUN_BOXES];
    cr_expect_eq(ari_run_boxes(box, 0, NULL, 0, 1), 1);
    cr_expect_eq(ari_run_boxes(box, 0, NULL, 0, 0), 0);
}

/* --- a parameter's shares ----------------------------------------------------------------------------------------- */

typedef struct job {
    ar_layout layout;
    bool transposed;
    int dp;
    /* How often each element of the full tensor was met; by the shares' boxes, of this tensor-parallel part. */
    int met[MOST];
    size_t wrong; /* elements that came back elsewhere */
} job;

/* Element i of a box, row-major, in a row-major tensor of `shape`. */
static size_t place(const size_t *at, const size_t *extent, const size_t *shape, int ndim, size_t i)
{
    size_t index = 0, stride = 1;
    for (int d = ndim - 1; d >= 0; d--) {
        index += (at[d] + i % extent[d]) * stride;
        i /= extent[d];
        stride *= shape[d];
    }
    return index;
}

static ar_status one_share(ar_ctx *ctx, job *j, ar_param *p, const float *local, int rank)
{
    size_t start = 0, count = 0;
    ar_layout share;
    ar_tensor run, back;
    float out[MOST];
    ar_comm_slice(ar_tensor_count(&p->value), j->dp, rank, &start, &count);
    AR_TRY(ari_share_layout(&share, p, ctx, start, count));
    AR_TRY(ar_ctx_tensor(ctx, &run, AR_F32, 1, &count));
    AR_TRY(ar_ctx_tensor(ctx, &back, AR_F32, p->value.ndim, p->value.shape));
    AR_TRY(ctx->device->ops->fill(ctx->device, ctx->queue, &back, -1.0f));
    AR_TRY(ari_share_get(ctx, run.data, p, &p->value, start, count));
    AR_TRY(ari_share_put(ctx, ar_const(run.data), p, &back, start, count));
    AR_TRY(ar_ctx_download(ctx, out, &back));
    size_t covered = 0;
    for (size_t k = 0; k < share.nbox; k++) {
        const ar_box *b = &share.box[k];
        for (size_t i = 0; i < count_of(share.ndim, b->extent); i++, covered++) {
            const size_t at = place(b->local, b->extent, p->value.shape, share.ndim, i);
            const size_t full = place(b->global, b->extent, share.shape, share.ndim, i);
            j->met[full]++;
            j->wrong += out[at] != local[at] || local[at] != (float)full;
        }
    }
    j->wrong += covered != count;
    return AR_OK;
}

static ar_status rank_main(ar_ctx *ctx, void *user)
{
    job *j = user;
    SCOPED(ar_param_fini) ar_param p = {0};
    float full[MOST], local[MOST];
    for (size_t i = 0; i < MOST; i++)
        full[i] = (float)i;
    AR_TRY(ar_param_init(&p, ctx, "p", &j->layout, j->transposed));
    AR_TRY(ar_param_set(&p, ctx, full));
    AR_TRY(ar_ctx_download(ctx, local, &p.value));
    for (int r = 0; r < j->dp; r++)
        AR_TRY(one_share(ctx, j, &p, local, r));
    return AR_OK;
}

/* All parts' shares over dp ranks meet each element of the full tensor once. */
static void expect_once(job *j, int parts, int part, size_t held)
{
    const rank_run_options o = {.ranks = 1};
    cr_assert_ok(rank_run(&o, rank_main, j));
    cr_expect_eq(j->wrong, 0, "part %d of %d over %d ranks: %zu elements at the wrong place", part, parts, j->dp,
                 j->wrong);
    size_t once = 0;
    for (size_t i = 0; i < MOST; i++) {
        cr_expect_leq(j->met[i], 1, "element %zu", i);
        once += j->met[i] == 1;
    }
    cr_expect_eq(once, held, "part %d of %d over %d ranks: %zu elements, expected %zu", part, parts, j->dp, once, held);
}

Test(param_share, shares_of_a_packed_transposed_parameter_are_each_element_once)
{
    static const size_t shape[2] = {5, 24}, block[3] = {8, 8, 8};
    for (int dp = 1; dp <= 9; dp++) {
        for (int part = 0; part < 2; part++) {
            job j = {.transposed = true, .dp = dp};
            cr_assert_ok(ar_layout_packed(&j.layout, 2, shape, 1, block, 3, part, 2));
            expect_once(&j, 2, part, 60);
        }
    }
}

Test(param_share, shares_of_columns_rows_and_vectors_are_each_element_once)
{
    static const size_t shape[2] = {8, 12}, length = 10;
    for (int dp = 1; dp <= 11; dp += 2) {
        for (int part = 0; part < 3; part++) {
            job columns = {.dp = dp}, rows = {.dp = dp}, vector = {.dp = dp};
            cr_assert_ok(ar_layout_shard(&columns.layout, 2, shape, 1, part, 3));
            cr_assert_ok(ar_layout_shard_uneven(&rows.layout, 2, shape, 0, part, 3));
            cr_assert_ok(ar_layout_replicate(&vector.layout, 1, &length, 0, 1));
            expect_once(&columns, 3, part, 32);
            expect_once(&rows, 3, part, part < 2 ? 36 : 24);
            expect_once(&vector, 1, 0, 10);
        }
    }
}

Test(param_share, a_part_that_holds_nothing_has_no_share)
{
    static const size_t shape[2] = {2, 3};
    job j = {.dp = 2};
    cr_assert_ok(ar_layout_shard_uneven(&j.layout, 2, shape, 0, 3, 4));
    expect_once(&j, 4, 3, 0);
}

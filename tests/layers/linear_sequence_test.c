/* SPDX-License-Identifier: Apache-2.0 */
/* The column- and row-parallel layers with sequence parallelism: against the same layer without ranks. */
#include "ref/layers/linear/chunks.h"
#include "tests/layers/linear_case.h"

/* Each layer, with its option and without, 1 and 3 samples of 12 positions, 2-D and 3-D, with and without a bias, on 1
 * to 4 ranks, the gathered input kept and not. */
static void sweep(style layer, bool flag)
{
    for (int variant = 0; variant < 4; variant++) {
        const size_t batch = variant & 1 ? 3 : 1;
        SCOPED(plain_linear_fini) plain_linear f = given(batch, 12, variant & 2);
        plain_linear_exact(&f);
        for (int i = 0; i < 8; i++) {
            linear_job j = {.c = {layer, flag, 3, i % 4 + 1, AR_NUMERICS_EXACT, true, i >= 4}, .full = &f};
            run_linear(&j);
            expect_plain_bits(&j);
            linear_job_fini(&j);
            if (batch > 1)
                continue;
            j.c.ndim = 2;
            run_linear(&j);
            expect_plain_bits(&j);
            linear_job_fini(&j);
        }
    }
}

Test(linear_sequence, every_layer_has_the_plain_layers_bits_with_its_option_and_without)
{
    for (int variant = 0; variant < 4; variant++)
        sweep(variant & 1 ? ROW : COLUMN, variant & 2);
}

/* 5 positions a rank in 2 to 5 chunks, of which the last is often shorter, and in more than there are positions: 1 and 3
 * samples, 2-D and 3-D, on 2 to 4 ranks, the gathered input kept and not. */
static void sweep_chunks(style layer, bool flag)
{
    static const int chunks[] = {2, 3, 4, 5, 9};
    for (int i = 0; i < 6; i++) {
        const int ranks = 2 + i / 2;
        SCOPED(plain_linear_fini) plain_linear f = given(i % 2 ? 3 : 1, 5 * (size_t)ranks, i % 3 > 0);
        plain_linear_exact(&f);
        for (int k = 0; k < 5; k++) {
            const bool keep = (i + k) % 2;
            SCOPED(linear_job_fini)
            linear_job j = {.c = {layer, flag, 3, ranks, AR_NUMERICS_EXACT, true, keep, chunks[k]}, .full = &f};
            j.c.ndim = f.n.samples == 1 && k % 2 ? 2 : 3;
            run_linear(&j);
            expect_plain_bits(&j);
        }
    }
}

Test(linear_sequence, chunks_change_no_bit)
{
    for (int variant = 0; variant < 4; variant++)
        sweep_chunks(variant & 1 ? ROW : COLUMN, variant & 2);
}

/* At once, and in chunks: the sums are of the same terms, so the bound is the same. */
Test(linear_sequence, native_layers_stay_within_the_rounding_error_bound)
{
    for (int variant = 0; variant < 16; variant++) {
        plain_linear f = given(variant & 4 ? 3 : 1, 12, true);
        for (int ranks = 1; ranks <= 4; ranks++) {
            const int overlap = variant & 8 ? 1 + ranks : 1;
            SCOPED(linear_job_fini)
            linear_job j = {
                .c = {variant & 1 ? ROW : COLUMN, variant & 2, 3, ranks, AR_NUMERICS_NATIVE, true, false, overlap},
                .full = &f};
            run_linear(&j);
            expect_within_bounds(&j);
        }
    }
}

/* Of three positions nothing is shared out over two ranks. */
static ar_status refused(ar_ctx *ctx, void *user)
{
    const ar_linear_options o = {.input_is_sharded = true};
    const size_t shape[3] = {1, 3, 2};
    const float zeros[6] = {0};
    OWNED(ar_module_destroy) ar_module *m = NULL;
    ar_tensor x, y;
    (void)user;
    AR_TRY(ar_row_linear_create(&m, ctx, "l", 4, 2, &o));
    AR_TRY(ar_module_fresh(m, ctx, 1));
    AR_TRY(rank_upload(ctx, &x, 3, shape, zeros));
    return ar_module_forward(m, ctx, NULL, &y, &x, NULL);
}

Test(linear_sequence, positions_that_do_not_divide_are_refused)
{
    const ar_run o = {.parallel = {.tp = 2, .sp = true}};
    cr_assert_refused(rank_run(&o, refused, NULL), AR_ERR_INDIVISIBLE, "3 positions");
}

/* All chunks of an all-gather; rank 1 gives up while one is under way. */
static ar_status gives_up(ar_ctx *ctx, void *user)
{
    const size_t shape[3] = {2, 6, 3};
    const float zeros[36] = {0};
    ari_gathering *g = NULL;
    ar_tensor x, rows;
    (void)user;
    AR_TRY(rank_upload(ctx, &x, 3, shape, zeros));
    const ari_chunks c = ari_chunks_of(ctx, &x, true);
    AR_TRY(ari_gather_begin(ctx, &g, &x, &c, "x"));
    for (size_t i = 0; i < c.n; i++) {
        AR_TRY(ari_gather_chunk(ctx, g, i, &rows));
        if (rank_of(ctx) == 1 && i == 1)
            return ar_error_set(AR_ERR_DATA, "rank 1 gives up in chunk %zu of %zu", i, c.n);
    }
    ari_gather_end(ctx, g);
    return AR_OK;
}

/* Its memory outlives what is under way, nobody waits for ever, and the first message is the run's. */
Test(linear_sequence, a_rank_that_fails_with_a_chunk_under_way_ends_all)
{
    for (uint64_t schedule = 0; schedule < 12; schedule++) {
        const ar_run o = {.parallel = {.tp = 3, .sp = true, .overlap = 3},
                          .sim = {.explore = schedule != 0, .schedule_seed = schedule}};
        cr_assert_eq(rank_run(&o, gives_up, NULL), AR_ERR_DATA, "schedule %d: %s", (int)schedule, ar_error_message());
        cr_assert_not_null(strstr(ar_error_message(), "rank 1 gives up in chunk 1 of 3"), "%s", ar_error_message());
    }
}

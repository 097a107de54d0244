/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/core/tensor_private.h"
#include "tests/support/test.h"
#include "verify/grads/grads.h"

/* Part `part` of two of a vector of four, as rank `part` taps it. */
static void tap_half(ari_gatherer *g, int part, float *values)
{
    const size_t full = 4, half = 2;
    ar_tensor t;
    ar_layout layout;
    cr_assert_ok(ar_tensor_view(&t, AR_F32, 1, &half, (ar_buf){values}));
    cr_assert_ok(ar_layout_shard(&layout, 1, &full, 0, part, 2));
    const ar_tap_event event = {.name = "w", .pass = 'g', .local = &t, .layout = &layout};
    cr_assert_ok(ari_gather_tap(g, &event));
}

/* Half of it is there; as many elements as there are, but one half twice. */
Test(gather, a_tensor_is_whole_when_each_part_was_reported_once)
{
    static const struct {
        int first, then;
        const char *says; /* at the end; NULL: it is whole */
    } rows[] = {{0, 1, NULL}, {0, 0, "2 of the 4 elements of w"}, {1, 1, "2 of the 4 elements of w"}};
    const size_t shape = 4;
    float halves[2][2] = {{1.0f, 2.0f}, {3.0f, 4.0f}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        SCOPED(ari_gatherer_fini) ari_gatherer g = {0};
        cr_assert_ok(ari_gather_want(&g, "w", 'g', "w", 1, &shape, 0));
        cr_assert_eq(ari_gather_check(&g), AR_ERR_INTERNAL, "nobody reported it");
        tap_half(&g, rows[i].first, halves[rows[i].first]);
        cr_assert_refused(ari_gather_check(&g), AR_ERR_INTERNAL, "2 of the 4 elements of w");
        tap_half(&g, rows[i].then, halves[rows[i].then]);
        cr_expect_eq(ari_gather_check(&g), rows[i].says ? AR_ERR_INTERNAL : AR_OK, "row %zu", i);
        if (!rows[i].says)
            cr_expect_eq(memcmp(g.list[0].full.values, halves, sizeof halves), 0);
        else
            tap_half(&g, 1 - rows[i].then, halves[1 - rows[i].then]);
        cr_expect(!rows[i].says || (ari_gather_check(&g) == AR_ERR_INTERNAL && error_says("more than once")), "row %zu",
                  i);
    }
}

/* Two micro-batches of one rank: samples 0 and 1 of two. */
Test(gather, samples_of_micro_batches_are_put_where_they_stand)
{
    const size_t full[3] = {2, 1, 3}, local[3] = {1, 1, 3};
    float values[2][3] = {{1.0f, 2.0f, 3.0f}, {4.0f, 5.0f, 6.0f}};
    SCOPED(ari_gatherer_fini) ari_gatherer g = {0};
    cr_assert_ok(ari_gather_want(&g, "x", 'f', "x", 3, full, 0));
    for (size_t sample = 2; sample-- > 0;) {
        ar_tensor t;
        ar_layout layout;
        cr_assert_ok(ar_tensor_view(&t, AR_F32, 3, local, (ar_buf){values[sample]}));
        cr_assert_ok(ari_layout_replicate(&layout, 3, full, 0, 1));
        layout.box[0].global[0] = sample;
        layout.box[0].extent[0] = 1;
        const ar_tap_event event = {.name = "x", .pass = 'f', .local = &t, .layout = &layout};
        cr_assert_ok(ari_gather_tap(&g, &event));
    }
    cr_assert_ok(ari_gather_check(&g));
    cr_assert_eq(memcmp(g.list[0].full.values, values, sizeof values), 0);
}

/* SPDX-License-Identifier: Apache-2.0 */
/* What a batch says of each of its places: document, position, target. */
#include "anyrank/batch.h"

#include "ref/layers/batch_private.h"
#include "tests/support/test.h"

static const int64_t ids[] = {10, 11, 12, 13, 14, 15, /**/ 20, 21, 22, 23, 24, 25};
static const int32_t documents[] = {0, 0, 0, 1, 2, 2, /**/ 0, 0, 0, 0, 0, 0};

Test(batch, places_of_a_row_with_documents)
{
    static const size_t first[] = {0, 0, 0, 3, 4, 4}, end[] = {3, 3, 3, 4, 6, 6};
    static const int64_t target[] = {11, 12, AR_IGNORE_INDEX, AR_IGNORE_INDEX, 15, AR_IGNORE_INDEX};
    const ar_batch b = {.batch = 2, .seq = 6, .input_ids = ids, .documents = documents};
    cr_assert_ok(ari_batch_check(&b, 1));
    for (size_t at = 0; at < 6; at++) {
        size_t from = 99, to = 99;
        ari_batch_document(&b, 0, at, &from, &to);
        cr_expect(from == first[at] && to == end[at], "place %zu: [%zu, %zu)", at, from, to);
        cr_expect_eq(ari_batch_position(&b, 0, at), at - first[at], "place %zu", at);
        cr_expect_eq(ari_batch_target(&b, 0, at), target[at], "place %zu", at);
        ari_batch_document(&b, 1, at, &from, &to);
        cr_expect(from == 0 && to == 6, "row 1, place %zu: [%zu, %zu)", at, from, to);
    }
    cr_expect_eq(ari_batch_targets(&b), 3U + 5U);
    const ar_batch crossing = {.batch = 2, .seq = 6, .input_ids = ids, .documents = documents, .targets_cross = true};
    cr_expect_eq(ari_batch_target(&crossing, 0, 2), 13);
    cr_expect_eq(ari_batch_targets(&crossing), 5U + 5U);
}

Test(batch, without_documents_a_row_is_one)
{
    static const int64_t labels[] = {1, -100, 3, 4, 5, 6, /**/ 7, 8, 9, -100, -100, 2};
    const ar_batch b = {.batch = 2, .seq = 6, .input_ids = ids, .labels = labels};
    size_t from = 99, to = 99;
    ari_batch_document(&b, 1, 4, &from, &to);
    cr_expect(from == 0 && to == 6);
    cr_expect_eq(ari_batch_position(&b, 1, 4), 4U);
    cr_expect_eq(ari_batch_target(&b, 0, 1), 3);
    cr_expect_eq(ari_batch_target(&b, 0, 5), AR_IGNORE_INDEX, "no row predicts the next one's first token");
    cr_expect_eq(ari_batch_targets(&b), 4U + 3U);
}

Test(batch, given_positions_are_taken)
{
    static const int64_t positions[] = {5, 6, 7, 0, 0, 1, /**/ 0, 1, 2, 3, 4, 8};
    const ar_batch b = {.batch = 2, .seq = 6, .input_ids = ids, .position_ids = positions, .documents = documents};
    for (size_t i = 0; i < 12; i++)
        cr_expect_eq(ari_batch_position(&b, i / 6, i % 6), (size_t)positions[i]);
    cr_expect_ok(ari_batch_check(&b, 9));
    cr_expect_refused(ari_batch_check(&b, 8), AR_ERR_DATA, "position_ids[1, 5] is 8, the model has 8 positions");
}

Test(batch, masks_that_are_not_for_these_rows_are_refused)
{
    static const float zeros[3 * 2 * 2], nan[] = {0, 0, 0, NAN}, far[] = {0, INFINITY, 0, 0},
                                         near[] = {0, -INFINITY, 0, 0};
    ar_batch b = {.batch = 4, .seq = 2, .input_ids = ids, .additive_mask = zeros, .mask_batch = 3, .mask_heads = 1};
    cr_expect_refused(ari_batch_check(&b, 9), AR_ERR_SHAPE, "additive_mask is [3, 1, s, s], expected [1 or 4, 1 or");
    b.mask_batch = 1;
    cr_expect_ok(ari_batch_check(&b, 9));
    b.additive_mask = near;
    cr_expect_ok(ari_batch_check(&b, 9));
    b.additive_mask = nan;
    cr_expect_refused(ari_batch_check(&b, 9), AR_ERR_DATA, "additive_mask[0, 0, 1, 1] is nan");
    b.additive_mask = far;
    cr_expect_refused(ari_batch_check(&b, 9), AR_ERR_DATA, "additive_mask[0, 0, 0, 1] is inf");
    b.mask_heads = 0;
    cr_expect_refused(ari_batch_check(&b, 9), AR_ERR_SHAPE, "[1, 0, s, s]");
}

Test(batch, documents_that_are_not_numbered_in_their_order_are_refused)
{
    static const struct {
        int32_t documents[4];
        const char *says;
    } cases[] = {{{0, 0, 0, -1}, "documents[1, 1] is -1 after 0"},
                 {{0, 0, -1, 0}, "documents[1, 0] is -1"},
                 {{0, 2, 0, 0}, "documents[0, 1] is 2 after 0"},
                 {{0, 1, 2, 2}, "documents[1, 0] is 2"},
                 {{0, INT32_MIN, 0, 0}, "documents[0, 1] is -2"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const ar_batch b = {.batch = 2, .seq = 2, .input_ids = ids, .documents = cases[i].documents};
        cr_expect_refused(ari_batch_check(&b, 9), AR_ERR_DATA, cases[i].says);
    }
}

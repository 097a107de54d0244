/* SPDX-License-Identifier: Apache-2.0 */
/* The boxes of a share of a parameter, a run of its matrix's elements. What lies where in memory and in the Hugging Face
 * shape is held by train/zero_units_test.c. */
#include "ref/layers/parts.h"
#include "tests/support/test.h"

/* Walks the boxes in their order; the elements met must be start, start + 1, .. */
static size_t walk(const ari_run_box *b, int ndim, const size_t *shape, size_t expected)
{
    for (size_t i = 0; i < ari_volume(b->extent, ndim); i++, expected++) {
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
        const size_t all = ari_volume(shapes[s], dims[s]);
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

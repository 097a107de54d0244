/* SPDX-License-Identifier: Apache-2.0 */
/* Tensors of another shape: what their values say of it. */
#include "tests/verify/two_dumps.h"

/* The last tensor has this shape in the other dump, of which the reference has element at(i). */
static void put_shaped(made *m, const char *name, size_t rows, size_t cols, size_t times, size_t (*at)(size_t i))
{
    const float *a = put(m, name, 2, rows, cols, 0);
    const size_t count = rows * cols * times;
    float *b = malloc(count * sizeof *b);
    cr_assert_not_null(b);
    for (size_t i = 0; i < count; i++)
        b[i] = a[at(i)];
    free(other_of(m));
    m->tensor[1][m->n - 1].data = b;
}

enum { ROWS = 8, COLS = 6, PARTS = 4 };

static size_t beside(size_t i)
{
    const size_t row = i / (COLS * PARTS), part = i / COLS % PARTS;
    return (part * (ROWS / PARTS) + row) * COLS + i % COLS;
}

Test(other_shape, parts_along_another_dimension_are_told)
{
    made m = {.n = 0};
    put_shaped(&m, "wpe:fwd", ROWS, COLS, 1, beside);
    m.tensor[1][0].shape[0] = ROWS / PARTS;
    m.tensor[1][0].shape[1] = COLS * PARTS;
    expect_first(&m, (ar_verify_options){.rule = AR_VERIFY_BITS}, "none", "it is dimension 0 of this tensor, not 1", 0);
}

static size_t again(size_t i)
{
    return i % (ROWS * COLS);
}

Test(other_shape, the_whole_batch_on_every_rank_is_told)
{
    made m = {.n = 0};
    put_shaped(&m, "x:fwd", ROWS, COLS, 2, again);
    m.tensor[1][0].shape[0] = 2 * ROWS;
    expect_first(&m, (ar_verify_options){.rule = AR_VERIFY_BITS}, "same_samples", "worked on the whole batch", 0);
    put_shaped(&m, "x:grad", ROWS, COLS, 2, again); /* of which ranks hold copies */
    m.tensor[1][0].shape[0] = 2 * ROWS;
    expect_first(&m, (ar_verify_options){.rule = AR_VERIFY_BITS}, "none", "parts copied", 1);
}

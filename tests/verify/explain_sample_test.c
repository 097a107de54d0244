/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/diagnose/case.h"

#include "dump/folder.h"
#include "verify/diagnose/diagnose.h"

TestSuite(explain_sample, .init = folder_begin, .fini = folder_end);

static size_t take(float *out, const ar_dump_tensor *t, size_t most)
{
    size_t step[AR_ST_MAX_DIMS];
    ari_arena arena = {NULL};
    ari_sample s;
    ari_sample_steps(step, t, most);
    cr_assert_ok(ari_sample_init(&s, t, step, &arena));
    cr_assert_ok(ar_dump_read_f32(&s.tensor, 0, s.tensor.count, out));
    ari_arena_end(&arena, NULL);
    return s.tensor.count;
}

/* 4 by 6, of which two ranks have 3 columns each: of every second index, the second rank's begin with column 4. */
Test(explain_sample, takes_every_second_index_of_what_ranks_hold)
{
    const size_t half[] = {4, 3};
    const float left[] = {0, 1, 2, 10, 11, 12, 20, 21, 22, 30, 31, 32};
    const float right[] = {3, 4, 5, 13, 14, 15, 23, 24, 25, 33, 34, 35};
    const float expected[] = {0, 2, 4, 20, 22, 24};
    float got[24];
    put_tensor("rank-0.safetensors", "w", 2, half, left, "{\"w\":{\"saved_offsets\":[0,0]}}", NULL);
    put_tensor("rank-1.safetensors", "w", 2, half, right, "{\"w\":{\"saved_offsets\":[0,3]}}", NULL);
    OWNED(ar_dump_close) ar_dump *d = NULL;
    cr_assert_ok(ar_dump_open(&d, folder, NULL));
    cr_expect_eq(take(got, ar_dump_find(d, "w"), 24), 24);
    cr_expect_eq(take(got, ar_dump_find(d, "w"), 23), 12); /* the larger dimension first */
    cr_assert_eq(take(got, ar_dump_find(d, "w"), 7), 6);
    cr_expect_eq(memcmp(got, expected, sizeof expected), 0);
}

Test(explain_sample, thins_dimensions_of_equal_size_alike)
{
    const ar_dump_tensor square = {.name = "w", .ndim = 2, .shape = {64, 64}, .count = 4096};
    size_t step[AR_ST_MAX_DIMS];
    ari_sample_steps(step, &square, 2048);
    cr_expect_eq(step[0], 2);
    cr_expect_eq(step[1], 2);
}

enum { ROWS = 2304, COLS = 2048 };

/* The last quarter of the rows is zero: far from where a stretch around the first difference would end. */
static void expect_told(const char *part, size_t from, size_t to)
{
    const size_t shape[] = {ROWS, COLS};
    OWNED(free) float *x = malloc(ROWS * COLS * sizeof *x);
    OWNED(ar_dump_close) ar_dump *a = NULL, *b = NULL;
    ar_verify_row row = {.name = "w", .pass = 'g', .first.index = from};
    const ari_explain_case none = {0};
    cr_assert_not_null(x);
    for (size_t i = 0; i < (size_t)ROWS * COLS; i++)
        x[i] = (float)(i * 2654435761u % 16777213u) / 8388608.0f - 1.0f;
    cr_assert_ok(ar_dump_open(&a, put_tensor("a.safetensors", "w", 2, shape, x, NULL, NULL), NULL));
    for (size_t i = from; i < to; i++)
        x[i] = 0.0f;
    cr_assert_ok(ar_dump_open(&b, put_tensor("b.safetensors", "w", 2, shape, x, NULL, NULL), NULL));
    cr_assert_ok(ari_explain(&row, ar_dump_at(a, 0), ar_dump_at(b, 0), &none));
    cr_expect(strstr(row.pattern, part), "%s: %s", row.pattern, row.hint);
}

Test(explain_sample, shows_a_shard_of_a_large_tensor)
{
    expect_told("shard 3 of 4 of the rows", (size_t)ROWS / 4 * 3 * COLS, (size_t)ROWS * COLS);
}

Test(explain_sample, leaves_a_single_element_of_a_large_tensor_to_the_stretch)
{
    expect_told("1 of 1048576 elements", (size_t)1001 * COLS + 33, (size_t)1001 * COLS + 34);
}

/* SPDX-License-Identifier: Apache-2.0 */
/* What stands between strided matrices and CBLAS, over a CBLAS in plain loops that refuses what the standard forbids, so
 * that a build with BLIS tests it too. */

/* The library may have these names. */
#define cblas_sgemm plain_sgemm
#define cblas_dgemm plain_dgemm
#define ari_blas_sgemm tested_sgemm
#define ari_blas_dgemm tested_dgemm
#define LONGEST ((size_t)100)
#include "ref/cpu/blas/cblas.c"
#include "tests/support/test.h"

/* Place of element (i, j) of an operand [rows, cols], and whether its leading dimension holds a line. */
static size_t place(int order, int transpose, int rows, int cols, int ld, int i, int j)
{
    const bool by_rows = (order == ROW_MAJOR) == (transpose == AS_IS);
    cr_assert(order == ROW_MAJOR || order == COL_MAJOR);
    cr_assert(transpose == AS_IS || transpose == TRANSPOSED);
    cr_assert(ld >= 1 && ld >= (by_rows ? cols : rows), "ld %d of %d x %d", ld, rows, cols);
    return by_rows ? (size_t)i * (size_t)ld + (size_t)j : (size_t)j * (size_t)ld + (size_t)i;
}

#define PLAIN(name, type)                                                                                            \
    name(int order, int ta, int tb, int m, int n, int k, type alpha, const type *a, int lda, const type *b, int ldb, \
         type beta, type *c, int ldc)                                                                                \
    {                                                                                                                \
        cr_assert(alpha == 1 && (beta == 0 || beta == 1) && m > 0 && n > 0 && k > 0);                                \
        for (int i = 0; i < m; i++)                                                                                  \
            for (int j = 0; j < n; j++) {                                                                            \
                type *to = c + place(order, AS_IS, m, n, ldc, i, j), sum = beta == 0 ? 0 : *to;                      \
                for (int t = 0; t < k; t++)                                                                          \
                    sum += a[place(order, ta, m, k, lda, i, t)] * b[place(order, tb, k, n, ldb, t, j)];              \
                *to = sum;                                                                                           \
            }                                                                                                        \
    }
PLAIN(void plain_sgemm, float)
PLAIN(void plain_dgemm, double)

/* How a matrix can lie in memory: by rows, by columns, each with a gap between lines, with a gap between all elements,
 * backwards; an operand's rows also all in one place, or overlapping. */
enum { RESULTS = 6, LAYOUTS = 8 };
static ari_blas_view view(size_t layout, size_t rows, size_t cols)
{
    const ptrdiff_t r = (ptrdiff_t)rows, c = (ptrdiff_t)cols;
    const ptrdiff_t strides[LAYOUTS][2] = {{c, 1},         {1, r},  {c + 3, 1}, {1, r + 2},
                                           {2 * c + 1, 2}, {-c, 1}, {0, 1},     {1, 1}};
    return (ari_blas_view){rows, cols, strides[layout][0], strides[layout][1]};
}

#define ROOM ((size_t)2 * 130 * 130) /* elements on either side of a matrix's first one */

/* Small integers: every sum is exact. */
static double value(size_t i, size_t j, size_t which)
{
    return (double)((7 * i + 3 * j + which) % 11) - 5.0;
}

#define CASE(name, type, gemm)                                                                                        \
    static void name(size_t m, size_t n, size_t k, size_t layouts, bool add)                                          \
    {                                                                                                                 \
        type *memory = malloc(6 * ROOM * sizeof *memory), *at[3];                                                     \
        const ari_blas_view v[3] = {view(layouts % LAYOUTS % RESULTS, m, n), view(layouts / LAYOUTS % LAYOUTS, m, k), \
                                    view(layouts / LAYOUTS / LAYOUTS % LAYOUTS, k, n)};                               \
        for (size_t i = 0; i < 6 * ROOM; i++)                                                                         \
            memory[i] = NAN; /* what lies between elements, or is overwritten, has no part in a sum */                \
        for (size_t w = 0; w < 3; w++) {                                                                              \
            at[w] = memory + (2 * w + 1) * ROOM;                                                                      \
            for (size_t i = 0; i < v[w].rows && (w > 0 || add); i++)                                                  \
                for (size_t j = 0; j < v[w].cols; j++)                                                                \
                    at[w][(ptrdiff_t)i * v[w].row_stride + (ptrdiff_t)j * v[w].col_stride] = (type)value(i, j, w);    \
        }                                                                                                             \
        gemm(at[0], v[0], at[1], v[1], at[2], v[2], add);                                                             \
        size_t numbers = 0;                                                                                           \
        for (size_t i = 0; i < 2 * ROOM; i++)                                                                         \
            numbers += isnan(memory[i]) ? 0 : 1;                                                                      \
        cr_assert_eq(numbers, m *n, "%zu elements written, expected %zu", numbers, m *n);                             \
        for (size_t i = 0; i < m; i++)                                                                                \
            for (size_t j = 0; j < n; j++) {                                                                          \
                double want = add ? value(i, j, 0) : 0.0;                                                             \
                for (size_t t = 0; t < k; t++)                                                                        \
                    want += (double)at[1][(ptrdiff_t)i * v[1].row_stride + (ptrdiff_t)t * v[1].col_stride] *          \
                            (double)at[2][(ptrdiff_t)t * v[2].row_stride + (ptrdiff_t)j * v[2].col_stride];           \
                const double got = (double)at[0][(ptrdiff_t)i * v[0].row_stride + (ptrdiff_t)j * v[0].col_stride];    \
                cr_assert(got == want, "c[%zu,%zu] of %zux%zux%zu, layouts %zu: %g, expected %g", i, j, m, n, k,      \
                          layouts, got, want);                                                                        \
            }                                                                                                         \
        free(memory);                                                                                                 \
    }
CASE(check_sgemm, float, tested_sgemm)
CASE(check_dgemm, double, tested_dgemm)

static const struct shape {
    size_t m, n, k;
} shapes[] = {{1, 1, 1}, {1, 5, 3}, {5, 1, 3}, {4, 6, 1}, {3, 4, 0}, {0, 4, 3}, {4, 0, 3}, {9, 7, 8}};

Test(cblas, takes_matrices_of_any_strides, .timeout = 300)
{
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
        for (size_t layouts = 0; layouts < LAYOUTS * LAYOUTS * LAYOUTS; layouts++) {
            check_sgemm(shapes[s].m, shapes[s].n, shapes[s].k, layouts, layouts % 5 < 2);
            check_dgemm(shapes[s].m, shapes[s].n, shapes[s].k, layouts, layouts % 5 > 2);
        }
}

Test(cblas, computes_in_pieces_what_is_copied_or_longer_than_a_call_takes, .timeout = 300)
{
    const struct shape large[] = {{65, 130, 64}, {130, 3, 129}, {101, 100, 103}};
    const size_t layouts[] = {0, 1, 4, LAYOUTS * 4, LAYOUTS * LAYOUTS * 5, LAYOUTS * LAYOUTS + LAYOUTS + 4};
    for (size_t s = 0; s < 3; s++)
        for (size_t l = 0; l < sizeof layouts / sizeof layouts[0]; l++) {
            check_sgemm(large[s].m, large[s].n, large[s].k, layouts[l], l % 2);
            check_dgemm(large[s].m, large[s].n, large[s].k, layouts[l], l % 2 == 0);
        }
}

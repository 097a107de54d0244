/* SPDX-License-Identifier: Apache-2.0 */
/* -DANYRANK_BLAS=cblas: by CBLAS with 32-bit integers. */
#include <limits.h>
#include <stdint.h>
#include <string.h>

#include "ref/core/size.h"
#include "ref/cpu/blas/blas.h"

/* Declared here and not included from cblas.h, which on Debian may belong to another library. */
enum { ROW_MAJOR = 101, COL_MAJOR = 102, AS_IS = 111, TRANSPOSED = 112 };
void cblas_sgemm(int order, int transpose_a, int transpose_b, int m, int n, int k, float alpha, const float *a, int lda,
                 const float *b, int ldb, float beta, float *c, int ldc);
void cblas_dgemm(int order, int transpose_a, int transpose_b, int m, int n, int k, double alpha, const double *a,
                 int lda, const double *b, int ldb, double beta, double *c, int ldc);

/* Elements are `width` bytes. What is an operand is only read. */
typedef struct matrix {
    char *data;
    ari_blas_view v;
} matrix;

static matrix operand(const void *data, ari_blas_view v)
{
    return (matrix){(char *)(uintptr_t)data, v};
}

/* --- what CBLAS takes --------------------------------------------------------------------------------------------- */

/* Lines that are ld elements apart: rows (ROW_MAJOR) or columns (COL_MAJOR). order 0: neither. */
typedef struct stored {
    int order, ld;
} stored;

/* The stride of an extent of 0 or 1 says nothing. */
static bool is_stored(int *ld, size_t lines, size_t length, ptrdiff_t line_stride, ptrdiff_t stride)
{
    const ptrdiff_t spacing = lines > 1 ? line_stride : length > 0 ? (ptrdiff_t)length : 1;
    if ((length > 1 && stride != 1) || spacing < 1 || (size_t)spacing < length || spacing > INT_MAX)
        return false;
    *ld = (int)spacing;
    return true;
}

static stored stored_of(const matrix *m)
{
    stored s = {0};
    if (is_stored(&s.ld, m->v.rows, m->v.cols, m->v.row_stride, m->v.col_stride))
        s.order = ROW_MAJOR;
    else if (is_stored(&s.ld, m->v.cols, m->v.rows, m->v.col_stride, m->v.row_stride))
        s.order = COL_MAJOR;
    return s;
}

static int transposition(stored factor, stored c)
{
    return factor.order == c.order ? AS_IS : TRANSPOSED;
}

typedef void (*call)(const matrix *c, const matrix *a, const matrix *b, bool add);

#define CALL(name, type, cblas_gemm)                                                                                   \
    static void name(const matrix *c, const matrix *a, const matrix *b, bool add)                                      \
    {                                                                                                                  \
        const stored sc = stored_of(c), sa = stored_of(a), sb = stored_of(b);                                          \
        cblas_gemm(sc.order, transposition(sa, sc), transposition(sb, sc), (int)c->v.rows, (int)c->v.cols,             \
                   (int)a->v.cols, 1, (const type *)(const void *)a->data, sa.ld, (const type *)(const void *)b->data, \
                   sb.ld, (type)add, (type *)(void *)c->data, sc.ld);                                                  \
    }
CALL(call_sgemm, float, cblas_sgemm)
CALL(call_dgemm, double, cblas_dgemm)

/* --- any strides and extents -------------------------------------------------------------------------------------- */

/* Extents of a piece: one whose sizes fit a call's integers (less in a test), and one whose matrices are copied to the
 * stack, which no product of the layers needs. */
#if !defined(LONGEST)
#define LONGEST ((size_t)1 << 30)
#endif
#define COPIED ((size_t)64)

static char *element(const matrix *m, size_t row, size_t col, size_t width)
{
    return m->data + ((ptrdiff_t)row * m->v.row_stride + (ptrdiff_t)col * m->v.col_stride) * (ptrdiff_t)width;
}

static void copy_matrix(const matrix *dst, const matrix *src, size_t width)
{
    for (size_t i = 0; i < dst->v.rows; i++)
        for (size_t j = 0; j < dst->v.cols; j++)
            memcpy(element(dst, i, j, width), element(src, i, j, width), width);
}

static void zero_matrix(const matrix *m, size_t width)
{
    for (size_t i = 0; i < m->v.rows; i++)
        for (size_t j = 0; j < m->v.cols; j++)
            memset(element(m, i, j, width), 0, width);
}

/* Returns the piece from this row and column on, with at most `max_extent` rows and columns. */
static matrix piece_of(const matrix *m, size_t row, size_t col, size_t max_extent, size_t width)
{
    const ari_blas_view v = {ari_smaller(m->v.rows - row, max_extent), ari_smaller(m->v.cols - col, max_extent),
                             m->v.row_stride, m->v.col_stride};
    return (matrix){element(m, row, col, width), v};
}

/* Returns the piece itself if CBLAS accepts it, otherwise one of that shape in `room`. */
static matrix cblas_operand(const matrix *piece, char *scratch, bool with_values, size_t width)
{
    if (stored_of(piece).order)
        return *piece;
    const matrix t = {scratch, {piece->v.rows, piece->v.cols, (ptrdiff_t)piece->v.cols, 1}};
    if (with_values)
        copy_matrix(&t, piece, width);
    return t;
}

static void multiply_piece(const matrix *c, const matrix *a, const matrix *b, bool add, size_t width, call gemm)
{
    _Alignas(64) char rooms[3][COPIED * COPIED * sizeof(double)];
    const matrix result = cblas_operand(c, rooms[0], add, width);
    const matrix left = cblas_operand(a, rooms[1], true, width), right = cblas_operand(b, rooms[2], true, width);
    gemm(&result, &left, &right, add);
    if (result.data != c->data)
        copy_matrix(c, &result, width);
}

static void multiply_pieces(const matrix *c, const matrix *a, const matrix *b, bool add, size_t width, call gemm)
{
    const bool direct = stored_of(c).order && stored_of(a).order && stored_of(b).order;
    const size_t max_extent = direct ? LONGEST : COPIED, terms = a->v.cols;
    if (terms == 0 && !add)
        zero_matrix(c, width);
    for (size_t i = 0; i < c->v.rows; i += max_extent)
        for (size_t j = 0; j < c->v.cols; j += max_extent)
            for (size_t k = 0; k < terms; k += max_extent) {
                const matrix result = piece_of(c, i, j, max_extent, width);
                const matrix a_piece = piece_of(a, i, k, max_extent, width),
                             b_piece = piece_of(b, k, j, max_extent, width);
                multiply_piece(&result, &a_piece, &b_piece, add || k > 0, width, gemm);
            }
}

#define GEMM(function, type, gemm)                                                                                  \
    function(type *c, ari_blas_view cv, const type *a, ari_blas_view av, const type *b, ari_blas_view bv, bool add) \
    {                                                                                                               \
        const matrix result = operand(c, cv), left = operand(a, av), right = operand(b, bv);                        \
        multiply_pieces(&result, &left, &right, add, sizeof(type), gemm);                                           \
    }
GEMM(void ari_blas_sgemm, float, call_sgemm)
GEMM(void ari_blas_dgemm, double, call_dgemm)

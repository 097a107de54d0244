/* SPDX-License-Identifier: Apache-2.0 */
/* What BLIS does: the native product, the binary64 products of exact ones, and which of its kernels do it. */
#include <blis.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/size.h"
#include "ref/cpu/device.h"
#include "ref/cpu/storage.h"

/* BLIS 0.9.0 does not know processors younger than itself and falls back to kernels that are several times slower; it
 * reads BLIS_ARCH_TYPE once, when it is first used, as a number of an enumeration that changes from version to version
 * (0 = skx, 3 = haswell in 0.9.0). A number that does not fit the processor ends in an illegal instruction, so the
 * choice is by CPUID, and only for the version whose numbers these are. */
#define BLIS_KNOWN_VERSION "0.9.0"
#define BLIS_ARCH_VARIABLE "BLIS_ARCH_TYPE"

typedef struct kernel_choice {
    const char *number; /* value of BLIS_ARCH_TYPE; NULL: leave it to BLIS */
    const char *why;
} kernel_choice;

static kernel_choice choose_kernels(void)
{
    if (strcmp(bli_info_get_version_str(), BLIS_KNOWN_VERSION) != 0)
        return (kernel_choice){NULL, "BLIS's own choice: not version " BLIS_KNOWN_VERSION};
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl"))
        return (kernel_choice){"0", "AVX-512 F, DQ, BW, VL by CPUID"};
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return (kernel_choice){"3", "AVX2 and FMA by CPUID"};
    return (kernel_choice){NULL, "BLIS's own choice: neither AVX-512 nor AVX2 with FMA"};
#else
    return (kernel_choice){NULL, "BLIS's own choice"};
#endif
}

void ar_cpu_select_kernels(void)
{
    const kernel_choice choice = choose_kernels();
    if (choice.number)
        (void)setenv(BLIS_ARCH_VARIABLE, choice.number, 0); /* 0: what the user has set stays */
    bli_init();
}

/* BLIS's typed interface takes pointers to non-const operands that it does not write. */
static void *unconst(const void *p)
{
    return (void *)(uintptr_t)p;
}

/* By its expert interface: one thread is asked for with the call, not in the process-wide setting; and none of the
 * kernels for small matrices, which in 0.9.0 read past the end of an operand: of a row of A more than there is where
 * the terms are no multiple of 8, which crashes where no memory follows (github.com/flame/blis/issues/635 and 821,
 * mended later). */
#define GEMM(function, type, bli_gemm)                                                                              \
    function(type *c, ari_blis_view cv, const type *a, ari_blis_view av, const type *b, ari_blis_view bv, bool add) \
    {                                                                                                               \
        type one = 1, beta = add;                                                                                   \
        rntm_t r = BLIS_RNTM_INITIALIZER;                                                                           \
        bli_rntm_set_num_threads(1, &r);                                                                            \
        bli_rntm_disable_l3_sup(&r);                                                                                \
        bli_gemm(BLIS_NO_TRANSPOSE, BLIS_NO_TRANSPOSE, (dim_t)cv.rows, (dim_t)cv.cols, (dim_t)av.cols, &one,        \
                 unconst(a), av.row_stride, av.col_stride, unconst(b), bv.row_stride, bv.col_stride, &beta, c,      \
                 cv.row_stride, cv.col_stride, NULL, &r);                                                           \
    }
GEMM(static void blis_sgemm, float, bli_sgemm_ex)
GEMM(void ari_blis_dgemm, double, bli_dgemm_ex)

/* --- the native product ------------------------------------------------------------------------------------------- */

/* Parts of a cut dimension are multiples of this many rows or columns, which all of BLIS's register tiles divide or
 * nearly do. */
#define STEP ((size_t)48)

/* A matrix as BLIS takes it. */
static ari_blis_view blis_view(const ar_tensor *m)
{
    return (ari_blis_view){m->shape[0], m->shape[1], m->stride[0], m->stride[1]};
}

/* c (+)= a b^T of fp32 matrices. */
static void multiply(const ar_tensor *c, const ar_tensor *a, const ar_tensor *b, bool add)
{
    const ar_tensor columns = ar_tensor_transposed(b);
    blis_sgemm(c->data.ptr, blis_view(c), a->data.ptr, blis_view(a), columns.data.ptr, blis_view(&columns), add);
}

/* --- of bf16 numbers: pieces of the matrices are widened, and those of c rounded when all their terms are there ---- */

/* Rows, columns and terms of a piece: each number is widened once for 512 products, and three pieces fit 3 MiB. */
#define PIECE ((size_t)512)

static size_t at_most_piece(size_t n)
{
    return n < PIECE ? n : PIECE;
}

/* The rows from `row` and the columns from `col` on, as many as a piece has. */
static ar_tensor piece_of(const ar_tensor *m, size_t row, size_t col)
{
    const ar_tensor rows = ar_tensor_slice(m, 0, row, at_most_piece(m->shape[0] - row));
    return ar_tensor_slice(&rows, 1, col, at_most_piece(m->shape[1] - col));
}

/* The piece itself where it is fp32, else as many numbers from *room on, stored in the piece's order. */
static ar_tensor fp32_of(const ar_tensor *piece, float **room, bool with_values)
{
    if (piece->dtype != AR_BF16)
        return *piece;
    const bool turned = piece->stride[1] != 1 && piece->stride[0] == 1;
    ar_tensor wide = *piece;
    wide.dtype = AR_F32;
    wide.stride[0] = turned ? 1 : (ptrdiff_t)piece->shape[1];
    wide.stride[1] = turned ? (ptrdiff_t)piece->shape[0] : 1;
    wide.data.ptr = *room;
    *room += piece->shape[0] * piece->shape[1];
    if (with_values)
        ari_convert(&wide, piece);
    return wide;
}

/* Floats of room that a product needs. */
static size_t room_of(const ar_tensor *c, const ar_tensor *a, const ar_tensor *b)
{
    const size_t m = at_most_piece(c->shape[c->ndim - 2]), n = at_most_piece(c->shape[c->ndim - 1]);
    const size_t k = at_most_piece(a->shape[a->ndim - 1]);
    const bool any = c->dtype == AR_BF16 || a->dtype == AR_BF16 || b->dtype == AR_BF16;
    return any ? m * n + m * k + n * k + ARI_LINE : 0;
}

/* c (+)= a b^T. */
static void multiply_pieces(const ar_tensor *c, const ar_tensor *a, const ar_tensor *b, bool add, float *room)
{
    const size_t terms = a->shape[1];
    for (size_t row = 0; row < c->shape[0]; row += PIECE)
        for (size_t col = 0; col < c->shape[1]; col += PIECE) {
            float *free_room = room;
            const ar_tensor to = piece_of(c, row, col), sum = fp32_of(&to, &free_room, add);
            for (size_t k = 0; k == 0 || k < terms; k += PIECE) {
                float *rest = free_room;
                const ar_tensor left = piece_of(a, row, k), right = piece_of(b, col, k);
                const ar_tensor wide_left = fp32_of(&left, &rest, true), wide_right = fp32_of(&right, &rest, true);
                multiply(&sum, &wide_left, &wide_right, add || k > 0);
            }
            if (to.dtype == AR_BF16)
                ari_convert(&to, &sum);
        }
}

/* room: room_of floats; NULL where all of them are fp32. */
static void product(const ar_tensor *c, const ar_tensor *a, const ar_tensor *b, bool add, float *room)
{
    if (room)
        multiply_pieces(c, a, b, add, room);
    else
        multiply(c, a, b, add);
}

/* --- shared out --------------------------------------------------------------------------------------------------- */

/* One product whose rows or columns, whichever are more, are shared out. BLIS's own threads meet at barriers that spin
 * for ever, which costs a time slice each where another process or rank has the core; these meet once, at the end. */
static void shared_product(const ar_tensor *c, const ar_tensor *a, const ar_tensor *b, bool add, int threads,
                           float *rooms, size_t room)
{
    const bool down = c->shape[0] >= c->shape[1];
    const size_t extent = down ? c->shape[0] : c->shape[1], steps = (extent + STEP - 1) / STEP;
    const size_t parts = steps < (size_t)threads ? steps : (size_t)threads;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (size_t i = 0; i < parts; i++) {
        const size_t from = i * steps / parts * STEP, end = (i + 1) * steps / parts * STEP;
        const size_t n = (end < extent ? end : extent) - from;
        const ar_tensor own_c = ar_tensor_slice(c, down ? 0 : 1, from, n);
        const ar_tensor own_a = down ? ar_tensor_slice(a, 0, from, n) : *a;
        const ar_tensor own_b = down ? *b : ar_tensor_slice(b, 0, from, n);
        product(&own_c, &own_a, &own_b, add, rooms ? rooms + ari_thread_number() * room : NULL);
    }
}

/** Slot gemm_f32. c[..,m,n] (+)= a[..,m,k] b[..,n,k]^T by BLIS's sgemm, any strides; k = 0 gives +0 (or leaves c).
 *  Batches and parts of a product are spread over the threads with one BLIS thread each.
 *  Numerics: fp32 in BLIS's blocking. Errors: AR_ERR_MEMORY (bf16: room for three pieces a thread), nothing is written
 *  then. */
ar_status ari_cpu_gemm_f32(ar_device *d, ARI_AT_ONCE, const ar_tensor *c, const ar_tensor *a, const ar_tensor *b,
                           bool add, ar_precision operands)
{
    (void)operands; /* every product of them is exact in fp32 anyway */
    const ari_matrices m = ari_matrices_of(c);
    const size_t work = m.rows * m.cols * (a->shape[a->ndim - 1] + 1), room = room_of(c, a, b);
    if (m.batch == 0 || m.rows == 0 || m.cols == 0)
        return AR_OK;
    const size_t longer = m.rows > m.cols ? m.rows : m.cols;
    const int threads = ari_threads_for(d, m.batch == 1 ? longer : m.batch, work / 8 * m.batch);
    void *rooms = NULL;
    if (room > 0)
        AR_TRY(ari_alloc(&rooms, (size_t)threads * room, sizeof(float), "the widened pieces of a product"));
    if (m.batch == 1) {
        const ar_tensor to = ari_matrix_view(c, 0), left = ari_matrix_view(a, 0), right = ari_matrix_view(b, 0);
        shared_product(&to, &left, &right, add, threads, rooms, room);
    } else {
        ARI_PARALLEL_FOR (i, m.batch, d, work / 8 * m.batch) {
            const ar_tensor to = ari_matrix_view(c, i), left = ari_matrix_view(a, i), right = ari_matrix_view(b, i);
            product(&to, &left, &right, add, rooms ? (float *)rooms + ari_thread_number() * room : NULL);
        }
    }
    free(rooms);
    return AR_OK;
}

/* --- what it runs on ---------------------------------------------------------------------------------------------- */

/* Who chose is read from the environment, as BLIS does: a value equal to our choice is right for our reason. */
static void blis_reason(char *out, size_t cap)
{
    const char *set = getenv(BLIS_ARCH_VARIABLE);
    const kernel_choice choice = choose_kernels();
    if (set && choice.number && strcmp(set, choice.number) == 0)
        (void)snprintf(out, cap, "%s", choice.why);
    else if (set)
        (void)snprintf(out, cap, "%s=%.16s is set", BLIS_ARCH_VARIABLE, set);
    else
        (void)snprintf(out, cap, "%s", choice.number ? "BLIS's own choice" : choice.why);
}

void ar_cpu_info_get(ar_cpu_info *out)
{
    memset(out, 0, sizeof *out);
    ari_cpu_name(out->cpu, sizeof out->cpu);
    ari_cpu_features(out->features, sizeof out->features);
    (void)snprintf(out->blis_version, sizeof out->blis_version, "%s", bli_info_get_version_str());
    blis_reason(out->blis_reason, sizeof out->blis_reason);
    bli_init(); /* the query below aborts on a library that is not initialised */
    (void)snprintf(out->blis_kernels, sizeof out->blis_kernels, "%s", bli_arch_string(bli_arch_query_id()));
    const ari_exact_path *path = NULL;
    const char *why = NULL;
    const bool refused = ari_exact_choose(&path, &why) != AR_OK;
    (void)snprintf(out->exact_path, sizeof out->exact_path, "%s", refused ? "refused" : path->name);
    (void)snprintf(out->exact_reason, sizeof out->exact_reason, "%s", refused ? ar_error_message() : why);
    cpu_set_t cores;
    CPU_ZERO(&cores);
    out->cores = sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
}

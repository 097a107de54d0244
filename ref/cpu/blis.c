/* SPDX-License-Identifier: Apache-2.0 */
/* What BLIS does: the native product, the binary64 products of exact ones, and which of its kernels do it. */
#include <blis.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "ref/cpu/device.h"
#include "ref/cpu/kernels.h"

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
#endif
    return (kernel_choice){NULL, "BLIS's own choice: neither AVX-512 nor AVX2 with FMA"};
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

/* By its expert interface: one thread is asked for with the call, not in the process-wide setting. */
#define GEMM(function, type, bli_gemm)                                                                              \
    function(type *c, ari_blis_view cv, const type *a, ari_blis_view av, const type *b, ari_blis_view bv, bool add) \
    {                                                                                                               \
        type one = 1, beta = add;                                                                                   \
        rntm_t r = BLIS_RNTM_INITIALIZER;                                                                           \
        bli_rntm_set_num_threads(1, &r);                                                                            \
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

/* One product whose rows or columns, whichever are more, are shared out. BLIS's own threads meet at barriers that spin
 * for ever, which costs a time slice each where another process or rank has the core; these meet once, at the end. */
static void shared_product(const ar_tensor *c, const ar_tensor *a, const ar_tensor *b, bool add, int threads)
{
    const ari_matrices cm = ari_matrices_of(c), am = ari_matrices_of(a), bm = ari_matrices_of(b);
    const bool down = cm.rows >= cm.cols;
    const size_t extent = down ? cm.rows : cm.cols, steps = (extent + STEP - 1) / STEP;
    const size_t parts = steps < (size_t)threads ? steps : (size_t)threads;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (size_t i = 0; i < parts; i++) {
        const size_t from = i * steps / parts * STEP, end = (i + 1) * steps / parts * STEP;
        const size_t n = (end < extent ? end : extent) - from;
        const ptrdiff_t at = (ptrdiff_t)from;
        const ari_blis_view cv = {down ? n : cm.rows, down ? cm.cols : n, cm.row_stride, cm.col_stride};
        const ari_blis_view av = {cv.rows, am.cols, am.row_stride, am.col_stride};
        const ari_blis_view bv = {bm.cols, cv.cols, bm.col_stride, bm.row_stride};
        blis_sgemm((float *)c->data.ptr + at * (down ? cm.row_stride : cm.col_stride), cv,
                   (const float *)a->data.ptr + (down ? at * am.row_stride : 0), av,
                   (const float *)b->data.ptr + (down ? 0 : at * bm.row_stride), bv, add);
    }
}

/** Slot gemm_f32. c[..,m,n] (+)= a[..,m,k] b[..,n,k]^T by BLIS's sgemm, any strides; k = 0 gives +0 (or leaves c).
 *  Batches and parts of a product are spread over the threads with one BLIS thread each.
 *  Numerics: fp32 in BLIS's blocking. Errors: none. */
ar_status ari_cpu_gemm_f32(ar_device *d, ARI_AT_ONCE, const ar_tensor *c, const ar_tensor *a, const ar_tensor *b,
                           bool add, ar_precision operands)
{
    (void)operands; /* every product of them is exact in fp32 anyway */
    const ari_matrices cm = ari_matrices_of(c), am = ari_matrices_of(a), bm = ari_matrices_of(b);
    if (cm.batch == 0 || cm.rows == 0 || cm.cols == 0)
        return AR_OK;
    const size_t work = cm.rows * cm.cols * (am.cols + 1);
    if (cm.batch == 1) {
        shared_product(c, a, b, add, ari_threads_for(d, cm.rows > cm.cols ? cm.rows : cm.cols, work / 8));
        return AR_OK;
    }
    const ari_blis_view cv = {cm.rows, cm.cols, cm.row_stride, cm.col_stride};
    const ari_blis_view av = {am.rows, am.cols, am.row_stride, am.col_stride};
    const ari_blis_view bv = {bm.cols, bm.rows, bm.col_stride, bm.row_stride};
    ARI_PARALLEL_FOR (i, cm.batch, d, work / 8 * cm.batch)
        blis_sgemm(ari_matrix_at(c, i), cv, ari_matrix_at(a, i), av, ari_matrix_at(b, i), bv, add);
    return AR_OK;
}

/* --- what it runs on ---------------------------------------------------------------------------------------------- */

static void cpu_brand(char *out, size_t cap)
{
    (void)snprintf(out, cap, "unknown");
#if defined(__x86_64__)
    unsigned int words[12];
    if (__get_cpuid_max(0x80000000u, NULL) < 0x80000004u)
        return;
    for (unsigned int i = 0; i < 3; i++)
        (void)__get_cpuid(0x80000002u + i, &words[4 * i], &words[4 * i + 1], &words[4 * i + 2], &words[4 * i + 3]);
    char brand[sizeof words + 1] = {0};
    memcpy(brand, words, sizeof words);
    const char *start = brand + strspn(brand, " ");
    size_t length = strlen(start);
    while (length > 0 && start[length - 1] == ' ')
        length--;
    (void)snprintf(out, cap, "%.*s", (int)length, start);
#endif
}

static void cpu_features(char *out, size_t cap)
{
    out[0] = '\0';
#if defined(__x86_64__)
    __builtin_cpu_init();
    const struct {
        const char *name;
        int have;
    } table[] = {
        {"avx2", __builtin_cpu_supports("avx2")},
        {"fma", __builtin_cpu_supports("fma")},
        {"avx512f", __builtin_cpu_supports("avx512f")},
        {"avx512dq", __builtin_cpu_supports("avx512dq")},
        {"avx512bw", __builtin_cpu_supports("avx512bw")},
        {"avx512vl", __builtin_cpu_supports("avx512vl")},
        {"avx512ifma", __builtin_cpu_supports("avx512ifma")},
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        const size_t used = strlen(out);
        if (table[i].have)
            (void)snprintf(out + used, cap - used, "%s%s", used > 0 ? " " : "", table[i].name);
    }
#else
    (void)cap;
#endif
}

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
    cpu_brand(out->cpu, sizeof out->cpu);
    cpu_features(out->features, sizeof out->features);
    (void)snprintf(out->blis_version, sizeof out->blis_version, "%s", bli_info_get_version_str());
    blis_reason(out->blis_reason, sizeof out->blis_reason);
    bli_init(); /* the query below aborts on a library that is not initialised */
    (void)snprintf(out->blis_kernels, sizeof out->blis_kernels, "%s", bli_arch_string(bli_arch_query_id()));
    const ari_exact_path *path = NULL;
    const bool refused = ari_exact_choose(&path) != AR_OK;
    (void)snprintf(out->exact_path, sizeof out->exact_path, "%s", refused ? "refused" : path->name);
    cpu_set_t cores;
    CPU_ZERO(&cores);
    out->cores = sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
}

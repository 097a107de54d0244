/* SPDX-License-Identifier: Apache-2.0 */
/* -DANYRANK_BLAS=blis: uses BLIS's typed interface, which supports arbitrary strides. */
#include <blis.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/cpu/blas/blas.h"

/* BLIS 0.9.0 does not recognise processors newer than itself, and falls back to kernels that are several times slower.
 * It reads BLIS_ARCH_TYPE once, at its first use, as a number of an enumeration that differs between versions (0 = skx,
 * 3 = haswell in 0.9.0). A number that does not match the processor causes an illegal instruction. Therefore the choice
 * is made by CPUID, and only for this version. */
#define KNOWN_VERSION "0.9.0"
#define ARCH_VARIABLE "BLIS_ARCH_TYPE"

typedef struct kernel_choice {
    const char *number; /* value of BLIS_ARCH_TYPE; NULL: BLIS chooses */
    const char *why;
} kernel_choice;

static kernel_choice choose_kernels(void)
{
    if (strcmp(bli_info_get_version_str(), KNOWN_VERSION) != 0)
        return (kernel_choice){NULL, "BLIS's own choice: not version " KNOWN_VERSION};
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

void ari_blas_start(void)
{
    const kernel_choice choice = choose_kernels();
    if (choice.number)
        (void)setenv(ARCH_VARIABLE, choice.number, 0); /* overwrite 0: a value that the user has set is kept */
    bli_init();
}

ar_status ari_blas_check(void)
{
    return AR_OK;
}

/* BLIS's functions take pointers to non-const operands that they do not write. */
static void *unconst(const void *p)
{
    return (void *)(uintptr_t)p;
}

/* Calls BLIS by its expert interface: the call asks for one thread instead of changing the process-wide setting, and
 * excludes the kernels for small matrices. In 0.9.0 these read past the end of an operand's row if the number of
 * terms is not a multiple of 8, which crashes if no memory follows (github.com/flame/blis/issues/635 and 821, fixed
 * later). */
#define GEMM(function, type, bli_gemm)                                                                              \
    function(type *c, ari_blas_view cv, const type *a, ari_blas_view av, const type *b, ari_blas_view bv, bool add) \
    {                                                                                                               \
        type alpha = 1, beta = add;                                                                                 \
        rntm_t r = BLIS_RNTM_INITIALIZER;                                                                           \
        bli_rntm_set_num_threads(1, &r);                                                                            \
        bli_rntm_disable_l3_sup(&r);                                                                                \
        bli_gemm(BLIS_NO_TRANSPOSE, BLIS_NO_TRANSPOSE, (dim_t)cv.rows, (dim_t)cv.cols, (dim_t)av.cols, &alpha,      \
                 unconst(a), av.row_stride, av.col_stride, unconst(b), bv.row_stride, bv.col_stride, &beta, c,      \
                 cv.row_stride, cv.col_stride, NULL, &r);                                                           \
    }
GEMM(void ari_blas_sgemm, float, bli_sgemm_ex)
GEMM(void ari_blas_dgemm, double, bli_dgemm_ex)

/* Returns why BLIS uses its kernel set. The environment decides, as in BLIS: a value equal to our choice has our
 * reason. */
static const char *reason(char *room, size_t cap)
{
    const char *set = getenv(ARCH_VARIABLE);
    const kernel_choice choice = choose_kernels();
    if (set && choice.number && strcmp(set, choice.number) == 0)
        return choice.why;
    if (!set)
        return choice.number ? "BLIS's own choice" : choice.why;
    (void)snprintf(room, cap, "%s=%.16s is set", ARCH_VARIABLE, set);
    return room;
}

void ari_blas_describe(ar_cpu_info *out)
{
    char scratch[sizeof out->blas_reason];
    bli_init(); /* the query of kernels aborts if the library is not initialised */
    (void)snprintf(out->blas, sizeof out->blas, "BLIS");
    (void)snprintf(out->blas_version, sizeof out->blas_version, "%s", bli_info_get_version_str());
    (void)snprintf(out->blas_kernels, sizeof out->blas_kernels, "%s", bli_arch_string(bli_arch_query_id()));
    (void)snprintf(out->blas_reason, sizeof out->blas_reason, "%s", reason(scratch, sizeof scratch));
}

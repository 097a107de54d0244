/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/cpu/blis_calls.h"

#include <blis.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "anyrank/device.h"
#include "ref/cpu/gemm_paths.h"

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
    union {
        const void *in;
        void *out;
    } u = {p};
    return u.out;
}

void ari_blis_sgemm(float *c, ari_blis_view cv, const float *a, ari_blis_view av, const float *b, ari_blis_view bv,
                    int add, int threads)
{
    float one = 1.0f, beta = add ? 1.0f : 0.0f;
    rntm_t r = BLIS_RNTM_INITIALIZER;
    bli_rntm_set_num_threads(threads, &r);
    bli_sgemm_ex(BLIS_NO_TRANSPOSE, BLIS_NO_TRANSPOSE, (dim_t)cv.rows, (dim_t)cv.cols, (dim_t)av.cols, &one, unconst(a),
                 av.row_stride, av.col_stride, unconst(b), bv.row_stride, bv.col_stride, &beta, c, cv.row_stride,
                 cv.col_stride, NULL, &r);
}

void ari_blis_dgemm(double *c, ari_blis_view cv, const double *a, ari_blis_view av, const double *b, ari_blis_view bv,
                    int add, int threads)
{
    double one = 1.0, beta = add ? 1.0 : 0.0;
    rntm_t r = BLIS_RNTM_INITIALIZER;
    bli_rntm_set_num_threads(threads, &r);
    bli_dgemm_ex(BLIS_NO_TRANSPOSE, BLIS_NO_TRANSPOSE, (dim_t)cv.rows, (dim_t)cv.cols, (dim_t)av.cols, &one, unconst(a),
                 av.row_stride, av.col_stride, unconst(b), bv.row_stride, bv.col_stride, &beta, c, cv.row_stride,
                 cv.col_stride, NULL, &r);
}

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
    ari_exact_choice exact = ARI_EXACT_PORTABLE;
    const bool refused = ari_exact_choose(&exact) != AR_OK;
    (void)snprintf(out->exact_path, sizeof out->exact_path, "%s", refused ? "refused" : ari_exact_name(exact));
    cpu_set_t cores;
    CPU_ZERO(&cores);
    out->cores = sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
}

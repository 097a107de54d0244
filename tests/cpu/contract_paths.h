/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TEST_CPU_CONTRACT_PATHS_H
#define TEST_CPU_CONTRACT_PATHS_H

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "ref/cpu/contract_kernels.h"
#include "ref/cpu/gemm_paths.h"
#include "ref/cpu/gemm_tiles.h"

/* Every claim about an exact product holds for each path that can make its sums. PATH_TEST(suite, name) is one test
 * body and two tests, suite_portable/name and suite_ifma/name; where the processor lacks the path the test is skipped
 * and says why. The suite is declared by PATH_SUITE. */
#define PATH_SUITE(suite, ...)                \
    TestSuite(suite##_portable, __VA_ARGS__); \
    TestSuite(suite##_ifma, __VA_ARGS__)

#define PATH_TEST(suite, name)          \
    static void name(void);             \
    Test(suite##_portable, name)        \
    {                                   \
        force_path(ARI_EXACT_PORTABLE); \
        name();                         \
    }                                   \
    Test(suite##_ifma, name)            \
    {                                   \
        force_path(ARI_EXACT_IFMA);     \
        name();                         \
    }                                   \
    static void name(void)

/* Devices created from here on use this path; the test has a process of its own. */
static inline void force_path(ari_exact_choice path)
{
    ar_device *d = NULL;
    cr_assert_eq(setenv(ARI_EXACT_VARIABLE, ari_exact_name(path), 1), 0);
    const ar_status st = ar_device_cpu_create(&d, 1);
    if (path == ARI_EXACT_IFMA && st == AR_ERR_UNSUPPORTED) {
        ar_cpu_info info;
        ar_cpu_info_get(&info);
        cr_assert_null(strstr(info.features, "avx512ifma"), "refused on a processor with %s", info.features);
        cr_skip_test("%s", ar_error_message());
    }
    cr_assert_eq(st, AR_OK, "%s", ar_error_message());
    cr_assert_eq(d->ops->gemm_round == ari_cpu_gemm_round, path == ARI_EXACT_PORTABLE);
    cr_assert_eq(d->ops->gemm_i64 == ari_cpu_gemm_i64, path == ARI_EXACT_PORTABLE);
    cr_assert_eq(d->ops->gemm_acc == ari_cpu_gemm_acc, path == ARI_EXACT_PORTABLE);
    ar_device_destroy(d);
}

#endif

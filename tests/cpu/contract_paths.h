/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TEST_CPU_CONTRACT_PATHS_H
#define TEST_CPU_CONTRACT_PATHS_H

#include <criterion/criterion.h>
#include <criterion/logging.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "ref/cpu/device.h"
#include "ref/cpu/kernels.h"
#include "tests/cpu/emulated/ifma.h"

/* Every claim about an exact product holds for each path that can make its sums. PATH_TEST(suite, name) is one test
 * body and two tests, suite_portable/name and suite_ifma/name. The latter runs the body with AVX-512 IFMA where the
 * processor has it, and everywhere with the same code on emulated instructions (emulated/avx512.h). The suite is
 * declared by PATH_SUITE; the body's devices come from device(). */
#define PATH_SUITE(suite, ...)                \
    TestSuite(suite##_portable, __VA_ARGS__); \
    TestSuite(suite##_ifma, __VA_ARGS__)

#define PATH_TEST(suite, name)   \
    static void name(void);      \
    Test(suite##_portable, name) \
    {                            \
        run_portable(name);      \
    }                            \
    Test(suite##_ifma, name)     \
    {                            \
        run_ifma(name);          \
    }                            \
    static void name(void)

/* What device() gives; a test has a process of its own. */
static bool path_emulated;

static inline ar_device *device(int threads)
{
    ar_device *d = NULL;
    cr_assert_eq(ar_device_cpu_create(&d, threads), AR_OK, "%s", ar_error_message());
    if (path_emulated)
        test_emulate_ifma(d);
    return d;
}

/* Devices created from here on use this path; false where the processor lacks it. */
static inline bool force_path(const char *path)
{
    ar_device *d = NULL;
    cr_assert_eq(setenv(ARI_EXACT_VARIABLE, path, 1), 0);
    const ar_status st = ar_device_cpu_create(&d, 1);
    if (strcmp(path, "ifma") == 0 && st == AR_ERR_UNSUPPORTED) {
        ar_cpu_info info;
        ar_cpu_info_get(&info);
        cr_assert_null(strstr(info.features, "avx512ifma"), "refused on a processor with %s", info.features);
        return false;
    }
    cr_assert_eq(st, AR_OK, "%s", ar_error_message());
    cr_assert_str_eq(((ari_cpu_device *)d)->path->name, path);
    ar_device_destroy(d);
    return true;
}

static inline void run_portable(void (*body)(void))
{
    cr_assert(force_path("portable"));
    body();
}

/* A failure is of what was logged last. */
static inline void run_ifma(void (*body)(void))
{
    if (force_path("ifma")) {
        cr_log_info("with AVX-512 IFMA");
        body();
    }
    cr_assert(force_path("portable"));
    path_emulated = true;
    cr_log_info("with AVX-512 IFMA emulated");
    body();
}

#endif

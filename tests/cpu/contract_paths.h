/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <criterion/logging.h>

#include "ref/cpu/device.h"
#include "ref/cpu/kernels.h"
#include "tests/cpu/contract_cases.h"
#include "tests/cpu/emulated/emulated.h"
#include "tests/support/small.h"
#include "tests/support/test.h"

/* Every claim about an exact product holds for each path that can make its sums. PATH_TEST(suite, name) is one test
 * body and a test for each path of the list, suite_portable/name and so on: with the instructions that the path needs
 * where the processor has them, and everywhere with the same code on emulated ones (emulated/). The suite is declared by
 * PATH_SUITE; the body's devices come from device(). */
#define EXACT_PATHS(X, ...)    \
    X(portable, __VA_ARGS__)   \
    X(amx, __VA_ARGS__)        \
    X(avx512vnni, __VA_ARGS__) \
    X(avxvnni, __VA_ARGS__) X(avx2, __VA_ARGS__) X(smmla, __VA_ARGS__) X(sdot, __VA_ARGS__) X(neon, __VA_ARGS__)

#define PATH_SUITE_OF(path, suite, ...) TestSuite(suite##_##path, __VA_ARGS__);
#define PATH_SUITE(suite, ...) EXACT_PATHS(PATH_SUITE_OF, suite, __VA_ARGS__) _Static_assert(1, "takes the semicolon")

#define PATH_TEST_OF(path, suite, name) \
    Test(suite##_##path, name)          \
    {                                   \
        run_path(#path, name);          \
    }
#define PATH_TEST(suite, name)             \
    static void name(void);                \
    EXACT_PATHS(PATH_TEST_OF, suite, name) \
    static void name(void)

/* What device() gives; a test has a process of its own. */
static const ari_exact_path *path_emulated;

static inline ar_device *device(int threads)
{
    ar_device *d = NULL;
    cr_assert_ok(ar_device_cpu_create(&d, threads));
    if (path_emulated)
        test_take_path(d, path_emulated);
    return d;
}

/* Devices created from here on use this path; false where the processor lacks it. */
static inline bool force_path(const char *path)
{
    OWNED(ar_device_destroy) ar_device *d = NULL;
    cr_assert_eq(setenv(ARI_EXACT_VARIABLE, path, 1), 0);
    const ar_status st = ar_device_cpu_create(&d, 1);
    if (st != AR_OK) {
        size_t i = 0;
        while (ari_exact_path_at(i) && strcmp(ari_exact_path_at(i)->name, path) != 0)
            i++;
        cr_assert(!ari_exact_path_at(i) || !ari_exact_path_at(i)->supported(), "%s", ar_error_message());
        return false;
    }
    cr_assert_str_eq(((ari_cpu_device *)d)->exact.path->name, path);
    return true;
}

/* A failure is of what was logged last. ANYRANK_TEST_EMULATED leaves out the processor's own instructions where emulated
 * ones can take their place: what another machine sees of a mistake (path_mutants.py). */
static inline void run_path(const char *path, void (*body)(void))
{
    const bool alone = getenv("ANYRANK_TEST_EMULATED") && test_emulated_path(path);
    const bool here = !alone && force_path(path);
    if (here) {
        cr_log_info("with the processor's own instructions");
        body();
    }
    if (here && small_only()) /* emulated_real_test holds that both kinds of instructions give the same */
        return;
    path_emulated = test_emulated_path(path);
    cr_assert(here || path_emulated, "%s: nothing can run it", path);
    if (path_emulated) {
        cr_assert(force_path("portable"));
        cr_log_info("with emulated instructions");
        body();
    }
}

static inline void same_bits(const float *got, const float *want, size_t n, const char *what)
{
    const size_t at = case_first_difference(got, want, n);
    cr_assert(at == n, "%s: first difference at %zu of %zu: got %08x, expected %08x", what, at, n, ari_bits32(got[at]),
              ari_bits32(want[at]));
}

/* SPDX-License-Identifier: Apache-2.0 */
/* What is asked of an OpenBLAS that a build with -DANYRANK_BLAS=cblas has, over one that answers as the test says. */
#define openblas_get_config given_config
#define openblas_get_corename given_corename
#define openblas_get_parallel given_parallel
#define openblas_set_num_threads given_num_threads
#define ari_blas_start tested_start
#define ari_blas_check tested_check
#define ari_blas_describe tested_describe
#include "ref/cpu/blas/cblas_info.c"
#include "tests/support/test.h"

static char config[64], core[16];
static int parallel, threads;

char *given_config(void)
{
    return config;
}

char *given_corename(void)
{
    return core;
}

int given_parallel(void)
{
    return parallel;
}

void given_num_threads(int n)
{
    threads = n;
}

static void give(const char *its_config, const char *its_core, int its_parallel)
{
    (void)snprintf(config, sizeof config, "%s", its_config);
    (void)snprintf(core, sizeof core, "%s", its_core);
    parallel = its_parallel;
}

Test(cblas_info, says_that_kernels_are_of_an_older_processor)
{
    ar_cpu_info info;
    give("OpenBLAS 0.3.21 MAX_THREADS=64", "Prescott", PTHREADS);
    tested_describe(&info);
    cr_expect(strcmp(info.blas, "OpenBLAS") == 0 && strcmp(info.blas_version, "0.3.21") == 0);
    cr_expect_str_eq(info.blas_kernels, "Prescott");
    cr_expect_str_eq(info.blas_reason,
                     ari_cpu_has("avx512f avx512bw avx512dq avx512vl")
                         ? "the library's own choice; this processor has more: OPENBLAS_CORETYPE=SkylakeX"
                     : ari_cpu_has("avx2 fma")
                         ? "the library's own choice; this processor has more: OPENBLAS_CORETYPE=Haswell"
                         : "the library's own choice");
    give("OpenBLAS 0.3.21", "Zen", PTHREADS);
    tested_describe(&info);
    cr_expect_str_eq(info.blas_reason, "the library's own choice");
}

Test(cblas_info, refuses_an_openblas_that_ranks_cannot_share)
{
    give("OpenBLAS 0.3.21 USE64BITINT", "Zen", PTHREADS);
    cr_assert_refused(tested_check(), AR_ERR_UNSUPPORTED, "64-bit integers");
    give("OpenBLAS 0.3.21", "Zen", NO_THREADS);
    cr_assert_refused(tested_check(), AR_ERR_UNSUPPORTED, "neither threads nor locks");
    give("OpenBLAS 0.3.21", "Zen", OPENMP);
    cr_assert_refused(tested_check(), AR_ERR_UNSUPPORTED, "OpenMP");
    give("OpenBLAS 0.3.21 USE_LOCKING", "Zen", NO_THREADS);
    cr_assert_ok(tested_check());
    give("OpenBLAS 0.3.21", "Zen", PTHREADS);
    threads = 0;
    cr_assert_ok(tested_check());
    cr_assert_eq(threads, 1);
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Errors of a GPU after which nothing works any more. No GPU is needed. */
#include "gpu/report/sticky.h"
#include "tests/support/test.h"

#include <pthread.h>

Test(sticky, are_those_that_end_a_context_and_no_others)
{
    static const int ending[] = {214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911};
    size_t at = 0;
    for (int code = 0; code < 1100; code++) {
        const bool ends = at < sizeof ending / sizeof *ending && ending[at] == code;
        cr_assert_eq(ari_gpu_error_is_sticky(code), ends, "%d", code);
        at += ends;
    }
}

Test(sticky, an_error_of_one_call_is_that_call_s)
{
    cr_assert_eq(ari_gpu_failed(1, "copying", "invalid argument", "cudaErrorInvalidValue"), AR_ERR_DEVICE);
    cr_assert_str_eq(ar_error_message(), "the GPU failed: copying: invalid argument (cudaErrorInvalidValue)");
    cr_assert_eq(ari_gpu_failed(2, "zeroing", "out of memory", "cudaErrorMemoryAllocation"), AR_ERR_DEVICE);
    cr_assert_str_eq(ar_error_message(), "the GPU failed: zeroing: out of memory (cudaErrorMemoryAllocation)");
    cr_assert_not(ari_gpu_is_lost());
    cr_assert_ok(ari_gpu_check_lost());
}

Test(sticky, the_first_is_what_all_later_calls_give)
{
    static const char first[] = "the GPU failed: run_each: an illegal address (cudaErrorIllegalAddress)";
    cr_assert_eq(ari_gpu_failed(700, "run_each", "an illegal address", "cudaErrorIllegalAddress"), AR_ERR_DEVICE);
    cr_assert_str_eq(ar_error_message(), first);
    cr_assert(ari_gpu_is_lost());
    cr_assert_eq(ari_gpu_failed(719, "copying", "launch failure", "cudaErrorLaunchFailure"), AR_ERR_DEVICE);
    cr_assert_str_eq(ar_error_message(), first);
    cr_assert_eq(ari_gpu_failed(1, "copying", "invalid argument", "cudaErrorInvalidValue"), AR_ERR_DEVICE);
    cr_assert_str_eq(ar_error_message(), first);
    cr_assert_eq(ar_error_set(AR_ERR_ARG, "something else"), AR_ERR_ARG);
    cr_assert_eq(ari_gpu_check_lost(), AR_ERR_DEVICE);
    cr_assert_str_eq(ar_error_message(), first);
}

enum { THREADS = 8 };
static char seen[THREADS][400];

/* What a thread is given that fails at the same time as others. */
static void *fail(void *arg)
{
    const size_t self = (size_t)arg;
    char what[32];
    snprintf(what, sizeof what, "thread %zu", self);
    if (ari_gpu_failed(719, what, "launch failure", "cudaErrorLaunchFailure") == AR_OK)
        return arg;
    snprintf(seen[self], sizeof seen[self], "%s", ar_error_message());
    return NULL;
}

Test(sticky, threads_that_fail_together_give_one_error)
{
    pthread_t threads[THREADS];
    for (size_t i = 0; i < THREADS; i++)
        cr_assert_eq(pthread_create(&threads[i], NULL, fail, (void *)i), 0);
    for (size_t i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    for (size_t i = 0; i < THREADS; i++)
        cr_assert(strstr(seen[i], "(cudaErrorLaunchFailure)") && strcmp(seen[i], seen[0]) == 0, "%s", seen[i]);
}

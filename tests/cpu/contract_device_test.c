/* SPDX-License-Identifier: Apache-2.0 */
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include "ref/cpu/device_private.h"
#include "tests/cpu/contract_paths.h"

/* The CPU device as an instance: creation, memory, and what it says about the machine. */
Test(contract_device, needs_a_thread)
{
    ar_device *d = NULL;
    cr_assert_eq(ar_device_cpu_create(&d, 0), AR_ERR_ARG);
    cr_assert_eq(ar_device_cpu_create(&d, -1), AR_ERR_ARG);
    cr_assert_null(d);
    ar_device_destroy(NULL);
}

/* The table is an array of function pointers after the name: none may be missing. */
Test(contract_device, fills_every_slot)
{
    OWNED(ar_device_destroy) ar_device *d = NULL;
    cr_assert_ok(ar_device_cpu_create(&d, 1));
    cr_assert_str_eq(d->ops->name, "cpu");
    const char *slots = (const char *)d->ops;
    for (size_t at = 0; at < sizeof *d->ops; at += sizeof(void *)) {
        const void *slot = NULL;
        memcpy(&slot, slots + at, sizeof slot);
        cr_expect_not_null(slot, "slot %zu", at / sizeof slot);
    }
}

#if defined(__SSE__)
static const unsigned int flushing[] = {0x8000u, 0x0040u};
static unsigned int control(void)
{
    return _mm_getcsr();
}
static void set_control(unsigned int word)
{
    _mm_setcsr(word);
}
#elif defined(__aarch64__)
static const unsigned int flushing[] = {0x1000000u};
static unsigned int control(void)
{
    uint64_t word;
    __asm__ volatile("mrs %0, fpcr" : "=r"(word));
    return (unsigned int)word;
}
static void set_control(unsigned int word)
{
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)word));
}
#endif
#if defined(__SSE__) || defined(__aarch64__)
Test(contract_device, is_refused_where_subnormals_are_flushed)
{
    OWNED(ar_device_destroy) ar_device *d = NULL;
    const unsigned int saved = control();
    for (size_t i = 0; i < sizeof flushing / sizeof flushing[0]; i++) {
        set_control(saved | flushing[i]);
        const ar_status st = ar_device_cpu_create(&d, 1);
        set_control(saved);
        cr_expect_eq(st, AR_ERR_DATA);
    }
    cr_assert_ok(ar_device_cpu_create(&d, 1));
}
#endif

Test(contract_device, gives_aligned_memory_that_copies_and_zeroes)
{
    OWNED(ar_device_destroy) ar_device *d = NULL;
    ar_buf a = {NULL}, b = {NULL}, none = {NULL};
    unsigned char host[100];
    cr_assert_ok(ar_device_cpu_create(&d, 1));
    cr_assert_ok(d->ops->alloc(d, NULL, &a, 100));
    cr_assert_ok(d->ops->alloc(d, NULL, &b, 100));
    cr_assert_ok(d->ops->alloc(d, NULL, &none, 0));
    cr_assert_eq((uintptr_t)a.ptr % 64, 0u);
    cr_assert_not_null(none.ptr);
    for (size_t i = 0; i < sizeof host; i++)
        host[i] = (unsigned char)(3 * i);
    cr_assert_ok(d->ops->copy(d, NULL, a, (ar_cbuf){host}, sizeof host));
    cr_assert_ok(d->ops->copy(d, NULL, b, ar_const(a), sizeof host));
    cr_assert_eq(memcmp(b.ptr, host, sizeof host), 0);
    cr_assert_ok(d->ops->zero(d, NULL, b, 99));
    cr_assert_eq(((unsigned char *)b.ptr)[98], 0);
    cr_assert_eq(((unsigned char *)b.ptr)[99], host[99]);
    cr_assert_eq(d->ops->alloc(d, NULL, &none, SIZE_MAX), AR_ERR_OVERFLOW);
    d->ops->free(d, NULL, a);
    d->ops->free(d, NULL, b);
    d->ops->free(d, NULL, none);
    d->ops->free(d, NULL, (ar_buf){NULL});
}

Test(contract_device, says_which_kernels_run_and_why)
{
    ar_cpu_info info;
    cr_assert_eq(unsetenv("BLIS_ARCH_TYPE"), 0);
    ari_cpu_select_kernels();
    ari_cpu_info_get(&info);
    cr_assert(strlen(info.blas) > 0 && strlen(info.blas_version) > 0 && strlen(info.blas_kernels) > 0 &&
              strlen(info.blas_reason) > 0);
    cr_assert(strlen(info.exact_path) > 0 && strcmp(info.exact_path, "refused") != 0);
    cr_assert(strlen(info.exact_reason) > 0);
    cr_assert(info.cores >= 1);
    const bool avx512 =
        strstr(info.features, "avx512vl") && strstr(info.features, "avx512bw") && strstr(info.features, "avx512dq");
    if (strcmp(info.blas, "BLIS") != 0 || strcmp(info.blas_version, "0.9.0") != 0)
        return;
    if (avx512)
        cr_assert_str_eq(info.blas_kernels, "skx");
    else if (strstr(info.features, "avx2") && strstr(info.features, "fma"))
        cr_assert_str_eq(info.blas_kernels, "haswell");
}

static void expect_path(const char *forced, const char *expected)
{
    ar_cpu_info info;
    cr_assert_eq(forced ? setenv(ARI_EXACT_VARIABLE, forced, 1) : unsetenv(ARI_EXACT_VARIABLE), 0);
    ari_cpu_info_get(&info);
    cr_expect_str_eq(info.exact_path, expected, "%s: got %s, expected %s", forced ? forced : "unset", info.exact_path,
                     expected);
    if (forced && forced[0] != '\0')
        cr_expect(strstr(info.exact_reason, "ANYRANK_EXACT_PATH is"), "%s", info.exact_reason);
    else
        cr_expect(!strstr(info.exact_reason, ARI_EXACT_VARIABLE), "%s", info.exact_reason);
}

Test(contract_device, says_which_exact_path_a_new_device_takes)
{
    const ari_exact_path *path = NULL;
    ari_exact_choice own;
    cr_assert_eq(unsetenv(ARI_EXACT_VARIABLE), 0);
    cr_assert_ok(ari_exact_choose(&own));
    cr_assert(own.path->supported() && own.brief->supported() && own.brief->least_terms == 0);
    expect_path(NULL, own.path->name);
    expect_path("", own.path->name);
    for (size_t i = 0; (path = ari_exact_path_at(i)); i++)
        expect_path(path->name, path->supported() ? path->name : "refused");
    expect_path("portable", "portable");
    expect_path("Portable", "refused");
}

Test(contract_device, refuses_an_exact_path_that_is_none)
{
    ar_device *d = NULL;
    cr_assert_eq(setenv(ARI_EXACT_VARIABLE, "fastest", 1), 0);
    cr_assert_refused(ar_device_cpu_create(&d, 1), AR_ERR_ARG, "ANYRANK_EXACT_PATH is 'fastest'");
    cr_assert_null(d);
}

Test(contract_device, leaves_the_users_choice_of_kernels_alone)
{
#if defined(__aarch64__)
    static const char number[] = "17", reason[] = "BLIS_ARCH_TYPE=17 is set"; /* cortexa57: runs everywhere */
#else
    static const char number[] = "25", reason[] = "BLIS_ARCH_TYPE=25 is set"; /* generic: runs everywhere */
#endif
    ar_cpu_info info;
    cr_assert_eq(setenv("BLIS_ARCH_TYPE", number, 1), 0);
    ari_cpu_select_kernels();
    ari_cpu_info_get(&info);
    cr_assert_str_eq(getenv("BLIS_ARCH_TYPE"), number);
    if (strcmp(info.blas, "BLIS") == 0)
        cr_assert_str_eq(info.blas_reason, reason);
}

/* SPDX-License-Identifier: Apache-2.0 */
/* The emulated device's judges of kernels see what is wrong, and nothing where nothing is: in every build its stand-in for
 * cuBLAS; under ThreadSanitizer, which takes a block's threads for threads, the races of kernels. */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/gpu/wrong_kernels.h"

enum { EXIT_SKIPPED = 77, BYTES = 1 << 20 };

#if !HAVE_WRONG_KERNELS
int main(void)
{
    printf("this build has no emulated device\n");
    return EXIT_SKIPPED;
}
#else

#if defined(__SANITIZE_THREAD__)
static const bool watched = true;
static int reports;

/* ThreadSanitizer calls these. The reports are expected, so they end nothing. */
const char *__tsan_default_options(void);
const char *__tsan_default_options(void)
{
    return "exitcode=0:suppress_equal_stacks=0:suppress_equal_addresses=0";
}
void __tsan_on_report(void *report);
__attribute__((no_sanitize("thread"))) void __tsan_on_report(void *report) /* a race here would be reported here */
{
    (void)report;
    reports++;
}
void __sanitizer_set_report_fd(void *fd);
static void hide_reports(void)
{
    __sanitizer_set_report_fd((void *)(intptr_t)open("/dev/null", O_WRONLY | O_CLOEXEC));
}
#else
static const bool watched = false;
static const int reports = 0;
static void hide_reports(void)
{
}
#endif

typedef struct bench {
    ar_device *d;
    ar_queue *q;
    ar_buf x, y;
} bench;

static ar_status bench_open(bench *b, const char *order)
{
    if (setenv("ANYRANK_EMULATED_ORDER", order, 1) != 0)
        abort();
    AR_TRY(ar_device_emulated_create(&b->d));
    AR_TRY(b->d->ops->queue_create(b->d, &b->q, AR_QUEUE_INLINE, "main"));
    AR_TRY(b->d->ops->alloc(b->d, b->q, &b->x, BYTES));
    AR_TRY(b->d->ops->alloc(b->d, b->q, &b->y, BYTES));
    return b->d->ops->zero(b->d, b->q, b->x, BYTES);
}

static void bench_close(bench *b)
{
    if (b->q) {
        b->d->ops->free(b->d, b->q, b->x);
        b->d->ops->free(b->d, b->q, b->y);
    }
    ar_queue_destroy(b->q);
    ar_device_destroy(b->d);
}

/* How many kernels were judged wrongly. */
static int judge_kernels(const bench *b, const char *order)
{
    size_t count;
    int wrong = 0;
    const wrong_kernel *all = wrong_kernels(&count);
    for (size_t i = 0; i < count; i++) {
        const int before = reports;
        ar_status st = all[i].run(b->d, b->q, b->x);
        if (st == AR_OK)
            st = ar_queue_sync(b->q, 0);
        const bool found = reports > before;
        if (st == AR_OK && found == (all[i].races && watched))
            continue;
        printf("%s, %s: %s, %d reports\n", order, all[i].name, st == AR_OK ? "no error" : ar_error_message(),
               reports - before);
        wrong++;
    }
    printf("%s: %zu kernels%s, %d judged wrongly\n", order, count, watched ? "" : " run (no ThreadSanitizer)", wrong);
    return wrong;
}

static int judge_products(const bench *b)
{
    size_t count;
    int wrong = 0;
    const wrong_product *all = wrong_products(&count);
    for (size_t i = 0; i < count; i++) {
        ar_status st = wrong_product_run(&all[i], b->d, b->q, b->x, b->y);
        if (st == AR_OK)
            st = ar_queue_sync(b->q, 0);
        const char *text = st == AR_OK ? "" : ar_error_message();
        if (st == all[i].expected && strstr(text, all[i].says))
            continue;
        printf("%s: %s, \"%s\"\n", all[i].name, ar_status_name(st), text);
        wrong++;
    }
    printf("%zu products, %d judged wrongly\n", count, wrong);
    return wrong;
}

int main(void)
{
    static const char *const orders[] = {"threads", "threads:2", "threads:33"};
    int wrong = 0;
    hide_reports();
    for (size_t i = 0; i < sizeof orders / sizeof *orders; i++) {
        bench b = {NULL};
        const ar_status st = bench_open(&b, orders[i]);
        if (st == AR_ERR_UNSUPPORTED) {
            printf("%s\n", ar_error_message());
            return EXIT_SKIPPED;
        }
        if (st != AR_OK) {
            printf("%s\n", ar_error_message());
            return 1;
        }
        wrong += judge_kernels(&b, orders[i]);
        if (i == 0)
            wrong += judge_products(&b);
        bench_close(&b);
    }
    return wrong == 0 ? 0 : 1;
}
#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* The emulated device's judges of kernels see what is wrong, and nothing where nothing is: in every build its stand-in for
 * cuBLAS; under ThreadSanitizer, which takes a block's threads and streams for threads, the races of kernels and of
 * streams. */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>

#include "anyrank/queue.h"
#include "gpu/device_private.h"
#include "tests/gpu/wrong_kernels.h"
#include "tests/support/scoped.h"

enum { EXIT_SKIPPED = 77, BYTES = 1 << 20 };

#if !defined(HAVE_WRONG_KERNELS)
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
    AR_TRY(ari_device_emulated_create(&b->d));
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

/* Whether a case was judged as it should be; says what is wrong with it. */
static bool is_right(const char *where, const char *name, ar_status st, bool races, int before)
{
    if (st == AR_OK && (reports > before) == (races && watched))
        return true;
    printf("%s, %s: %s, %d reports\n", where, name, st == AR_OK ? "no error" : ar_error_message(), reports - before);
    return false;
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
        wrong += !is_right(order, all[i].name, st, all[i].races, before);
    }
    printf("%s: %zu kernels%s, %d judged wrongly\n", order, count, watched ? "" : " run (no ThreadSanitizer)", wrong);
    return wrong;
}

/* What stands between two streams that use one block of memory. */
enum { BLOCK = 4096 };
typedef enum edge { NOTHING, EVENT, EVENT_BEFORE, HOST } edge;

static ar_status put_edge(edge e, edge here, ar_event *event, ar_queue *first, ar_queue *second)
{
    if (e != here)
        return AR_OK;
    if (e == HOST)
        return ar_queue_sync(first, 0);
    AR_TRY(ar_event_record(event, first));
    return ar_queue_wait(second, event);
}

/* What one stream writes, another reads. */
static ar_status write_and_read(const bench *b, ar_queue *second, ar_event *event, edge e)
{
    const ar_device_ops *ops = b->d->ops;
    ar_buf x = {NULL};
    AR_TRY(ops->alloc(b->d, b->q, &x, BLOCK));
    AR_TRY(ar_queue_sync(b->q, 0));
    AR_TRY(put_edge(e, EVENT_BEFORE, event, b->q, second));
    AR_TRY(ops->zero(b->d, b->q, x, BLOCK));
    AR_TRY(put_edge(e, EVENT, event, b->q, second));
    AR_TRY(put_edge(e, HOST, event, b->q, second));
    AR_TRY(ops->copy(b->d, second, b->y, ar_const(x), BLOCK));
    AR_TRY(ar_queue_sync(second, 0));
    ops->free(b->d, b->q, x);
    return AR_OK;
}

/* What one stream reads, another frees. */
static ar_status read_and_free(const bench *b, ar_queue *second, ar_event *event, edge e)
{
    const ar_device_ops *ops = b->d->ops;
    ar_buf x = {NULL};
    AR_TRY(ops->alloc(b->d, b->q, &x, BLOCK));
    AR_TRY(ops->zero(b->d, b->q, x, BLOCK));
    AR_TRY(ar_queue_sync(b->q, 0));
    AR_TRY(put_edge(e, EVENT_BEFORE, event, second, b->q));
    AR_TRY(ops->copy(b->d, second, b->y, ar_const(x), BLOCK));
    AR_TRY(put_edge(e, EVENT, event, second, b->q));
    AR_TRY(put_edge(e, HOST, event, second, b->q));
    ops->free(b->d, b->q, x);
    return ar_queue_sync(second, 0);
}

/* Memory that one stream has freed serves another. */
static ar_status free_and_take(const bench *b, ar_queue *second, ar_event *event, edge e)
{
    const ar_device_ops *ops = b->d->ops;
    (void)event;
    (void)e;
    for (int i = 0; i < 4; i++) {
        ar_buf x = {NULL};
        ar_queue *q = i % 2 ? second : b->q;
        AR_TRY(ops->alloc(b->d, q, &x, BLOCK));
        AR_TRY(ops->zero(b->d, q, x, BLOCK));
        ops->free(b->d, q, x);
    }
    return AR_OK;
}

static const struct {
    const char *name;
    ar_status (*run)(const bench *b, ar_queue *second, ar_event *event, edge e);
    edge between;
    bool races;
} uses[] = {
    {"written, read", write_and_read, NOTHING, true},
    {"written, read after an event", write_and_read, EVENT, false},
    {"written, read after an event that is too early", write_and_read, EVENT_BEFORE, true},
    {"written, waited for, read", write_and_read, HOST, false},
    {"read, freed", read_and_free, NOTHING, true},
    {"read, freed after an event", read_and_free, EVENT, false},
    {"read, freed after an event that is too early", read_and_free, EVENT_BEFORE, true},
    {"read, waited for, freed", read_and_free, HOST, false},
    {"freed, taken by another", free_and_take, NOTHING, false},
};

static ar_status judge_streams(const bench *b, int *wrong)
{
    OWNED(ar_queue_destroy) ar_queue *second = NULL;
    OWNED(ar_event_destroy) ar_event *event = NULL;
    AR_TRY(b->d->ops->queue_create(b->d, &second, AR_QUEUE_INLINE, "second"));
    AR_TRY(ar_event_create(&event));
    AR_TRY(b->d->ops->zero(b->d, second, b->y, BLOCK));
    for (size_t i = 0; i < sizeof uses / sizeof *uses; i++) {
        const int before = reports;
        *wrong +=
            !is_right("streams", uses[i].name, uses[i].run(b, second, event, uses[i].between), uses[i].races, before);
        AR_TRY(ar_queue_sync(b->q, 0));
        AR_TRY(ar_queue_sync(second, 0));
    }
    printf("streams: %zu uses of memory, %d judged wrongly in all\n", sizeof uses / sizeof *uses, *wrong);
    return AR_OK;
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
    static const char *const orders[] = {"forward", "threads", "threads:2", "threads:33"};
    int wrong = 0;
    hide_reports();
    for (size_t i = 0; i < sizeof orders / sizeof *orders; i++) {
        SCOPED(bench_close) bench b = {NULL};
        const ar_status st = bench_open(&b, orders[i]);
        if (st == AR_ERR_UNSUPPORTED) {
            printf("%s\n", ar_error_message());
            return EXIT_SKIPPED;
        }
        if (st != AR_OK) {
            printf("%s\n", ar_error_message());
            return 1;
        }
        if (i > 0)
            wrong += judge_kernels(&b, orders[i]);
        else if (judge_streams(&b, &wrong) != AR_OK)
            wrong++;
        else
            wrong += judge_products(&b);
    }
    return wrong == 0 ? 0 : 1;
}
#endif

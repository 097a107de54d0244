/* SPDX-License-Identifier: Apache-2.0 */
/* The emulated device's late streams: that they find what they are there to find, and nothing else. */
#include "gpu/device_private.h"
#include "ref/core/queue_private.h"
#include "ref/core/tensor_private.h"
#include "tests/support/test.h"

#if defined(ARI_SANITIZED)
#define NOT_SANITIZED .disabled = true
#else
#define NOT_SANITIZED .disabled = false
#endif

enum { SEEDS = 40 };

/* Two streams of a device, in an order that the seed decides. */
typedef struct pair {
    ar_device *d;
    ar_queue *one, *other;
    ar_event *event;
} pair;

static pair pair_open(const char *policy, int seed)
{
    pair p;
    char text[32];
    snprintf(text, sizeof text, "%s:%d", policy, seed);
    setenv("ANYRANK_EMULATED_STREAMS", text, 1);
    cr_assert_ok(ari_device_emulated_create(&p.d));
    cr_assert_ok(p.d->ops->queue_create(p.d, &p.one, AR_QUEUE_INLINE, "one"));
    cr_assert_ok(p.d->ops->queue_create(p.d, &p.other, AR_QUEUE_INLINE, "other"));
    cr_assert_ok(ar_event_create(&p.event));
    return p;
}

static void pair_close(pair *p)
{
    ar_event_destroy(p->event);
    ar_queue_destroy(p->one);
    ar_queue_destroy(p->other);
    ar_device_destroy(p->d);
}

static ar_buf taken(const pair *p, ar_queue *q, size_t n)
{
    ar_buf b = {NULL};
    cr_assert_ok(p->d->ops->alloc(p->d, q, &b, n * sizeof(float)));
    return b;
}

static void fill(const pair *p, ar_queue *q, ar_buf b, float value)
{
    const ar_tensor t = ari_tensor_flat(AR_F32, b, 4);
    cr_assert_ok(p->d->ops->fill(p->d, q, &t, value));
}

static void copy(const pair *p, ar_queue *q, ar_buf to, ar_buf from)
{
    cr_assert_ok(p->d->ops->copy(p->d, q, to, ar_const(from), 4 * sizeof(float)));
}

static float first_of(const pair *p, ar_queue *q, ar_buf b)
{
    float got[4] = {0};
    cr_assert_ok(p->d->ops->copy(p->d, q, (ar_buf){got}, ar_const(b), sizeof got));
    return got[0];
}

/* `other` waits for what `one` has been given so far. */
static void edge(const pair *p, bool wanted, ar_queue *one, ar_queue *other)
{
    if (!wanted)
        return;
    cr_assert_ok(ar_event_record(p->event, one));
    cr_assert_ok(ar_queue_wait(other, p->event));
}

/* One stream writes what another reads. */
static float written_and_read(pair *p, bool waits)
{
    const ar_buf x = taken(p, p->one, 4), y = taken(p, p->one, 4);
    fill(p, p->one, x, 1);
    cr_assert_ok(ar_queue_sync(p->one, 0));
    fill(p, p->one, x, 7);
    edge(p, waits, p->one, p->other);
    copy(p, p->other, y, x);
    const float got = first_of(p, p->other, y);
    p->d->ops->free(p->d, NULL, x);
    p->d->ops->free(p->d, NULL, y);
    return got;
}

/* One stream reads what another writes then. */
static float read_and_written(pair *p, bool waits)
{
    const ar_buf x = taken(p, p->one, 4), y = taken(p, p->one, 4);
    fill(p, p->one, x, 7);
    cr_assert_ok(ar_queue_sync(p->one, 0));
    copy(p, p->one, y, x);
    edge(p, waits, p->one, p->other);
    fill(p, p->other, x, 1);
    const float got = first_of(p, p->one, y);
    p->d->ops->free(p->d, NULL, x);
    p->d->ops->free(p->d, NULL, y);
    return got;
}

/* Memory is freed on a stream while another is still to read it, and taken again. */
static float read_and_freed(pair *p, bool waits)
{
    const ar_buf x = taken(p, p->one, 4), y = taken(p, p->one, 4);
    fill(p, p->one, x, 7);
    edge(p, true, p->one, p->other);
    copy(p, p->other, y, x);
    edge(p, waits, p->other, p->one);
    p->d->ops->free(p->d, p->one, x);
    const ar_buf z = taken(p, p->one, 4);
    fill(p, p->one, z, 1);
    const float got = first_of(p, p->other, y);
    p->d->ops->free(p->d, p->one, z);
    p->d->ops->free(p->d, NULL, y);
    return got;
}

static void assert_finds(float (*run)(pair *, bool), const char *policy)
{
    int found = 0;
    for (int seed = 0; seed < SEEDS; seed++) {
        SCOPED(pair_close) pair p = pair_open(policy, seed);
        cr_assert_eq(run(&p, true), 7, "%s:%d, with the wait", policy, seed);
        pair_close(&p);
        p = pair_open(policy, seed);
        found += run(&p, false) != 7;
    }
    cr_assert_geq(found, SEEDS / 8, "%s: %d of %d", policy, found, SEEDS);
    cr_assert_lt(found, SEEDS, "%s: it is not always so", policy);
}

/* Not under a sanitizer, to which every address may be the host's, so that each copy is waited for; and which ends what
 * reads freed memory. */
Test(late_streams, find_a_wait_that_is_missing, NOT_SANITIZED)
{
    for (int i = 0; i < 2; i++) {
        const char *policy = i ? "latest" : "late";
        assert_finds(written_and_read, policy);
        assert_finds(read_and_written, policy);
        assert_finds(read_and_freed, policy);
    }
}

/* The same of what the host does not wait for: nothing is done before. */
Test(late_streams, do_nothing_before_someone_waits)
{
    SCOPED(pair_close) pair p = pair_open("latest", 3);
    bool done = true;
    int asked = 0;
    const ar_buf x = taken(&p, p.one, 4);
    for (int i = 0; i < 20; i++)
        fill(&p, p.one, x, (float)i);
    cr_assert_ok(ar_event_record(p.event, p.one));
    for (done = false; !done; asked++)
        cr_assert_ok(ar_event_test(p.event, &done));
    cr_assert_geq(asked, 20);
    cr_assert_eq(first_of(&p, p.one, x), 19);
    p.d->ops->free(p.d, p.one, x);
}

static ar_status ask(void *event)
{
    bool done = false;
    const ar_status st = ar_event_test(event, &done);
    return st != AR_OK || done ? st : ar_error_set(AR_ERR_INTERNAL, "it is not done");
}

static ar_status fill_on(void *arg, ar_queue *on)
{
    const pair *p = arg;
    for (int i = 0; i < 20; i++) {
        const ar_buf b = taken(p, on, 4);
        fill(p, on, b, (float)i);
        p->d->ops->free(p->d, on, b);
    }
    return ar_event_record(p->event, on);
}

/* All ways in which the host waits for a stream; a mark that is asked for moves one task. */
Test(late_streams, are_done_when_the_host_has_waited)
{
    for (int way = 0; way < 5; way++) {
        SCOPED(pair_close) pair p = pair_open("latest", 3);
        OWNED(ar_queue_destroy) ar_queue *host = NULL, *thread = NULL;
        cr_assert_ok(ar_queue_create(&host, AR_QUEUE_INLINE, "host"));
        cr_assert_ok(p.d->ops->queue_create(p.d, &thread, AR_QUEUE_THREAD, "thread"));
        if (way < 4)
            cr_assert_ok(fill_on(&p, p.one));
        if (way == 0)
            cr_assert_ok(ar_queue_sync(p.one, 0));
        else if (way == 1)
            cr_assert_ok(ar_event_sync(p.event, 0));
        else if (way == 2)
            cr_assert_ok(ar_queue_host(p.one, ask, p.event));
        else if (way == 3)
            cr_assert_ok(ar_queue_wait(host, p.event));
        else
            cr_assert_ok(ari_queue_chain(thread, fill_on, &p));
        cr_assert_ok(ar_queue_sync(thread, 0));
        cr_assert_eq(ask(p.event), AR_OK, "way %d: %s", way, ar_error_message());
    }
}

Test(late_streams, give_a_stream_at_once_what_it_has_freed)
{
    SCOPED(pair_close) pair p = pair_open("latest", 1);
    const ar_buf x = taken(&p, p.one, 4), keep = taken(&p, p.one, 4);
    fill(&p, p.one, x, 7);
    copy(&p, p.one, keep, x);
    p.d->ops->free(p.d, p.one, x);
    const ar_buf y = taken(&p, p.one, 4);
#if !defined(ARI_SANITIZED)
    cr_assert_eq(x.ptr, y.ptr);
#endif
    fill(&p, p.one, y, 9);
    cr_assert_eq(first_of(&p, p.one, keep), 7);
    cr_assert_eq(first_of(&p, p.one, y), 9);
    p.d->ops->free(p.d, p.one, y);
    p.d->ops->free(p.d, p.one, keep);
}

/* Eager and late: told by the next call, and to all until no stream is left. */
Test(late_streams, say_where_a_kernel_wrote_behind_a_block, NOT_SANITIZED)
{
    for (int late = 0; late < 2; late++) {
        SCOPED(pair_close) pair p = pair_open("latest", 1);
        if (!late) {
            pair_close(&p);
            setenv("ANYRANK_EMULATED_STREAMS", "eager", 1);
            cr_assert_ok(ari_device_emulated_create(&p.d));
            cr_assert_ok(p.d->ops->queue_create(p.d, &p.one, AR_QUEUE_INLINE, "one"));
            cr_assert_ok(p.d->ops->queue_create(p.d, &p.other, AR_QUEUE_INLINE, "other"));
            cr_assert_ok(ar_event_create(&p.event));
        }
        const ar_buf x = taken(&p, p.one, 5);
        cr_assert_ok(p.d->ops->zero(p.d, p.one, ar_buf_at(x, 23), 3));
        p.d->ops->free(p.d, p.one, x);
        cr_assert_refused(ar_queue_sync(p.one, 0), AR_ERR_DEVICE,
                          "behind a block of 20 bytes of device memory: 3 bytes past its end");
        cr_assert_eq(p.d->ops->zero(p.d, p.other, x, 1), AR_ERR_DEVICE);
        pair_close(&p);
        p = pair_open("latest", 1);
        cr_assert_eq(written_and_read(&p, true), 7);
    }
}

/* Of what is not freed, now and then. */
Test(late_streams, look_at_what_is_not_freed, NOT_SANITIZED)
{
    SCOPED(pair_close) pair p = pair_open("late", 1);
    const ar_buf x = taken(&p, p.one, 5);
    cr_assert_ok(p.d->ops->zero(p.d, p.one, ar_buf_at(x, 63), 1));
    ar_status st = AR_OK;
    for (int i = 0; i < 2000 && st == AR_OK; i++) {
        fill(&p, p.one, x, 1);
        st = ar_queue_sync(p.one, 0);
    }
    cr_assert_refused(st, AR_ERR_DEVICE, "43 bytes past its end");
    p.d->ops->free(p.d, NULL, x);
}

/* Row 9 of an accumulator of 2 rows. */
Test(late_streams, tell_the_next_wait_what_a_kernel_did_wrong)
{
    SCOPED(pair_close) pair p = pair_open("latest", 1);
    const int64_t rows[1] = {9};
    const ar_buf acc = taken(&p, p.one, 8), x = taken(&p, p.one, 4), at = taken(&p, p.one, 2);
    const ar_tensor terms = {.dtype = AR_F32, .ndim = 2, .shape = {1, 4}, .stride = {4, 1}, .data = x};
    fill(&p, p.one, x, 1);
    cr_assert_ok(p.d->ops->copy(p.d, p.one, at, (ar_cbuf){rows}, sizeof rows));
    cr_assert_eq(p.d->ops->sum_rows_f32(p.d, p.one, acc, 2, &terms, ar_const(at)), AR_OK, "it runs later");
    cr_assert_refused(ar_queue_sync(p.one, 0), AR_ERR_DEVICE, "out of range");
    cr_assert_eq(ar_queue_sync(p.other, 0), AR_ERR_DEVICE, "a GPU fails for good");
    p.d->ops->free(p.d, NULL, acc);
    p.d->ops->free(p.d, NULL, x);
    p.d->ops->free(p.d, NULL, at);
}

Test(late_streams, a_value_that_is_none_is_refused)
{
    static const char *const wrong[] = {
        "", "soon", "late", "late:", "latest:-1", "late:1x", "eager:1", "late:18446744073709551616"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        ar_device *d = NULL;
        setenv("ANYRANK_EMULATED_STREAMS", wrong[i], 1);
        cr_assert_eq(ari_device_emulated_create(&d), AR_ERR_ARG, "'%s'", wrong[i]);
        cr_assert_says("eager, late:SEED or latest:SEED");
    }
}

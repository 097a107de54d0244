/* SPDX-License-Identifier: Apache-2.0 */
/* The first second on a GPU: gpu_smoke [cuda|cuda:N|emulated]. Whether a kernel starts at all, threads of a block share
 * memory, streams wait for each other, memory of the host is copied, and tensor cores multiply int8 in small and odd
 * shapes, each with its time; what is computed is compared bit for bit with the CPU device. Exit status 0; 1: something
 * differs or fails; 2: no device of that name; 77: this machine or build does not have it. */
#include <stdio.h>

#include "anyrank/queue.h"
#include "gpu/device_private.h"
#include "ref/core/clock.h"
#include "ref/cpu/device_private.h"
#include "support/device_pair.h"
#include "tests/support/scoped.h"

enum { EXIT_MISSING = 77 };

static void fill(device_pair *p)
{
    enum { N = 100003 };
    PAIR_CASE(p, "%d floats", N);
    const pair_tensor y = pair_output(p, "filled", 2, (const size_t[]){1, N}, PAIR_ROW_MAJOR);
    PAIR_RUN(p, fill, &y.at[s], 0.3f);
}

/* Sums along rows, which the threads of a block make together. */
static void shared_memory(device_pair *p)
{
    enum { ROWS = 5, COLS = 1537 };
    const size_t shape[2] = {ROWS, COLS};
    PAIR_CASE(p, "%d rows of %d", ROWS, COLS);
    const pair_tensor x = pair_input(p, "x", 2, shape, PAIR_ROW_MAJOR, PAIR_ORDINARY);
    const pair_tensor y = pair_output(p, "normalised rows", 2, shape, PAIR_ROW_MAJOR);
    const pair_buf mean = pair_words(p, "means", PAIR_W64, ROWS), rstd = pair_words(p, "deviations", PAIR_W32, ROWS);
    const pair_buf gain = pair_floats(p, "gain", COLS, PAIR_ORDINARY);
    PAIR_RUN(p, norm_forward, AR_NORM_LAYER, &y.at[s], mean.at[s], rstd.at[s], &x.at[s], ar_const(gain.at[s]),
             ar_const(gain.at[s]), 1e-5);
}

/* A second queue copies what the first makes, after an event. */
static ar_status copy_after(ar_device *d, ar_queue *q, const ar_tensor *sum, const ar_tensor *copy)
{
    enum { TURNS = 20 };
    OWNED(ar_event_destroy) ar_event *made = NULL;
    OWNED(ar_queue_destroy) ar_queue *second = NULL;
    AR_TRY(ar_event_create(&made));
    AR_TRY(d->ops->queue_create(d, &second, AR_QUEUE_INLINE, "second"));
    AR_TRY(d->ops->fill(d, q, sum, 1.0f));
    for (int turn = 0; turn < TURNS; turn++)
        AR_TRY(d->ops->add(d, q, sum, sum, sum));
    AR_TRY(ar_event_record(made, q));
    AR_TRY(ar_queue_wait(second, made));
    AR_TRY(d->ops->copy_strided(d, second, copy, sum));
    return ar_queue_sync(second, 0);
}

static void two_streams(device_pair *p)
{
    const size_t shape[2] = {1, 1 << 20};
    PAIR_CASE(p, "an event between them");
    const pair_tensor sum = pair_output(p, "made", 2, shape, PAIR_ROW_MAJOR);
    const pair_tensor copy = pair_output(p, "read", 2, shape, PAIR_ROW_MAJOR);
    for (int s = 0; s < 2 && pair_ready(p); s++)
        pair_ran(p, s, copy_after(p->side[s], p->queue[s], &sum.at[s], &copy.at[s]));
}

/* To the device, in it and back, from memory that malloc gave, which a GPU's driver calls pageable, and of a size that is
 * no multiple of anything. */
static void pageable_copy(device_pair *p)
{
    enum { BYTES = 4 * 1234567 - 3 };
    PAIR_CASE(p, "%d bytes", BYTES);
    const pair_buf x = pair_bytes(p, "x", BYTES, 4), y = pair_words(p, "copied", PAIR_W8, BYTES);
    PAIR_RUN(p, copy, y.at[s], ar_const(x.at[s]), BYTES);
}

/* The exact integer sums of one product, as the device makes them of int8 digits. */
static ar_status sums_of(ar_device *d, ar_queue *q, const ar_tensor *a, const ar_tensor *b, ar_cbuf exponents,
                         ar_buf sums)
{
    const ar_cbuf none = {NULL};
    ar_packed *pa = NULL, *pb = NULL;
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, d->ops->packed_create(d, q, &pa, 1, a->shape[0], a->shape[1], true));
    AR_TRY_TO(done, st, d->ops->packed_create(d, q, &pb, 1, b->shape[0], b->shape[1], false));
    AR_TRY_TO(done, st, d->ops->pack(d, q, pa, 0, 0, a, none, 1, exponents));
    AR_TRY_TO(done, st, d->ops->pack(d, q, pb, 0, 0, b, none, -1, exponents));
    AR_TRY_TO(done, st, d->ops->gemm_i64(d, q, sums, pa, pb, 1, false));
    st = ar_queue_sync(q, 0);
done:
    d->ops->packed_destroy(d, q, pa);
    d->ops->packed_destroy(d, q, pb);
    return st;
}

static void int8_products(device_pair *p)
{
    static const struct {
        size_t m, n, k;
    } shapes[] = {{4, 4, 16},  {1, 4, 16},   {1, 1, 1},       {3, 5, 7},     {17, 36, 48},
                  {16, 1, 64}, {33, 7, 130}, {128, 128, 128}, {129, 257, 65}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes && p->status != AR_ERR_DEVICE; i++) {
        const size_t m = shapes[i].m, n = shapes[i].n, k = shapes[i].k;
        PAIR_CASE(p, "%zu x %zu x %zu", m, n, k);
        const pair_tensor a = pair_input(p, "a", 2, (const size_t[]){m, k}, PAIR_ROW_MAJOR, PAIR_ORDINARY);
        const pair_tensor b = pair_input(p, "b", 2, (const size_t[]){n, k}, PAIR_ROW_MAJOR, PAIR_ORDINARY);
        const pair_buf e = pair_integers(p, "exponents", PAIR_W32, m > n ? m : n, 2, 1); /* values are below 4 */
        const pair_buf sums = pair_words(p, "sums", PAIR_W64, m * n);
        for (int s = 0; s < 2 && pair_ready(p); s++)
            pair_ran(p, s, sums_of(p->side[s], p->queue[s], &a.at[s], &b.at[s], ar_const(e.at[s]), sums.at[s]));
    }
}

/* One line; the time since *at, which goes on to now. */
static void print_line(const char *name, bool ok, uint64_t *at)
{
    const uint64_t now = ari_now_ns();
    printf("%-4s %-16s %9.3f ms\n", ok ? "ok" : "FAIL", name, 1e-6 * (double)(now - *at));
    fflush(stdout);
    *at = now;
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*run)(device_pair *p);
    } steps[] = {{"fill", fill},
                 {"shared memory", shared_memory},
                 {"two streams", two_streams},
                 {"pageable memory", pageable_copy},
                 {"int8 products", int8_products}};
    enum { STEPS = sizeof steps / sizeof *steps };
    const char *name = argc > 1 ? argv[1] : "cuda";
    const ar_device_choice cpu = {AR_DEVICE_CPU, 0};
    ar_device_choice which;
    device_pair p;
    int passed = 0;
    if (argc > 2 || ari_device_choice_parse(&which, name) != AR_OK) {
        fprintf(stderr, "usage: gpu_smoke [cuda|cuda:N|emulated]: not '%s'\n", argc > 2 ? argv[2] : name);
        return 2;
    }
    ari_cpu_select_kernels();
    uint64_t clock = ari_now_ns();
    if (pair_open(&p, &cpu, &which, 1) != AR_OK) {
        printf("no device %s: %s\n", name, ar_error_message());
        return EXIT_MISSING;
    }
    print_line("the device", true, &clock);
    for (int i = 0; i < STEPS && p.status != AR_ERR_DEVICE; i++) { /* nothing can follow what ends a GPU's context */
        p.slot = steps[i].name;
        p.reported = 0;
        p.tally = (pair_tally){0};
        steps[i].run(&p);
        const bool ok = p.status == AR_OK && p.tally.differing == 0 && p.tally.failures == 0 && !p.tally.missing;
        print_line(steps[i].name, ok, &clock);
        passed += ok;
    }
    pair_close(&p);
    printf("smoke on %s: %d of %d passed\n", name, passed, STEPS);
    return passed == STEPS ? 0 : 1;
}

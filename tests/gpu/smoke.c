/* SPDX-License-Identifier: Apache-2.0 */
/* The first second on a GPU: gpu_smoke [cuda|cuda:N|emulated]. Whether a kernel starts at all, threads of a block share
 * memory, streams wait for each other, memory of the host is copied, and tensor cores multiply int8 in small and odd
 * shapes, each with its time; what is computed is compared bit for bit with the CPU device. Exit status 0; 1: something
 * differs or fails; 2: no device of that name; 77: this machine or build does not have it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "anyrank/device.h"
#include "ref/core/clock.h"
#include "ref/core/size.h"

enum { CPU, OTHER, SIDES, EXIT_MISSING = 77 };

typedef struct smoke {
    ar_device *d[SIDES];
    ar_queue *q[SIDES];
} smoke;

/* --- memory on both sides ----------------------------------------------------------------------------------------- */

/* The same bytes on both devices, or an output. */
typedef struct twin {
    ar_buf at[SIDES];
    size_t bytes;
} twin;

/* from: of the host; NULL: zeros. */
static ar_status twin_create(smoke *s, twin *t, const void *from, size_t bytes)
{
    *t = (twin){.bytes = bytes};
    for (int i = 0; i < SIDES; i++) {
        const ar_device_ops *ops = s->d[i]->ops;
        AR_TRY(ops->alloc(s->d[i], s->q[i], &t->at[i], bytes));
        if (from)
            AR_TRY(ops->copy(s->d[i], s->q[i], t->at[i], (ar_cbuf){from}, bytes));
        else
            AR_TRY(ops->zero(s->d[i], s->q[i], t->at[i], bytes));
    }
    return AR_OK;
}

static void twin_destroy(smoke *s, twin *t)
{
    for (int i = 0; i < SIDES; i++)
        s->d[i]->ops->free(s->d[i], s->q[i], t->at[i]);
}

/* Every byte of both, in memory that malloc gave: what a GPU's driver calls pageable. */
static ar_status twin_compare(smoke *s, const twin *t, const char *what)
{
    void *host[SIDES] = {NULL};
    ar_status st = AR_OK;
    for (int i = 0; i < SIDES && st == AR_OK; i++) {
        AR_TRY_TO(done, st, ari_alloc_zero(&host[i], t->bytes, 1, what));
        AR_TRY_TO(done, st, s->d[i]->ops->copy(s->d[i], s->q[i], (ar_buf){host[i]}, ar_const(t->at[i]), t->bytes));
        st = ar_queue_sync(s->q[i], 0);
    }
    if (st == AR_OK && memcmp(host[CPU], host[OTHER], t->bytes) != 0) {
        size_t i = 0;
        while (((const char *)host[CPU])[i] == ((const char *)host[OTHER])[i])
            i++;
        st = ar_error_set(AR_ERR_DATA, "%s: byte %zu of %zu is 0x%02x, and 0x%02x on the CPU", what, i, t->bytes,
                          ((const unsigned char *)host[OTHER])[i], ((const unsigned char *)host[CPU])[i]);
    }
done:
    free(host[CPU]);
    free(host[OTHER]);
    return st;
}

static float value(size_t i)
{
    return (float)((i * 2654435761u >> 8) % 4001) * 0x1p-10f - 1.9f;
}

static ar_status floats(float **gives, size_t n)
{
    AR_TRY(ari_alloc((void **)gives, n, sizeof(float), "values"));
    for (size_t i = 0; i < n; i++)
        (*gives)[i] = value(i);
    return AR_OK;
}

/* A view [batch 1, rows, cols] of one side of a twin. */
static ar_tensor matrix_of(const twin *t, int side, size_t rows, size_t cols)
{
    ar_tensor view = {0};
    if (ar_tensor_view(&view, AR_F32, 2, (const size_t[]){rows, cols}, t->at[side]) != AR_OK)
        abort(); /* two positive extents */
    return view;
}

/* --- what is tried ------------------------------------------------------------------------------------------------ */

static ar_status fill(smoke *s)
{
    enum { N = 100003 };
    twin y;
    ar_status st = twin_create(s, &y, NULL, N * sizeof(float));
    for (int i = 0; i < SIDES && st == AR_OK; i++) {
        const ar_tensor view = matrix_of(&y, i, 1, N);
        st = s->d[i]->ops->fill(s->d[i], s->q[i], &view, 0.3f);
    }
    if (st == AR_OK)
        st = twin_compare(s, &y, "filled");
    twin_destroy(s, &y);
    return st;
}

/* Sums along rows, which the threads of a block make together. */
static ar_status shared_memory(smoke *s)
{
    enum { ROWS = 5, COLS = 1537 };
    twin x = {0}, y = {0}, mean = {0}, rstd = {0}, gain = {0};
    float *values = NULL;
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, floats(&values, ROWS * COLS));
    AR_TRY_TO(done, st, twin_create(s, &x, values, ROWS * COLS * sizeof(float)));
    AR_TRY_TO(done, st, twin_create(s, &y, NULL, ROWS * COLS * sizeof(float)));
    AR_TRY_TO(done, st, twin_create(s, &mean, NULL, ROWS * sizeof(double)));
    AR_TRY_TO(done, st, twin_create(s, &rstd, NULL, ROWS * sizeof(float)));
    AR_TRY_TO(done, st, twin_create(s, &gain, values, COLS * sizeof(float)));
    for (int i = 0; i < SIDES; i++) {
        const ar_tensor from = matrix_of(&x, i, ROWS, COLS), to = matrix_of(&y, i, ROWS, COLS);
        const ar_cbuf g = ar_const(gain.at[i]);
        AR_TRY_TO(done, st,
                  s->d[i]->ops->norm_forward(s->d[i], s->q[i], AR_NORM_LAYER, &to, mean.at[i], rstd.at[i], &from, g, g,
                                             1e-5));
    }
    AR_TRY_TO(done, st, twin_compare(s, &mean, "means of rows"));
    AR_TRY_TO(done, st, twin_compare(s, &rstd, "deviations of rows"));
    st = twin_compare(s, &y, "normalised rows");
done:
    twin_destroy(s, &gain);
    twin_destroy(s, &rstd);
    twin_destroy(s, &mean);
    twin_destroy(s, &y);
    twin_destroy(s, &x);
    free(values);
    return st;
}

/* A second queue copies what the first makes, after an event. */
static ar_status two_streams(smoke *s)
{
    enum { N = 1 << 20, TURNS = 20 };
    twin x = {0}, y = {0};
    ar_event *made = NULL;
    ar_queue *second = NULL;
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, ar_event_create(&made));
    AR_TRY_TO(done, st, twin_create(s, &x, NULL, N * sizeof(float)));
    AR_TRY_TO(done, st, twin_create(s, &y, NULL, N * sizeof(float)));
    for (int i = 0; i < SIDES; i++) {
        const ar_device_ops *ops = s->d[i]->ops;
        const ar_tensor sum = matrix_of(&x, i, 1, N), copy = matrix_of(&y, i, 1, N);
        AR_TRY_TO(done, st, ops->queue_create(s->d[i], &second, AR_QUEUE_INLINE, "second"));
        AR_TRY_TO(done, st, ops->fill(s->d[i], s->q[i], &sum, 1.0f));
        for (int turn = 0; turn < TURNS; turn++)
            AR_TRY_TO(done, st, ops->add(s->d[i], s->q[i], &sum, &sum, &sum));
        AR_TRY_TO(done, st, ar_event_record(made, s->q[i]));
        AR_TRY_TO(done, st, ar_queue_wait(second, made));
        AR_TRY_TO(done, st, ops->copy_strided(s->d[i], second, &copy, &sum));
        AR_TRY_TO(done, st, ar_queue_sync(second, 0));
        ar_queue_destroy(second);
        second = NULL;
    }
    st = twin_compare(s, &y, "what a second queue read");
done:
    ar_queue_destroy(second);
    twin_destroy(s, &y);
    twin_destroy(s, &x);
    ar_event_destroy(made);
    return st;
}

/* To the device and back, of a size that is no multiple of anything. */
static ar_status pageable_copy(smoke *s)
{
    enum { N = 1234567 };
    twin x = {0}, y = {0};
    float *values = NULL;
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, floats(&values, N));
    AR_TRY_TO(done, st, twin_create(s, &x, values, N * sizeof(float) - 3));
    AR_TRY_TO(done, st, twin_create(s, &y, NULL, x.bytes));
    memset(values, 0, N * sizeof(float)); /* it was borrowed until return */
    for (int i = 0; i < SIDES; i++)
        AR_TRY_TO(done, st, s->d[i]->ops->copy(s->d[i], s->q[i], y.at[i], ar_const(x.at[i]), x.bytes));
    st = twin_compare(s, &y, "copied");
done:
    twin_destroy(s, &y);
    twin_destroy(s, &x);
    free(values);
    return st;
}

typedef struct shape {
    size_t m, n, k;
} shape;

/* The exact integer sums of one product, as the device makes them of int8 digits. */
static ar_status sums_of(smoke *s, int side, const shape *of, const twin *a, const twin *b, const twin *e,
                         const twin *sums)
{
    ar_device *d = s->d[side];
    ar_queue *q = s->q[side];
    const ar_cbuf none = {NULL}, exponents = ar_const(e->at[side]);
    const ar_tensor left = matrix_of(a, side, of->m, of->k), right = matrix_of(b, side, of->n, of->k);
    ar_packed *pa = NULL, *pb = NULL;
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, d->ops->packed_create(d, q, &pa, 1, of->m, of->k, true));
    AR_TRY_TO(done, st, d->ops->packed_create(d, q, &pb, 1, of->n, of->k, false));
    AR_TRY_TO(done, st, d->ops->pack(d, q, pa, 0, 0, &left, none, 1, exponents));
    AR_TRY_TO(done, st, d->ops->pack(d, q, pb, 0, 0, &right, none, -1, exponents));
    AR_TRY_TO(done, st, d->ops->gemm_i64(d, q, sums->at[side], pa, pb, 1, false));
    st = ar_queue_sync(q, 0);
done:
    d->ops->packed_destroy(d, q, pa);
    d->ops->packed_destroy(d, q, pb);
    return st;
}

static ar_status int8_product(smoke *s, const shape *of)
{
    const size_t rows = of->m > of->n ? of->m : of->n;
    twin a = {0}, b = {0}, e = {0}, sums = {0};
    float *values = NULL;
    int32_t *exponents = NULL;
    char what[64];
    ar_status st = AR_OK;
    snprintf(what, sizeof what, "product [%zu, %zu] of %zu terms", of->m, of->n, of->k);
    AR_TRY_TO(done, st, floats(&values, rows * of->k));
    AR_TRY_TO(done, st, ari_alloc((void **)&exponents, rows, sizeof *exponents, "exponents"));
    for (size_t i = 0; i < rows; i++)
        exponents[i] = 2; /* values are below 4 */
    AR_TRY_TO(done, st, twin_create(s, &a, values, of->m * of->k * sizeof(float)));
    AR_TRY_TO(done, st, twin_create(s, &b, values, of->n * of->k * sizeof(float)));
    AR_TRY_TO(done, st, twin_create(s, &e, exponents, rows * sizeof *exponents));
    AR_TRY_TO(done, st, twin_create(s, &sums, NULL, of->m * of->n * sizeof(int64_t)));
    for (int i = 0; i < SIDES; i++)
        AR_TRY_TO(done, st, sums_of(s, i, of, &a, &b, &e, &sums));
    st = twin_compare(s, &sums, what);
done:
    twin_destroy(s, &sums);
    twin_destroy(s, &e);
    twin_destroy(s, &b);
    twin_destroy(s, &a);
    free(exponents);
    free(values);
    return st;
}

static ar_status int8_products(smoke *s)
{
    static const shape shapes[] = {{4, 4, 16},  {1, 4, 16},   {1, 1, 1},       {3, 5, 7},     {17, 36, 48},
                                   {16, 1, 64}, {33, 7, 130}, {128, 128, 128}, {129, 257, 65}};
    ar_status first = AR_OK;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes && first != AR_ERR_DEVICE; i++) {
        const ar_status st = int8_product(s, &shapes[i]);
        if (st == AR_OK)
            continue;
        printf("     %zu x %zu x %zu: %s\n", shapes[i].m, shapes[i].n, shapes[i].k, ar_error_message());
        first = st;
    }
    return first;
}

/* --- all of it ---------------------------------------------------------------------------------------------------- */

static ar_status open_side(smoke *s, int side, const ar_device_choice *which)
{
    AR_TRY(ar_device_create(&s->d[side], which, 1));
    return s->d[side]->ops->queue_create(s->d[side], &s->q[side], AR_QUEUE_INLINE, "smoke");
}

static void close_both(smoke *s)
{
    for (int i = 0; i < SIDES; i++) {
        ar_queue_destroy(s->q[i]);
        ar_device_destroy(s->d[i]);
    }
}

/* One line; the time since *at, which goes on to now. */
static void print_line(const char *name, ar_status st, uint64_t *at)
{
    const uint64_t now = ari_now_ns();
    printf("%-4s %-16s %9.3f ms%s%s\n", st == AR_OK ? "ok" : "FAIL", name, 1e-6 * (double)(now - *at),
           st == AR_OK ? "" : "  ", st == AR_OK ? "" : ar_error_message());
    fflush(stdout);
    *at = now;
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        ar_status (*run)(smoke *s);
    } steps[] = {{"fill", fill},
                 {"shared memory", shared_memory},
                 {"two streams", two_streams},
                 {"pageable memory", pageable_copy},
                 {"int8 products", int8_products}};
    enum { STEPS = sizeof steps / sizeof *steps };
    const char *name = argc > 1 ? argv[1] : "cuda";
    const ar_device_choice cpu = {AR_DEVICE_CPU, 0};
    ar_device_choice which;
    smoke s = {0};
    size_t passed = 0, at = 0;
    if (argc > 2 || ar_device_choice_parse(&which, name) != AR_OK) {
        fprintf(stderr, "usage: gpu_smoke [cuda|cuda:N|emulated]: not '%s'\n", argc > 2 ? argv[2] : name);
        return 2;
    }
    ar_cpu_select_kernels();
    uint64_t clock = ari_now_ns();
    ar_status st = open_side(&s, CPU, &cpu);
    if (st == AR_OK)
        st = open_side(&s, OTHER, &which);
    if (st == AR_OK)
        print_line("the device", st, &clock);
    else
        printf("no device %s: %s\n", name, ar_error_message());
    const bool missing = st != AR_OK;
    for (; at < STEPS && !missing && st != AR_ERR_DEVICE; at++) { /* nothing can follow what ends a GPU's context */
        st = steps[at].run(&s);
        print_line(steps[at].name, st, &clock);
        passed += st == AR_OK;
    }
    close_both(&s);
    if (missing)
        return EXIT_MISSING;
    printf("smoke on %s: %zu of %d passed\n", name, passed, STEPS);
    return passed == STEPS ? 0 : 1;
}

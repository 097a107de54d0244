/* SPDX-License-Identifier: Apache-2.0 */
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "ref/core/tensor_private.h"
#include "tests/cpu/contract_paths.h"

/* The fp32 product against binary64. A sum of k products in fp32, in any order, with or without fused multiply-adds, is
 * within gamma_k = k*u/(1 - k*u) of the sum of magnitudes, u = 2^-24 (Higham, Accuracy and Stability, section 3.1);
 * what is added to it counts as one more term. */

static float *at(const ar_tensor *t, size_t i, size_t j)
{
    return (float *)t->data.ptr + (ptrdiff_t)i * t->stride[0] + (ptrdiff_t)j * t->stride[1];
}

/* One matrix; before: what c held, NULL where it is overwritten. */
static void check_bound(const ar_tensor *c, const ar_tensor *a, const ar_tensor *b, const float *before)
{
    const size_t m = c->shape[0], n = c->shape[1], k = a->shape[1];
    const double terms = (double)k + 1.0, gamma = terms * 0x1p-24 / (1.0 - terms * 0x1p-24);
    for (size_t i = 0; i < m; i++)
        for (size_t j = 0; j < n; j++) {
            double sum = before ? (double)before[i * n + j] : 0.0, size = fabs(sum);
            for (size_t t = 0; t < k; t++) {
                const double product = (double)*at(a, i, t) * (double)*at(b, j, t);
                sum += product;
                size += fabs(product);
            }
            const double error = fabs((double)*at(c, i, j) - sum);
            cr_assert(error <= gamma * size, "c[%zu,%zu] of %zux%zux%zu: error %g, allowed %g", i, j, m, n, k, error,
                      gamma * size);
        }
}

static const struct shape {
    size_t m, n, k;
} shapes[] = {{1, 1, 1},      {3, 5, 7}, {64, 64, 32}, {1, 70, 100}, {70, 1, 100},   {33, 129, 257},
              {150, 64, 100}, {5, 4, 0}, {0, 4, 3},    {4, 0, 3},    {131, 129, 257}}; /* the last by several threads */

Test(native_gemm, is_within_the_bound_for_every_order_of_strides)
{
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
        for (int order = 0; order < 16; order++) {
            const size_t m = shapes[s].m, n = shapes[s].n, k = shapes[s].k;
            OWNED(ar_device_destroy) ar_device *d = device(1 + order % 3);
            OWNED(free) float *a = case_alloc(m * k, 4), *b = case_alloc(n * k, 4), *c = case_alloc(m * n, 4);
            OWNED(free) float *before = case_alloc(m * n, 4);
            case_fill(a, m, k, DATA_PLAIN, 1);
            case_fill(b, n, k, DATA_PLAIN, 2);
            case_fill(before, m, n, DATA_PLAIN, 3);
            ar_tensor av = case_view2(a, m, k), bv = case_view2(b, n, k), cv = case_view2(c, m, n), t;
            t = case_view2(a, k, m);
            av = order & 1 ? ari_tensor_transposed(&t) : av;
            t = case_view2(b, k, n);
            bv = order & 2 ? ari_tensor_transposed(&t) : bv;
            t = case_view2(c, n, m);
            cv = order & 4 ? ari_tensor_transposed(&t) : cv;
            const bool add = order & 8;
            for (size_t i = 0; i < m * n; i++)
                *at(&cv, i / n, i % n) = add ? before[i] : NAN; /* a NaN that is overwritten must not survive */
            cr_assert_ok(d->ops->gemm_f32(d, NULL, &cv, &av, &bv, add, AR_PRECISION_F32));
            check_bound(&cv, &av, &bv, add ? before : NULL);
        }
}

/* Heads: [b, s, h, w] seen as [b, h, s, w]; c likewise permuted. */
Test(native_gemm, runs_a_batch_of_permuted_matrices)
{
    enum { b = 2, s = 180, h = 3, w = 24 }; /* enough for several threads */
    for (int threads = 1; threads <= 3; threads++) {
        OWNED(ar_device_destroy) ar_device *d = device(threads);
        OWNED(free)
        float *q = case_alloc(b * s * h * w, 4), *k = case_alloc(b * s * h * w, 4), *c = case_alloc(b * s * h * s, 4);
        case_fill(q, b * s, h * w, DATA_PLAIN, 1);
        case_fill(k, b * s, h * w, DATA_PLAIN, 2);
        ar_tensor qv = {
            .dtype = AR_F32, .ndim = 4, .shape = {b, h, s, w}, .stride = {s * h * w, w, h * w, 1}, .data = {q}};
        ar_tensor kv = qv;
        kv.data.ptr = k;
        const ar_tensor cv = {
            .dtype = AR_F32, .ndim = 4, .shape = {b, h, s, s}, .stride = {s * h * s, s, h * s, 1}, .data = {c}};
        for (size_t i = 0; i < b * s * h * s; i++)
            c[i] = NAN;
        cr_assert_ok(d->ops->gemm_f32(d, NULL, &cv, &qv, &kv, false, AR_PRECISION_F32));
        for (size_t i = 0; i < b * h; i++) {
            const size_t in = i / h * s * h * w + i % h * w, out = i / h * s * h * s + i % h * s;
            ar_tensor one = {.dtype = AR_F32, .ndim = 2, .shape = {s, w}, .stride = {h * w, 1}, .data = {q + in}};
            ar_tensor two = one;
            two.data.ptr = k + in;
            const ar_tensor three = {
                .dtype = AR_F32, .ndim = 2, .shape = {s, s}, .stride = {h * s, 1}, .data = {c + out}};
            check_bound(&three, &one, &two, NULL);
        }
    }
}

/* Memory whose end is the end of what may be read. */
typedef struct walled {
    char *memory;
    size_t bytes; /* that may be read */
} walled;

static walled wall(void)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    walled w = {.bytes = 4 * page};
    w.memory = mmap(NULL, w.bytes + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    cr_assert(w.memory != MAP_FAILED && mprotect(w.memory + w.bytes, page, PROT_NONE) == 0);
    return w;
}

/* rows x cols numbers that end at the wall. */
static ar_tensor at_the_wall(const walled *w, size_t rows, size_t cols)
{
    return case_view2((float *)(void *)(w->memory + w->bytes) - rows * cols, rows, cols);
}

Test(native_gemm, reads_nothing_behind_its_operands)
{
    const size_t extents[] = {1, 2, 3, 5, 6, 7, 12, 16}, terms[] = {1, 3, 4, 8, 12, 20, 44};
    const walled of_a = wall(), of_b = wall(), of_c = wall();
    ar_device *d = device(1);
    for (size_t i = 0; i < 8 * 8 * 7 * 4; i++) {
        const size_t m = extents[i % 8], n = extents[i / 8 % 8], k = terms[i / 64 % 7], order = i / 448;
        ar_tensor a = at_the_wall(&of_a, order & 1 ? k : m, order & 1 ? m : k);
        ar_tensor b = at_the_wall(&of_b, order & 2 ? k : n, order & 2 ? n : k);
        const ar_tensor c = at_the_wall(&of_c, m, n);
        a = order & 1 ? ari_tensor_transposed(&a) : a;
        b = order & 2 ? ari_tensor_transposed(&b) : b;
        cr_assert_ok(d->ops->gemm_f32(d, NULL, &c, &a, &b, false, AR_PRECISION_F32));
    }
    ar_device_destroy(d);
    const walled *all[] = {&of_a, &of_b, &of_c};
    for (int i = 0; i < 3; i++)
        munmap(all[i]->memory, all[i]->bytes + (size_t)sysconf(_SC_PAGESIZE));
}

Test(native_gemm, the_same_call_gives_the_same_bits)
{
    enum { m = 200, n = 150, k = 300 };
    OWNED(ar_device_destroy) ar_device *d = device(2);
    float *a = case_alloc(m * k, 4), *b = case_alloc(n * k, 4), *c = case_alloc(m * n, 4),
          *again = case_alloc(m * n, 4);
    case_fill(a, m, k, DATA_PLAIN, 1);
    case_fill(b, n, k, DATA_PLAIN, 2);
    const ar_tensor av = case_view2(a, m, k), bv = case_view2(b, n, k), cv = case_view2(c, m, n);
    const ar_tensor againv = case_view2(again, m, n);
    cr_assert_ok(d->ops->gemm_f32(d, NULL, &cv, &av, &bv, false, AR_PRECISION_F32));
    for (int i = 0; i < 20; i++) {
        cr_assert_ok(d->ops->gemm_f32(d, NULL, &againv, &av, &bv, false, AR_PRECISION_F32));
        cr_assert_eq(case_first_difference(again, c, m * n), m * n);
    }
    free(a);
    free(b);
    free(c);
    free(again);
}

enum { CALLERS = 160 };

typedef struct calls {
    pthread_barrier_t begin;
    const float *ones;
    size_t extent;
} calls;

static void *multiply(void *common)
{
    calls *of = common;
    const size_t n = of->extent;
    OWNED(free) float *a = case_alloc(n * n, 4), *c = case_alloc(n * n, 4);
    memcpy(a, of->ones, n * n * sizeof *a);
    const ar_tensor av = case_view2(a, n, n), cv = case_view2(c, n, n);
    OWNED(ar_device_destroy) ar_device *d = device(1);
    pthread_barrier_wait(&of->begin);
    return d->ops->gemm_f32(d, NULL, &cv, &av, &av, false, AR_PRECISION_F32) == AR_OK && c[0] == (float)n ? of : NULL;
}

/* So many threads multiply at once, and all get the right product without a word on standard error. */
static void expect_right_products(unsigned int n)
{
    pthread_t threads[CALLERS];
    const size_t extent = 250;
    OWNED(free) float *ones = case_alloc(extent * extent, 4);
    calls of = {.ones = ones, .extent = extent};
    FILE *errors = tmpfile();
    void *right;
    cr_assert(errors && dup2(fileno(errors), STDERR_FILENO) == STDERR_FILENO);
    cr_assert_eq(pthread_barrier_init(&of.begin, NULL, n), 0);
    for (size_t i = 0; i < extent * extent; i++)
        ones[i] = 1;
    for (unsigned int i = 0; i < n; i++)
        cr_assert_eq(pthread_create(&threads[i], NULL, multiply, &of), 0);
    for (unsigned int i = 0; i < n; i++)
        cr_expect(pthread_join(threads[i], &right) == 0 && right);
    cr_expect_eq(lseek(STDERR_FILENO, 0, SEEK_END), 0);
}

/* Ranks are threads, and a library may have room for fewer. */
Test(native_gemm, may_be_called_by_many_threads)
{
    expect_right_products(CALLERS);
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/cpu/acc_state.h"
#include "tests/cpu/contract_paths.h"
#include "tests/support/contraction.h"

/* Contractions that end in an accumulator, against the two definitions one after the other: each matrix of the batch by
 * ar_contract_definition, each of its values by ari_acc_add. The states are compared, not only their values. */
PATH_SUITE(gemm_acc, .timeout = 300);

typedef struct problem {
    size_t samples, m, n, k;
    float *a, *b; /* [samples, m, k], [samples, n, k] */
} problem;

/* Samples of different magnitudes, so that later ones raise what earlier ones have left. */
static problem problem_create(size_t samples, size_t m, size_t n, size_t k, data_kind kind)
{
    problem p = {samples, m, n, k, case_alloc(samples * m * k, 4), case_alloc(samples * n * k, 4)};
    for (size_t i = 0; i < samples; i++) {
        case_fill(p.a + i * m * k, m, k, kind, 2 * i + 1);
        case_fill(p.b + i * n * k, n, k, DATA_PLAIN, 2 * i + 2);
        for (size_t j = 0; j < n * k; j++)
            p.b[i * n * k + j] *= ari_float32((uint32_t)(107 + 20 * (i % 3)) << 23);
    }
    return p;
}

static void problem_destroy(problem *p)
{
    free(p->a);
    free(p->b);
}

static ar_tensor batch_of(float *x, size_t samples, size_t rows, size_t k)
{
    return (ar_tensor){.dtype = AR_F32,
                       .ndim = 3,
                       .shape = {samples, rows, k},
                       .stride = {(ptrdiff_t)(rows * k), (ptrdiff_t)k, 1},
                       .data = {x}};
}

static void add_on_device(state *s, const problem *p, int threads, bool fresh)
{
    OWNED(ar_device_destroy) ar_device *d = device(threads);
    const ar_tensor a = batch_of(p->a, p->samples, p->m, p->k), b = batch_of(p->b, p->samples, p->n, p->k);
    prepared ready;
    cr_assert_ok(prepared_create(&ready, d, &a, &b, true, false));
    cr_assert_ok(d->ops->gemm_acc(d, NULL, (ar_buf){s->t}, (ar_buf){s->hl}, s->n, s->narrow, ready.a, ready.b,
                                  ar_const(ready.e), ar_const(ready.f), NULL, fresh));
    prepared_destroy(&ready, d);
}

static void add_by_definition(state *s, const problem *p)
{
    const ptrdiff_t k = (ptrdiff_t)p->k;
    OWNED(free) float *y = case_alloc(s->n, 4);
    for (size_t i = 0; i < p->samples; i++) {
        cr_assert_ok(ar_contract_definition(y, p->m, p->n, p->k, p->a + i * p->m * p->k, k, 1, p->b + i * p->n * p->k,
                                            k, 1, true, false));
        for (size_t j = 0; j < s->n; j++)
            add_one(s, j, y[j]);
    }
}

static void spoil(state *s)
{
    memset(s->t, 7, s->n);
    memset(s->hl, 0x55, 2 * s->n * sizeof *s->hl);
}

static void check(size_t samples, size_t m, size_t n, size_t k, data_kind kind, int threads)
{
    SCOPED(problem_destroy) problem p = problem_create(samples, m, n, k, kind);
    SCOPED(state_destroy) state got = state_create(m * n, kind % 2 != 0), want = state_create(m * n, kind % 2 != 0);
    char what[96];
    (void)snprintf(what, sizeof what, "%zu samples, m %zu n %zu k %zu, data %d, %d threads", samples, m, n, k,
                   (int)kind, threads);
    spoil(&got);
    for (int pass = 0; pass < 2; pass++) { /* the second into what the first has left */
        add_on_device(&got, &p, threads, pass == 0);
        add_by_definition(&want, &p);
        same_state(&got, &want, what);
    }
}

PATH_TEST(gemm_acc, leaves_the_state_of_the_definition_for_all_data)
{
    static const struct shape {
        size_t samples, m, n, k;
    } shapes[] = {{1, 5, 7, 3}, {3, 17, 33, 20}, {4, 64, 100, 9}, {7, 1, 40, 64}, {2, 40, 1, 400}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        for (int kind = 0; kind < DATA_KINDS; kind++)
            check(shapes[i].samples, shapes[i].m, shapes[i].n, shapes[i].k, (data_kind)kind, 1 + kind % 3);
}

PATH_TEST(gemm_acc, covers_several_tiles_once_each)
{
    check(2, 521, 30, 3, DATA_PLAIN, 1);
    check(2, 30, 790, 3, DATA_PLAIN, 2);
    check(1, 520, 780, 2, DATA_PLAIN, 3);
}

PATH_TEST(gemm_acc, sums_longer_samples_than_one_integer_holds)
{
    check(2, 3, 4, 8192, DATA_ONES, 1);
    check(2, 3, 2, 70000, DATA_ONES, 2);
    check(1, 2, 3, 8191, DATA_LARGEST, 1);
}

PATH_TEST(gemm_acc, takes_runs_of_terms_as_products_of_their_own)
{
    enum { m = 9, n = 50, k = 310, runs = 4 };
    static const size_t cut[runs + 1] = {0, 40, 40, 47, 300};
    const ar_runs of = {runs, 6, cut};
    SCOPED(problem_destroy) problem p = problem_create(1, m, n, k, DATA_PLAIN);
    SCOPED(state_destroy) state got = state_create(m * n, false), want = state_create(m * n, false);
    OWNED(ar_device_destroy) ar_device *d = device(1);
    const ar_tensor a = batch_of(p.a, 1, m, k), b = batch_of(p.b, 1, n, k);
    const ar_cbuf none = {NULL};
    int32_t e[runs * m], f[runs * n];
    float y[m * n];
    ar_packed *left = NULL, *right = NULL;
    cr_assert_ok(d->ops->packed_create(d, NULL, &left, 1, m, k, AR_PACKED_LEFT));
    cr_assert_ok(d->ops->packed_create(d, NULL, &right, 1, n, k, 0));
    for (size_t i = 0; i < runs; i++) {
        const size_t from = of.first + cut[i], terms = cut[i + 1] - cut[i];
        const ar_tensor x = ar_tensor_slice(&a, 2, from, terms), w = ar_tensor_slice(&b, 2, from, terms);
        const ar_buf ei = {e + i * m}, fi = {f + i * n};
        cr_assert_ok(d->ops->row_exponents(d, NULL, ei, &x, none, +1, false, false));
        cr_assert_ok(d->ops->row_exponents(d, NULL, fi, &w, none, -1, false, false));
        if (terms == 0)
            continue;
        cr_assert_ok(d->ops->pack(d, NULL, left, 0, from, &x, none, +1, ar_const(ei)));
        cr_assert_ok(d->ops->pack(d, NULL, right, 0, from, &w, none, -1, ar_const(fi)));
        cr_assert_ok(ar_contract_definition(y, m, n, terms, p.a + from, k, 1, p.b + from, k, 1, false, false));
        for (size_t j = 0; j < m * n; j++)
            add_one(&want, j, y[j]);
    }
    spoil(&got);
    cr_assert_ok(d->ops->gemm_acc(d, NULL, (ar_buf){got.t}, (ar_buf){got.hl}, m * n, false, left, right, (ar_cbuf){e},
                                  (ar_cbuf){f}, &of, true));
    same_state(&got, &want, "runs");
    d->ops->packed_destroy(d, NULL, left);
    d->ops->packed_destroy(d, NULL, right);
}

PATH_TEST(gemm_acc, leaves_the_state_alone_without_samples)
{
    SCOPED(state_destroy) state got = state_create(6, false), want = state_create(6, false);
    OWNED(ar_device_destroy) ar_device *d = device(1);
    ar_packed *a = NULL, *b = NULL;
    cr_assert_ok(d->ops->packed_create(d, NULL, &a, 0, 2, 4, true));
    cr_assert_ok(d->ops->packed_create(d, NULL, &b, 0, 3, 4, false));
    got.t[3] = want.t[3] = 4;
    got.hl[3] = want.hl[3] = 77;
    cr_assert_ok(d->ops->gemm_acc(d, NULL, (ar_buf){got.t}, (ar_buf){got.hl}, 6, false, a, b, (ar_cbuf){NULL},
                                  (ar_cbuf){NULL}, NULL, false));
    same_state(&got, &want, "no samples");
    d->ops->packed_destroy(d, NULL, a);
    d->ops->packed_destroy(d, NULL, b);
}

PATH_TEST(gemm_acc, refuses_operands_that_do_not_belong_together)
{
    SCOPED(state_destroy) state got = state_create(6, false), want = state_create(6, false);
    OWNED(ar_device_destroy) ar_device *d = device(1);
    ar_packed *a = NULL, *b = NULL;
    const ar_cbuf none = {NULL};
    cr_assert_ok(d->ops->packed_create(d, NULL, &a, 1, 2, 4, true));
    cr_assert_ok(d->ops->packed_create(d, NULL, &b, 2, 3, 4, false));
    cr_expect_eq(d->ops->gemm_acc(d, NULL, (ar_buf){got.t}, (ar_buf){got.hl}, 6, false, a, b, none, none, NULL, false),
                 AR_ERR_SHAPE);
    same_state(&got, &want, "refused");
    d->ops->packed_destroy(d, NULL, a);
    d->ops->packed_destroy(d, NULL, b);
}

/* SPDX-License-Identifier: Apache-2.0 */
#include <pthread.h>

#include "ref/cpu/device.h"
#include "ref/cpu/device_private.h"
#include "tests/cpu/contract_cases.h"
#include "tests/cpu/emulated/emulated.h"
#include "tests/support/scoped.h"

/* Rank threads call the kernels at the same time, each with a device of its own and on operands that they share: the
 * same bits from all of them, and (built with ThreadSanitizer) no race. */
enum { ranks = 4, m = 90, n = 70, k = 400, rounds = 5 };

typedef struct rank_job {
    const float *a, *b;
    float *y;    /* [m, n], exact */
    float *fast; /* [m, n], native */
    uint8_t *t;  /* [n] */
    int64_t *hl; /* [2n] */
    const ari_exact_path *path;
    ar_status st;
} rank_job;

static ar_status run_rank(rank_job *j, ar_device *d, float *a, float *b)
{
    const ar_tensor av = case_view2(a, m, k), bv = case_view2(b, n, k), yv = case_view2(j->y, m, n);
    const ar_tensor fv = case_view2(j->fast, m, n);
    for (int i = 0; i < rounds; i++) {
        AR_TRY(case_product(d, &yv, &av, &bv, true, false));
        AR_TRY(d->ops->gemm_f32(d, NULL, &fv, &av, &bv, false, AR_PRECISION_F32));
        AR_TRY(d->ops->acc_add(d, NULL, (ar_buf){j->t}, (ar_buf){j->hl}, false, 1, &yv, (ar_cbuf){NULL}));
    }
    return AR_OK;
}

static void *rank_main(void *argument)
{
    rank_job *j = argument;
    OWNED(ar_device_destroy) ar_device *d = NULL;
    OWNED(free) float *a = case_alloc(m * k, 4), *b = case_alloc(n * k, 4);
    memcpy(a, j->a, m * k * sizeof *a);
    memcpy(b, j->b, n * k * sizeof *b);
    j->st = ar_device_cpu_create(&d, 1);
    if (j->st == AR_OK) {
        test_take_path(d, j->path);
        j->st = run_rank(j, d, a, b);
    }
    return NULL;
}

/* 0: all ranks agree. The exact result is copied to y. */
static int run_ranks(float *y, const ari_exact_path *path)
{
    OWNED(free) float *a = case_alloc(m * k, 4), *b = case_alloc(n * k, 4);
    case_fill(a, m, k, DATA_SPREAD, 1);
    case_fill(b, n, k, DATA_PLAIN, 2);
    rank_job jobs[ranks];
    pthread_t threads[ranks];
    int bad = 0;
    for (int r = 0; r < ranks; r++) {
        jobs[r] = (rank_job){.a = a,
                             .b = b,
                             .y = case_alloc(m * n, 4),
                             .fast = case_alloc(m * n, 4),
                             .t = case_alloc(n, 1),
                             .hl = case_alloc(2 * n, 8),
                             .path = path};
        if (pthread_create(&threads[r], NULL, rank_main, &jobs[r]) != 0)
            return 1;
    }
    for (int r = 0; r < ranks; r++)
        bad |= pthread_join(threads[r], NULL) != 0 || jobs[r].st != AR_OK;
    for (int r = 0; r < ranks; r++) {
        bad |= memcmp(jobs[r].y, jobs[0].y, m * n * sizeof(float)) != 0;
        bad |= memcmp(jobs[r].t, jobs[0].t, n) != 0 || memcmp(jobs[r].hl, jobs[0].hl, 2 * n * sizeof(int64_t)) != 0;
        free(jobs[r].fast);
    }
    memcpy(y, jobs[0].y, m * n * sizeof *y);
    for (int r = 0; r < ranks; r++) {
        free(jobs[r].y);
        free(jobs[r].t);
        free(jobs[r].hl);
    }
    if (bad)
        (void)fprintf(stderr, "contract_threads: ranks disagree or failed: %s\n", ar_error_message());
    return bad;
}

/* One path; 1 if its ranks disagree, or it with the bits of `first`. */
static int run_path(const ari_exact_path *path, const char *how, const float *first)
{
    float y[m * n];
    (void)printf("%s%s: run on %d threads\n", path->name, how, (int)ranks);
    if (run_ranks(y, path))
        return 1;
    if (memcmp(first, y, sizeof y) == 0)
        return 0;
    (void)fprintf(stderr, "contract_threads: %s%s and portable differ\n", path->name, how);
    return 1;
}

/* Once for every path of the exact product that the machine has, and for those whose instructions are emulated; all
 * give the same bits. */
int main(void)
{
    float first[m * n];
    const ari_exact_path *path = NULL;
    ari_cpu_select_kernels();
    int bad = run_ranks(first, &ari_exact_portable);
    for (size_t i = 0; (path = ari_exact_path_at(i)); i++)
        if (path->supported())
            bad |= run_path(path, "", first);
        else
            (void)printf("%s: not run: this processor has no %s\n", path->name, path->requirement);
    for (size_t i = 0; (path = test_emulated_path_at(i)); i++)
        bad |= run_path(path, ", emulated", first);
    return bad;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Every allocation of a run fails once: the run reports AR_ERR_MEMORY and gives all its memory back. This program's
 * calloc, the only function by which the baseline allocates, stands in for the C library's. A plain main, so that a
 * leak report fails it. */
#include <malloc.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "anyrank/baseline.h"
#include "ref/baseline/perturb.h"
#include "tests/support/small.h"
#include "tests/support/tiny_config.h"

static size_t calls, failing;

/* Through volatile pointers, or the compiler would make these two calls one of calloc. */
static void *(*volatile get)(size_t) = malloc;
static void *(*volatile clear)(void *, int, size_t) = memset;

void *calloc(size_t n, size_t size)
{
    if (++calls == failing || (size != 0 && n > SIZE_MAX / size))
        return NULL;
    void *p = get(n * size);
    return p != NULL ? clear(p, 0, n * size) : NULL;
}

static ar_status ignore(void *user, const char *name, char pass, int ndim, const size_t *shape, const double *values)
{
    (void)user, (void)name, (void)pass, (void)ndim, (void)shape, (void)values;
    return AR_OK;
}

static const int64_t ids[] = {1, 2, 3, 0, 4, 4};
static const ar_batch batch = {.batch = 2, .seq = 3, .input_ids = ids};

/* Forward, backward, nothing else. */
static ar_status run(const ar_config *c, ar_number_mode mode)
{
    const ar_baseline_options o = {.mode = mode, .emit = ignore};
    double loss;
    return ar_baseline_run(c, &o, &batch, &loss);
}

/* Everything that a run may do. */
static ar_status train(const ar_config *c, ar_number_mode mode)
{
    const ar_batch batches[2] = {batch, batch};
    const ar_baseline_options o = {
        .mode = mode,
        .emit = ignore,
        .dropout = 0.25,
        .steps = 2,
        .clip = 1.0,
        .optimizer = {.kind = AR_OPTIMIZER_ADAMW, .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8},
        .noise_seed = mode == AR_MODE_F64};
    double loss[2];
    return ar_baseline_run(c, &o, batches, loss);
}

static ar_status perturb(const ar_config *c, ar_number_mode mode)
{
    const ar_baseline_options o = {.mode = mode};
    ari_perturbation p = {.name = c->arch == AR_ARCH_GPT2    ? "transformer.h.1.ln_2.bias"
                                  : c->arch == AR_ARCH_LLAMA ? "model.layers.1.mlp.up_proj.weight"
                                                             : "layers.1.attn.wo.weight",
                          .delta = 0.5};
    return ari_baseline_perturb(c, &o, &batch, &p, 1);
}

static int check(const ar_config *c, ar_number_mode mode, const char *what,
                 ar_status (*runs)(const ar_config *c, ar_number_mode mode))
{
    calls = failing = 0;
    if (runs(c, mode) != AR_OK)
        return 1;
    const size_t all = calls, before = mallinfo2().uordblks;
    for (size_t at = 1; at <= all; at += (size_t)by_scale(3, 2, 1)) {
        calls = 0;
        failing = at;
        const ar_status st = runs(c, mode);
        const size_t after = mallinfo2().uordblks;
        if (st != AR_ERR_MEMORY || after != before || strstr(ar_error_message(), "no memory") == NULL) {
            fprintf(stderr, "%s, allocation %zu of %zu: %s (%s), %zu bytes before, %zu after\n", what, at, all,
                    ar_status_name(st), ar_error_message(), before, after);
            return 1;
        }
    }
    printf("%s, architecture %d, mode %d: %zu allocations\n", what, (int)c->arch, (int)mode, all);
    return all < 100; /* calloc was not reached */
}

/* malloc counts what a thread's cache keeps back for the next calls as used: this program runs without the cache, and
 * without the threads that OpenBLAS starts when it is loaded, whose allocations would be counted too. */
static int start_again(char **argv)
{
    if (setenv("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0", 1) == 0 && setenv("OPENBLAS_NUM_THREADS", "1", 1) == 0)
        execv("/proc/self/exe", argv);
    perror("baseline_memory_main");
    return 1;
}

int main(int argc, char **argv)
{
    (void)argc;
    if (getenv("GLIBC_TUNABLES") == NULL)
        return start_again(argv);
    const ar_arch archs[] = {AR_ARCH_LLAMA, AR_ARCH_GPT2, AR_ARCH_STACK};
    const ar_number_mode modes[] = {AR_MODE_EXACT, AR_MODE_FP32, AR_MODE_F64};
    printf("every allocation fails once\n");
    for (size_t i = 0; i < 3; i++)
        for (size_t m = 0; m < 3; m++) {
            const ar_config c = tiny_config(archs[i], 2);
            if (check(&c, modes[m], "one pass", run) != 0 || check(&c, modes[m], "training", train) != 0)
                return 1;
            if (modes[m] == AR_MODE_F64 && check(&c, modes[m], "a perturbation", perturb) != 0)
                return 1;
        }
    return 0;
}

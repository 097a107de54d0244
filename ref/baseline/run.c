/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of a run, rounding, and emission. */
#include "ref/baseline/run.h"

#include <stdio.h>
#include <stdlib.h>

#include "ref/core/size.h"
#include "ref/numerics/philox.h"

/* The values follow the link; max_align_t keeps them aligned. */
struct ari_bl_memory {
    _Alignas(max_align_t) ari_bl_memory *below;
};

void *ari_bl_take(ari_bl_run *run, size_t rows, size_t cols, size_t size)
{
    size_t bytes = 0;
    ar_status st = ari_mul_size(&bytes, rows, cols);
    if (st == AR_OK)
        st = ari_mul_size(&bytes, bytes, size);
    if (st != AR_OK) {
        run->memory = st;
        return NULL;
    }
    ari_bl_memory *m = bytes <= SIZE_MAX - sizeof *m ? calloc(1, sizeof *m + bytes) : NULL;
    if (m == NULL) {
        run->memory = ar_error_set(AR_ERR_MEMORY, "baseline: no memory for %zu x %zu values of %zu bytes in '%s'", rows,
                                   cols, size, run->prefix);
        return NULL;
    }
    m->below = run->top;
    run->top = m;
    return m + 1;
}

double *ari_bl_doubles(ari_bl_run *run, size_t rows, size_t cols)
{
    return ari_bl_take(run, rows, cols, sizeof(double));
}

void ari_bl_release(ari_bl_run *run, const ari_bl_memory *mark)
{
    while (run->top != mark) {
        ari_bl_memory *m = run->top;
        run->top = m->below;
        free(m);
    }
}

ar_status ari_bl_each(ari_bl_run *run, size_t n, ar_status (*task)(ari_bl_run *, void *, size_t), void *arg)
{
    const size_t max_threads = run->noise != NULL || run->threads < 1 ? 1 : (size_t)run->threads,
                 threads = n < max_threads ? n : max_threads;
    bool failed = false;
    for (size_t i = 0; threads <= 1 && i < n; i++)
        AR_TRY(task(run, arg, i));
    if (threads <= 1)
        return AR_OK;
#pragma omp parallel for num_threads((int)threads) schedule(static, 1)
    for (size_t t = 0; t < threads; t++) {
        ari_bl_run copy = *run;
        ar_status st = AR_OK;
        copy.top = NULL;
        copy.threads = 1;
        for (size_t i = n * t / threads; st == AR_OK && i < n * (t + 1) / threads; i++)
            st = task(&copy, arg, i);
        ari_bl_release(&copy, NULL);
        if (st != AR_OK) {
#pragma omp atomic write
            failed = true;
        }
    }
    return failed ? ar_error_set(AR_ERR_MEMORY, "baseline: no memory in '%s'", run->prefix) : AR_OK;
}

void ari_bl_scope_end(const ari_bl_scope *s)
{
    ari_bl_release(s->run, s->mark);
}

/* flatten: compiles all called functions for each instruction set too. */
ARI_SIMD __attribute__((flatten)) void ari_bl_noise_refill(ari_bl_noise *noise)
{
    enum { BLOCKS = ARI_BL_NOISE_READY / 4 };
    uint32_t c[4][BLOCKS];
    ari_random_blocks(c[0], BLOCKS, noise->key, noise->used / 4);
    for (size_t i = 0; i < ARI_BL_NOISE_READY; i++)
        noise->ready[i] = 2.0 * ari_random_unit(c[i % 4][i / 4]) - 1.0;
}

/* Returns true if x is a number of p bits, with unit round-off 2^-p: its nearest such number is itself (Veltkamp's
 * splitting). */
static bool is_short(double x, double splitter)
{
    const double t = splitter * x;
    return t - (t - x) == x;
}

void ari_bl_keep_all(const ari_bl_run *run, double *x, size_t n)
{
    for (size_t i = 0; run->o->bf16 && i < n; i++)
        x[i] = ari_bl_keep(run, x[i]);
}

void ari_bl_shorten(ari_bl_noise *noise, double *x, size_t n, double unit)
{
    const double splitter = 0x1p53 * unit + 1.0;
    for (size_t i = 0; unit > 0.0 && i < n; i++)
        if (!is_short(x[i], splitter))
            x[i] += x[i] * unit * ari_bl_noise_uniform(noise);
}

/* Four uniform numbers, each of variance 1/3. */
double ari_bl_noise_normal(ari_bl_noise *noise)
{
    double sum = 0.0;
    for (int i = 0; i < 4; i++)
        sum += ari_bl_noise_uniform(noise);
    return sum * 0x1.bb67ae8584caap-1; /* sqrt(3/4) */
}

void ari_bl_name(const ari_bl_run *run, char name[ARI_BL_NAME_SIZE], const char *part)
{
    const bool has_separator = run->prefix[0] != '\0' && part[0] != '\0';
    snprintf(name, ARI_BL_NAME_SIZE, "%s%s%s", run->prefix, has_separator ? "." : "", part);
}

ar_status ari_bl_emit(ari_bl_run *run, const char *part, char pass, int ndim, const size_t *shape, const double *values)
{
    if (run->o->emit == NULL)
        return AR_OK;
    char name[ARI_BL_NAME_SIZE];
    ari_bl_name(run, name, part);
    return run->o->emit(run->o->emit_user, name, pass, ndim, shape, values);
}

ar_status ari_bl_emit_tokens(ari_bl_run *run, const char *part, char pass, const double *x, size_t ld, size_t first_col,
                             size_t features)
{
    if (run->o->emit == NULL)
        return AR_OK;
    const size_t shape[3] = {run->b, run->s, features};
    if (ld == features)
        return ari_bl_emit(run, part, pass, 3, shape, x);
    ARI_BL_SCOPE(run);
    double *copy = ari_bl_doubles(run, run->tokens, features);
    AR_TRY(run->memory);
    for (size_t t = 0; t < run->tokens; t++)
        for (size_t i = 0; i < features; i++)
            copy[t * features + i] = x[t * ld + first_col + i];
    return ari_bl_emit(run, part, pass, 3, shape, copy);
}

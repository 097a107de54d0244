/* SPDX-License-Identifier: Apache-2.0 */
/* Which options a benchmark has: one that it would ignore is refused, so that no figure is taken for what it is not. */
#include <string.h>

#include "bench/bench.h"

/* True if `what` is a word of a list like "block and ddp". */
static bool is_one_of(const char *list, const char *what)
{
    const size_t n = strlen(what);
    for (const char *at = strstr(list, what); at; at = strstr(at + n, what)) {
        if ((at == list || at[-1] == ' ') && (at[n] == '\0' || at[n] == ',' || at[n] == ' '))
            return true;
    }
    return false;
}

ar_status ari_bench_check(const ari_bench_options *v)
{
    const ar_run *run = &v->r.run;
    const struct {
        const char *option;
        bool given;
        const char *by;
    } rows[] = {{"a model", v->model != NULL, "block and ddp"},
                {"--m", v->m > 0, "gemm and kernels"},
                {"--n", v->n > 0, "gemm and kernels"},
                {"--k", v->k > 0, "gemm"},
                {"--batch", run->batch > 0, "gemm, block and ddp"},
                {"--seq", run->seq > 0, "block and ddp"},
                {"--numerics", (int)run->numerics >= 0, "ddp"},
                {"--precision", run->precision != AR_PRECISION_F32, "block"},
                {"--size", v->block_size >= 0, "block"},
                {"--profile", v->profile, "block"},
                {"--cluster", v->cluster != NULL, "ddp"},
                {"--paced", v->paced, "ddp"},
                {"--device", v->r.device != NULL, "gemm, kernels, block and ddp"},
                {"--ranks", v->ranks > 0, "allreduce"},
                {"--bytes", v->bytes > 0, "allreduce"},
                {"--dtype", v->dtype >= 0, "allreduce"},
                {"--algorithm", v->algorithm > 0, "allreduce"},
                {"--dp", run->parallel.dp > 0, "ddp"}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        if (rows[i].given && !is_one_of(rows[i].by, v->what))
            return ar_error_set(AR_ERR_ARG, "bench %s has no use for %s: it is for bench %s", v->what, rows[i].option,
                                rows[i].by);
    }
    if (v->model && v->block_size >= 0)
        return ar_error_set(AR_ERR_ARG, "bench block: --size is of its own blocks, not of the model %.100s", v->model);
    ari_run_values r = v->r;
    if (strcmp(v->what, "block") == 0)
        r.run.numerics = AR_NUMERICS_NATIVE; /* both; the precision is the native one's */
    return v->r.device ? ari_layout_check(&r) : AR_OK;
}

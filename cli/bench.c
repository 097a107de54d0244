/* SPDX-License-Identifier: Apache-2.0 */
/* anyrank bench gemm: ratios measured side by side in one run. */
#include <stdio.h>
#include <string.h>

#include "bench/gemm.h"
#include "cli/command.h"
#include "cli/main.h"
#include "cli/progress.h"
#include "cli/table.h"
#include "ref/io/json.h"

typedef struct bench_values {
    ari_common common;
    const char *what;
    size_t m, n, k, batch;
    int repetitions;
} bench_values;

static const ari_option options[] = {
    {.name = "m",
     .kind = ARI_OPT_SIZE,
     .at = offsetof(bench_values, m),
     .min = 1,
     .max = 1e6,
     .value = "M",
     .help = "rows of X; with --n and --k: one shape in place of the default ones"},
    {.name = "n",
     .kind = ARI_OPT_SIZE,
     .at = offsetof(bench_values, n),
     .min = 1,
     .max = 1e6,
     .value = "N",
     .help = "rows of W"},
    {.name = "k",
     .kind = ARI_OPT_SIZE,
     .at = offsetof(bench_values, k),
     .min = 1,
     .max = 1e6,
     .value = "K",
     .help = "columns of both"},
    {.name = "batch",
     .kind = ARI_OPT_SIZE,
     .at = offsetof(bench_values, batch),
     .min = 1,
     .max = 1e6,
     .value = "B",
     .help = "matrices of that shape (default 1)"},
    {.name = "repetitions",
     .kind = ARI_OPT_INT,
     .at = offsetof(bench_values, repetitions),
     .min = 1,
     .max = 1000,
     .value = "R",
     .help = "of which the medians are told (default 7)"},
    {0},
};

static const ari_positional positionals[] = {
    {.name = "WHAT",
     .at = offsetof(bench_values, what),
     .required = true,
     .help = "gemm (allreduce, block, step: not in this version)"},
    {0},
};

static const ari_args_spec spec = {
    .command = "bench",
    .summary = "Times contractions: exact against native, interleaved in one run.",
    .example = "anyrank bench gemm\nanyrank bench gemm --m 1024 --n 768 --k 3072 --threads 1",
    .options = options,
    .positionals = positionals,
    .common_at = offsetof(bench_values, common),
};

static ar_status shapes_of(const bench_values *v, ar_bench_gemm_row *rows, size_t *n)
{
    const int given = (v->m > 0) + (v->n > 0) + (v->k > 0);
    if (given != 0 && given != 3)
        return ar_error_set(AR_ERR_ARG, "--m, --n and --k go together");
    *n = given ? 1 : ARI_BENCH_GEMM_SHAPES;
    if (given)
        rows[0] = (ar_bench_gemm_row){.batch = v->batch ? v->batch : 1, .m = v->m, .n = v->n, .k = v->k};
    else
        memcpy(rows, ari_bench_gemm_shapes, sizeof ari_bench_gemm_shapes);
    return AR_OK;
}

static ar_status print(const ar_bench_gemm_row *rows, size_t n, int threads)
{
    static const ari_column columns[] = {{"batch", ARI_RIGHT},
                                         {"m", ARI_RIGHT},
                                         {"n", ARI_RIGHT},
                                         {"k", ARI_RIGHT},
                                         {"native GF/s", ARI_RIGHT},
                                         {"exact/native", ARI_RIGHT},
                                         {"weights prepared", ARI_RIGHT},
                                         {"spread", ARI_RIGHT}};
    ari_table *t = NULL;
    AR_TRY(ari_table_create(&t, columns, sizeof columns / sizeof *columns));
    for (size_t i = 0; i < n; i++) {
        ari_table_cell(t, "%zu", rows[i].batch);
        ari_table_cell(t, "%zu", rows[i].m);
        ari_table_cell(t, "%zu", rows[i].n);
        ari_table_cell(t, "%zu", rows[i].k);
        ari_table_cell(t, "%.1f", rows[i].native_gflops);
        ari_table_cell(t, "%.2f", rows[i].exact_over_native);
        ari_table_cell(t, "%.2f", rows[i].exact_over_native_prepared);
        ari_table_cell(t, "%.0f %%", 100.0 * rows[i].spread);
    }
    const ar_status st = ari_table_print(t, stdout, 0);
    ari_table_destroy(t);
    printf(
        "\nY[m,n] = X[m,k] W[n,k]^T, %d thread%s; time of the exact product over that of sgemm, medians. 'weights\n"
        "prepared': W's exponents and integers were made before, as in a training step. 'spread': of the repetitions'\n"
        "exact/native, (largest - smallest)/median.\n",
        threads, threads == 1 ? "" : "s");
    return st;
}

static json_t *as_json(const ar_bench_gemm_row *rows, size_t n, int threads)
{
    json_t *list = json_array(), *o = ari_json_begin("bench");
    for (size_t i = 0; i < n; i++)
        json_array_append_new(list, json_pack("{s:I, s:I, s:I, s:I, s:o, s:o, s:o, s:o}", "batch",
                                              (json_int_t)rows[i].batch, "m", (json_int_t)rows[i].m, "n",
                                              (json_int_t)rows[i].n, "k", (json_int_t)rows[i].k, "native_gflops",
                                              ari_json_number(rows[i].native_gflops), "exact_over_native",
                                              ari_json_number(rows[i].exact_over_native), "exact_over_native_prepared",
                                              ari_json_number(rows[i].exact_over_native_prepared), "spread",
                                              ari_json_number(rows[i].spread)));
    json_object_set_new(o, "what", json_string("gemm"));
    json_object_set_new(o, "threads", json_integer(threads));
    if (json_object_set_new(o, "rows", list) != 0) {
        json_decref(o);
        return NULL;
    }
    return o;
}

static ar_status run(const bench_values *v)
{
    ar_bench_gemm_row rows[ARI_BENCH_GEMM_SHAPES];
    size_t n = 0;
    const int threads = v->common.threads > 0 ? v->common.threads : 1;
    if (strcmp(v->what, "allreduce") == 0 || strcmp(v->what, "block") == 0 || strcmp(v->what, "step") == 0)
        return ar_error_set(AR_ERR_UNSUPPORTED, "bench %s: not in this version", v->what);
    if (strcmp(v->what, "gemm") != 0)
        return ar_error_set(AR_ERR_ARG, "there is no benchmark '%s'; 'gemm' is one", v->what);
    AR_TRY(shapes_of(v, rows, &n));
    ari_progress p;
    ari_progress_begin(&p, v->common.quiet);
    ar_status st = AR_OK;
    for (size_t i = 0; i < n && st == AR_OK; i++) {
        ari_progress_update(&p, (double)i / (double)n, "bench gemm");
        st = ari_bench_gemm(&rows[i], threads, (size_t)v->repetitions);
    }
    ari_progress_end(&p);
    AR_TRY(st);
    if (ari_wants_text(&v->common))
        AR_TRY(print(rows, n, threads));
    return ari_json_end(as_json(rows, n, threads), &v->common);
}

int ari_command_bench(int argc, char **argv)
{
    bench_values v = {.repetitions = 7};
    int exit_code = ARI_EXIT_SAME;
    if (!ari_args_begin(&spec, argc, argv, &v, &exit_code))
        return exit_code;
    const ar_status st = run(&v);
    if (st != AR_OK)
        ari_print_error("bench", st);
    return ari_exit_code(st);
}

/* SPDX-License-Identifier: Apache-2.0 */
/* anyrank bench: ratios measured side by side in one run. */
#include <stdio.h>
#include <string.h>

#include "cli/bench_report.h"
#include "cli/main.h"
#include "cli/progress.h"
#include "ref/core/budget.h"

#define BLOCKS ((size_t)2)

typedef struct bench_values {
    ari_common common;
    const char *what;
    size_t m, n, k, batch, seq;
    int repetitions; /* 0: not given */
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
     .help = "gemm: matrices of that shape (default 1); block: sequences (default 2)"},
    {.name = "seq",
     .kind = ARI_OPT_SIZE,
     .at = offsetof(bench_values, seq),
     .min = 1,
     .max = 4096,
     .value = "S",
     .help = "block: tokens of a sequence (default 512)"},
    {.name = "repetitions",
     .kind = ARI_OPT_INT,
     .at = offsetof(bench_values, repetitions),
     .min = 1,
     .max = 1000,
     .value = "R",
     .help = "of which the medians are told (default 7; block 15)"},
    {0},
};

static const ari_positional positionals[] = {
    {.name = "WHAT",
     .at = offsetof(bench_values, what),
     .required = true,
     .help = "gemm or block (allreduce, step: not in this version)"},
    {0},
};

static const ari_args_spec spec = {
    .command = "bench",
    .summary = "Times exact arithmetic against native, interleaved in one run.",
    .example = "anyrank bench gemm\nanyrank bench gemm --m 1024 --n 768 --k 3072 --threads 1\nanyrank bench block",
    .options = options,
    .positionals = positionals,
    .common_at = offsetof(bench_values, common),
};

static size_t repetitions_of(const bench_values *v)
{
    return v->repetitions > 0 ? (size_t)v->repetitions : strcmp(v->what, "gemm") == 0 ? 7 : 15;
}

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

static ar_status end(json_t *rows, const bench_values *v, int threads)
{
    json_t *o = ari_json_begin("bench");
    json_object_set_new(o, "what", json_string(v->what));
    json_object_set_new(o, "threads", json_integer(threads));
    if (json_object_set_new(o, "rows", rows) != 0) {
        json_decref(o);
        return ari_json_end(NULL, &v->common);
    }
    return ari_json_end(o, &v->common);
}

static ar_status run_gemm(const bench_values *v)
{
    ar_bench_gemm_row rows[ARI_BENCH_GEMM_SHAPES];
    size_t n = 0;
    const int threads = v->common.threads > 0 ? v->common.threads : 1;
    AR_TRY(shapes_of(v, rows, &n));
    ari_progress p;
    ari_progress_begin(&p, v->common.quiet);
    ar_status st = AR_OK;
    for (size_t i = 0; i < n && st == AR_OK; i++) {
        ari_progress_update(&p, (double)i / (double)n, "bench gemm");
        st = ari_bench_gemm(&rows[i], threads, repetitions_of(v));
    }
    ari_progress_end(&p);
    AR_TRY(st);
    if (ari_wants_text(&v->common))
        AR_TRY(ari_bench_print_gemm(rows, n, threads));
    return end(ari_bench_json_gemm(rows, n), v, threads);
}

static ar_status run_grad(const bench_values *v)
{
    ar_bench_grad_row rows[ARI_BENCH_GRAD_SHAPES];
    const int threads = v->common.threads > 0 ? v->common.threads : 1;
    ari_progress p;
    ari_progress_begin(&p, v->common.quiet);
    ar_status st = AR_OK;
    for (size_t i = 0; i < ARI_BENCH_GRAD_SHAPES && st == AR_OK; i++) {
        ari_progress_update(&p, (double)i / ARI_BENCH_GRAD_SHAPES, "bench grad");
        rows[i] = ari_bench_grad_shapes[i];
        st = ari_bench_grad(&rows[i], threads, repetitions_of(v));
    }
    ari_progress_end(&p);
    AR_TRY(st);
    if (ari_wants_text(&v->common))
        AR_TRY(ari_bench_print_grad(rows, ARI_BENCH_GRAD_SHAPES, threads));
    return end(ari_bench_json_grad(rows, ARI_BENCH_GRAD_SHAPES), v, threads);
}

static ar_status run_block(const bench_values *v)
{
    ari_bench_block_line lines[2 * BLOCKS];
    const int threads = v->common.threads > 0 ? v->common.threads : ari_cores();
    size_t n = 0;
    ari_progress p;
    ari_progress_begin(&p, v->common.quiet);
    ar_status st = AR_OK;
    for (size_t i = 0; ari_bench_block_config(i) && n < 2 * BLOCKS && st == AR_OK; i++) {
        const ar_config *config = ari_bench_block_config(i);
        ar_bench_block_row rows[2] = {0};
        ari_progress_update(&p, (double)n / (2 * BLOCKS), "bench block");
        const size_t batch = v->batch ? v->batch : 2, seq = v->seq ? v->seq : 512;
        st = ari_bench_block(rows, config, batch, seq, threads, repetitions_of(v));
        for (size_t k = 0; k < 2; k++)
            lines[n++] = (ari_bench_block_line){config->name, k == 0 ? "native" : "exact", batch, seq, rows[k]};
    }
    ari_progress_end(&p);
    AR_TRY(st);
    if (ari_wants_text(&v->common))
        AR_TRY(ari_bench_print_block(lines, n, threads));
    return end(ari_bench_json_block(lines, n), v, threads);
}

static ar_status run(const bench_values *v)
{
    if (strcmp(v->what, "gemm") == 0)
        return run_gemm(v);
    if (strcmp(v->what, "grad") == 0)
        return run_grad(v);
    if (strcmp(v->what, "block") == 0)
        return run_block(v);
    if (strcmp(v->what, "allreduce") == 0 || strcmp(v->what, "step") == 0)
        return ar_error_set(AR_ERR_UNSUPPORTED, "bench %s: not in this version", v->what);
    return ar_error_set(AR_ERR_ARG, "there is no benchmark '%s'; 'gemm' and 'block' are two", v->what);
}

int ari_command_bench(int argc, char **argv)
{
    bench_values v = {0};
    int exit_code = ARI_EXIT_SAME;
    if (!ari_args_begin(&spec, argc, argv, &v, &exit_code))
        return exit_code;
    const ar_status st = run(&v);
    if (st != AR_OK)
        ari_print_error("bench", st);
    return ari_exit_code(st);
}

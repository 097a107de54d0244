/* SPDX-License-Identifier: Apache-2.0 */
/* anyrank bench: ratios measured side by side in one run. */
#include <stdlib.h>
#include <string.h>

#include "cli/bench_report.h"
#include "cli/command.h"
#include "cli/options/layout.h"
#include "cli/progress.h"
#include "ref/core/budget.h"
#include "run/run.h"
#include "verify/check/text_batch.h"

#define BLOCKS ((size_t)2)

typedef struct bench_values {
    ari_common common;
    const char *what, *model;
    ari_layout_values layout;
    size_t m, n, k, batch, seq, bytes;
    int ranks;       /* 0: not given */
    int dtype;       /* -1: not given */
    int algorithm;   /* ar_sim_algorithm */
    int repetitions; /* 0: not given */
} bench_values;

#define ARI_VALUES bench_values
static const ari_option options[] = {
    ARI_OPTION_SIZE("m", m, 1, 1e6, "M", "rows of X; with --n and --k: one shape in place of the default ones"),
    ARI_OPTION_SIZE("n", n, 1, 1e6, "N", "rows of W"),
    ARI_OPTION_SIZE("k", k, 1, 1e6, "K", "columns of both"),
    ARI_OPTION_SIZE("batch", batch, 1, 1e6, "B",
                    "gemm: matrices of that shape (default 1); block, step, ddp: sequences (default 2, 8, 8)"),
    ARI_OPTION_SIZE("seq", seq, 1, 4096, "S", "block, step, ddp: tokens of a sequence (default 512, 64, 64)"),
    ARI_OPTION_INT("repetitions", repetitions, 1, 1000, "R",
                   "of which the medians are told (default 7; block, step, allreduce 15)"),
    ARI_OPTION_INT("ranks", ranks, 2, 4096, "N", "allreduce: simulated ranks (default: 2, 4 and 8)"),
    ARI_OPTION_SIZE("bytes", bytes, 1, 1e12, "D",
                    "allreduce: bytes of each rank's input (default: seven sizes, 1 KiB to 100 MiB)",
                    .more = "The sizes are 1 KiB, 4 KiB, 16 KiB, 64 KiB, 1 MiB, 25 MiB and 100 MiB."),
    ARI_OPTION_ENUM("dtype", dtype, ari_bench_dtype_names, "allreduce: what is summed (default: both)"),
    ARI_OPTION_ENUM("algorithm", algorithm, ari_bench_algorithm_names,
                    "allreduce: how data moves (default auto: last for short messages, else direct)"),
    ARI_LAYOUT_OPTIONS("step: tensor-parallel ranks (default 4 where no layout is given)",
                       "step: exact or native (default: both)"),
    ARI_OPTION_GROUP(ari_step_layout_options, layout),
    ARI_OPTION_ENUM("precision", layout.precision, ari_precision_names,
                    "block: what the native one multiplies: f32, tf32 or bf16; sums and all else fp32 (default f32)"),
    ARI_OPTION_LATER("zero"),
    {0},
};

static const char *const benchmarks[] = {"gemm", "grad", "block", "step", "ddp", "allreduce", NULL};

static const ari_positional positionals[] = {
    {.name = "WHAT",
     .at = offsetof(bench_values, what),
     .required = true,
     .help = "gemm, grad, block, step, ddp or allreduce",
     .choices = benchmarks},
    {.name = "MODEL",
     .at = offsetof(bench_values, model),
     .help = "step, ddp: as check has it (default llama-demo); block: the model whose block is timed",
     .kind = ARI_OPT_FOLDER,
     .choices = ari_model_names},
    {0},
};

static size_t repetitions_of(const bench_values *v)
{
    return v->repetitions > 0                                            ? (size_t)v->repetitions
           : strcmp(v->what, "gemm") == 0 || strcmp(v->what, "ddp") == 0 ? 7
                                                                         : 15;
}

static ar_status shapes_of(const bench_values *v, const ar_device_choice *device, ar_bench_gemm_row *rows, size_t *n)
{
    const int given = (v->m > 0) + (v->n > 0) + (v->k > 0);
    if (given != 0 && given != 3)
        return ar_error_set(AR_ERR_ARG, "--m, --n and --k go together");
    *n = given ? 1 : ARI_BENCH_GEMM_SHAPES;
    if (given)
        rows[0] = (ar_bench_gemm_row){.batch = v->batch ? v->batch : 1, .m = v->m, .n = v->n, .k = v->k};
    else
        memcpy(rows, ari_bench_gemm_shapes_for(device), sizeof ari_bench_gemm_shapes);
    return AR_OK;
}

/* threads 0: each row has its own. */
static ar_status end(json_t *rows, const bench_values *v, int threads)
{
    json_t *o = ari_json_begin("bench");
    json_object_set_new(o, "what", json_string(v->what));
    const ar_device_choice device = ari_layout_device(&v->layout);
    ari_device_json(o, &device);
    if (threads > 0)
        json_object_set_new(o, "threads", json_integer(threads));
    if (json_object_set_new(o, "rows", rows) != 0) {
        json_decref(o);
        return ari_json_end(NULL, &v->common);
    }
    return ari_json_end(o, &v->common);
}

static ar_status run_gemm(const bench_values *v)
{
    const ar_device_choice device = ari_layout_device(&v->layout);
    ar_bench_gemm_row rows[ARI_BENCH_GEMM_SHAPES];
    size_t n = 0;
    const int threads = v->common.threads > 0 ? v->common.threads : 1;
    AR_TRY(shapes_of(v, &device, rows, &n));
    ari_progress p;
    ari_progress_begin(&p, v->common.quiet);
    ar_status st = AR_OK;
    for (size_t i = 0; i < n && st == AR_OK; i++) {
        ari_progress_update(&p, (double)i / (double)n, "bench gemm");
        st = ari_bench_gemm(&rows[i], &device, threads, repetitions_of(v));
    }
    ari_progress_end(&p);
    AR_TRY(st);
    if (ari_wants_text(&v->common))
        AR_TRY(ari_bench_print_gemm(rows, n, threads));
    return end(ari_bench_json_gemm(rows, n), v, threads);
}

static ar_status run_grad(const bench_values *v)
{
    const ar_device_choice device = ari_layout_device(&v->layout);
    ar_bench_grad_row rows[ARI_BENCH_GRAD_SHAPES];
    const int threads = v->common.threads > 0 ? v->common.threads : 1;
    ari_progress p;
    ari_progress_begin(&p, v->common.quiet);
    ar_status st = AR_OK;
    for (size_t i = 0; i < ARI_BENCH_GRAD_SHAPES && st == AR_OK; i++) {
        ari_progress_update(&p, (double)i / ARI_BENCH_GRAD_SHAPES, "bench grad");
        rows[i] = ari_bench_grad_shapes[i];
        st = ari_bench_grad(&rows[i], &device, threads, repetitions_of(v));
    }
    ari_progress_end(&p);
    AR_TRY(st);
    if (ari_wants_text(&v->common))
        AR_TRY(ari_bench_print_grad(rows, ARI_BENCH_GRAD_SHAPES, threads));
    return end(ari_bench_json_grad(rows, ARI_BENCH_GRAD_SHAPES), v, threads);
}

static ar_status config_of_model(const char *model, ar_config *config)
{
    char folder[512];
    AR_TRY(ar_model_path(folder, sizeof folder, model));
    return ar_config_load(config, folder);
}

/* Number i of the blocks to time: the model's, where one is given; NULL after the last. */
static const ar_config *block_at(const bench_values *v, const ar_config *own, size_t i)
{
    if (v->model)
        return i == 0 ? own : NULL;
    return ari_bench_block_config(i);
}

static ar_status run_block(const bench_values *v)
{
    const ar_device_choice device = ari_layout_device(&v->layout);
    ari_bench_block_line lines[2 * BLOCKS];
    const int threads = v->common.threads > 0 ? v->common.threads : ari_cores();
    size_t n = 0;
    ari_progress p;
    ari_progress_begin(&p, v->common.quiet);
    ar_status st = AR_OK;
    ar_config own;
    if (v->model)
        st = config_of_model(v->model, &own);
    for (size_t i = 0; block_at(v, &own, i) && n < 2 * BLOCKS && st == AR_OK; i++) {
        const ar_config *config = block_at(v, &own, i);
        ar_bench_block_row rows[2] = {0};
        ari_progress_update(&p, (double)n / (2 * BLOCKS), "bench block");
        const size_t batch = v->batch ? v->batch : 2, seq = v->seq ? v->seq : 512;
        st = ari_bench_block(rows, config, batch, seq, &device, (ar_precision)v->layout.precision, threads,
                             repetitions_of(v));
        for (size_t k = 0; k < 2; k++)
            lines[n++] = (ari_bench_block_line){config->name, k == 0 ? "native" : "exact", batch, seq, rows[k]};
    }
    ari_progress_end(&p);
    AR_TRY(st);
    if (ari_wants_text(&v->common))
        AR_TRY(ari_bench_print_block(lines, n, threads));
    return end(ari_bench_json_block(lines, n), v, threads);
}

/* One rank and the layout, in the numerics asked for or in both. */
static ar_status run_numerics(const bench_values *v, ar_bench_step_options *o)
{
    static const ar_numerics all[] = {AR_NUMERICS_NATIVE, AR_NUMERICS_EXACT};
    ari_bench_step_line lines[4];
    ar_status st = AR_OK;
    size_t n = 0;
    ari_progress p;
    ari_progress_begin(&p, v->common.quiet);
    for (size_t i = 0; i < 2 && st == AR_OK; i++) {
        if (v->layout.numerics >= 0 && (ar_numerics)v->layout.numerics != all[i])
            continue;
        ar_bench_step_row row[2] = {0};
        ari_progress_update(&p, (double)n / 4.0, "bench step");
        o->run.numerics = all[i];
        st = ari_bench_step(row, o);
        lines[n++] = (ari_bench_step_line){.parallel = {.tp = 1}, .numerics = all[i], .row = row[0]};
        lines[n++] = (ari_bench_step_line){.parallel = o->run.parallel, .numerics = all[i], .row = row[1]};
    }
    ari_progress_end(&p);
    AR_TRY(st);
    if (ari_wants_text(&v->common))
        AR_TRY(ari_bench_print_step(lines, n, o));
    return end(ari_bench_json_step(lines, n, o), v, o->run.threads);
}

static ar_status run_step(const bench_values *v)
{
    char folder[512];
    ar_config c;
    int64_t *ids = NULL;
    ar_bench_step_options o = {
        .config = &c,
        .run.parallel = {.tp = 4},
        .run.batch = v->batch ? v->batch : 8,
        .run.seq = v->seq ? v->seq : 64,
        .run.sim = {.algorithm = ari_layout_algorithm(&v->layout), .timeout_ns = ari_layout_timeout_ns(&v->layout)},
        .run.device = ari_layout_device(&v->layout),
        .run.threads = v->common.threads > 0 ? v->common.threads : ari_cores(),
        .repetitions = repetitions_of(v)};
    AR_TRY(ari_layout_check(&v->layout));
    AR_TRY(ari_run_config(&c, folder, sizeof folder, v->model ? v->model : "llama-demo"));
    AR_TRY(ari_layout_plan(&v->layout, c.arch, &o.run.plan));
    if (ari_layout_given(&v->layout))
        o.run.parallel = ari_layout_parallel(&v->layout);
    AR_TRY(ari_text_ids(&ids, o.run.batch, o.run.seq, c.vocab, NULL, v->common.seed));
    o.input_ids = ids;
    const ar_status st = run_numerics(v, &o);
    free(ids);
    return st;
}

/* The step without DDP, then every capacity, eager and overlapped. */
#define DDP_CAPACITIES ((size_t)6)
static size_t ddp_rows(ar_bench_ddp_row *rows)
{
    static const size_t capacities[DDP_CAPACITIES] = {0, 65536, 262144, 1048576, 4194304, AR_BUCKET_BYTES};
    size_t n = 1;
    for (size_t i = 0; i < DDP_CAPACITIES; i++) {
        rows[n++] = (ar_bench_ddp_row){.bucket_bytes = capacities[i], .mode = AR_BUCKETS_EAGER};
        rows[n++] = (ar_bench_ddp_row){.bucket_bytes = capacities[i], .mode = AR_BUCKETS_OVERLAP};
    }
    return n;
}

static ar_status run_ddp(const bench_values *v)
{
    char folder[512];
    ar_config c;
    int64_t *ids = NULL;
    ar_bench_ddp_row rows[1 + 2 * DDP_CAPACITIES];
    const size_t n = ddp_rows(rows);
    const ar_parallel parallel = ari_layout_parallel(&v->layout);
    ar_bench_ddp_options o = {
        .config = &c,
        .run.parallel = {.dp = parallel.dp > 1 ? parallel.dp : 2},
        .run.batch = v->batch ? v->batch : 8,
        .run.seq = v->seq ? v->seq : 64,
        .run.numerics = v->layout.numerics >= 0 ? (ar_numerics)v->layout.numerics : AR_NUMERICS_NATIVE,
        .run.sim = {.algorithm = ari_layout_algorithm(&v->layout), .timeout_ns = ari_layout_timeout_ns(&v->layout)},
        .run.device = ari_layout_device(&v->layout),
        .run.threads = v->common.threads > 0 ? v->common.threads : ari_cores(),
        .repetitions = repetitions_of(v)};
    AR_TRY(ari_layout_check(&v->layout));
    if (parallel.tp > 1 || parallel.micro_batches > 1)
        return ar_error_set(AR_ERR_ARG, "bench ddp splits the samples alone: use --dp");
    AR_TRY(ari_run_config(&c, folder, sizeof folder, v->model ? v->model : "llama-demo"));
    AR_TRY(ari_layout_plan(&v->layout, c.arch, &o.run.plan));
    AR_TRY(ari_text_ids(&ids, o.run.batch, o.run.seq, c.vocab, NULL, v->common.seed));
    o.input_ids = ids;
    ari_progress p;
    ari_progress_begin(&p, v->common.quiet);
    ari_progress_update(&p, 0.0, "bench ddp");
    ar_status st = ari_bench_ddp(rows, n, &o);
    ari_progress_end(&p);
    free(ids);
    AR_TRY(st);
    if (ari_wants_text(&v->common))
        AR_TRY(ari_bench_print_ddp(rows, n, &o));
    return end(ari_bench_json_ddp(rows, n, &o), v, o.run.threads);
}

/* The rows that the options ask for: every number of ranks, of every type, in every size. */
static size_t allreduce_rows(const bench_values *v, ar_bench_allreduce_row *rows)
{
    static const int ranks[] = {2, 4, 8};
    static const ar_dtype dtypes[] = {AR_F32, AR_I64};
    size_t n = 0;
    for (size_t r = 0; r < (v->ranks ? 1 : sizeof ranks / sizeof *ranks); r++)
        for (size_t t = 0; t < (v->dtype >= 0 ? 1 : sizeof dtypes / sizeof *dtypes); t++)
            for (size_t s = 0; s < (v->bytes ? 1 : ARI_BENCH_ALLREDUCE_SIZES); s++)
                rows[n++] = (ar_bench_allreduce_row){.ranks = v->ranks ? v->ranks : ranks[r],
                                                     .bytes = v->bytes ? v->bytes : ari_bench_allreduce_sizes[s],
                                                     .dtype = dtypes[v->dtype >= 0 ? (size_t)v->dtype : t],
                                                     .algorithm = (ar_sim_algorithm)v->algorithm};
    return n;
}

static ar_status run_allreduce(const bench_values *v)
{
    ar_bench_allreduce_row rows[3 * 2 * ARI_BENCH_ALLREDUCE_SIZES];
    const size_t n = allreduce_rows(v, rows);
    ar_status st = AR_OK;
    ari_progress p;
    ari_progress_begin(&p, v->common.quiet);
    for (size_t i = 0; i < n && st == AR_OK; i++) {
        ari_progress_update(&p, (double)i / (double)n, "bench allreduce");
        st = ari_bench_allreduce(&rows[i], ari_layout_timeout_ns(&v->layout), repetitions_of(v));
    }
    ari_progress_end(&p);
    AR_TRY(st);
    if (ari_wants_text(&v->common))
        AR_TRY(ari_bench_print_allreduce(rows, n));
    return end(ari_bench_json_allreduce(rows, n), v, 0);
}

static ar_status run(void *values, int *exit_code)
{
    const bench_values *v = values;
    (void)exit_code;
    const bool block = strcmp(v->what, "block") == 0;
    if (v->model && !block && strcmp(v->what, "step") != 0 && strcmp(v->what, "ddp") != 0)
        return ar_error_set(AR_ERR_ARG, "bench %s takes no model, '%s' is one too many", v->what, v->model);
    if (v->layout.precision != AR_PRECISION_F32 && !block)
        return ar_error_set(AR_ERR_ARG, "bench %s multiplies fp32: --precision is for bench block", v->what);
    if (v->layout.device && strcmp(v->what, "allreduce") == 0)
        return ar_error_set(AR_ERR_ARG, "bench allreduce sums in the host's memory: --device is for the others");
    ari_layout_values layout = v->layout;
    if (block) /* both numerics; the precision is the native one's */
        layout.numerics = AR_NUMERICS_NATIVE;
    if (v->layout.device)
        AR_TRY(ari_layout_check(&layout));
    if (strcmp(v->what, "gemm") == 0)
        return run_gemm(v);
    if (strcmp(v->what, "grad") == 0)
        return run_grad(v);
    if (block)
        return run_block(v);
    if (strcmp(v->what, "step") == 0)
        return run_step(v);
    if (strcmp(v->what, "ddp") == 0)
        return run_ddp(v);
    if (strcmp(v->what, "allreduce") == 0)
        return run_allreduce(v);
    return ar_error_set(AR_ERR_ARG, "there is no benchmark '%s'; there are gemm, grad, block, step, ddp and allreduce",
                        v->what);
}

/* dtype and numerics: both. */
static const bench_values defaults = {.layout = {.numerics = -1, .bucket_bytes = ARI_LAYOUT_NOT_GIVEN, .timeout = 60.0},
                                      .dtype = -1};

const ari_args_spec ari_bench_spec = {
    .command = "bench",
    .summary = "Times what anyrank does against what bounds it, interleaved in one run.",
    .example = "anyrank bench gemm\nanyrank bench gemm --m 1024 --n 768 --k 3072 --threads 1\nanyrank bench block\n"
               "anyrank bench step llama-demo --tp 4\nanyrank bench ddp --dp 2\nanyrank bench allreduce --ranks 4 "
               "--bytes 1048576",
    .options = options,
    .positionals = positionals,
    .common_at = offsetof(bench_values, common),
    .size = sizeof(bench_values),
    .defaults = &defaults,
    .run = run,
};

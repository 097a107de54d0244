/* SPDX-License-Identifier: Apache-2.0 */
/* anyrank bench: ratios measured side by side in one run. */
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "bench/bench.h"
#include "cli/bench/bench.h"
#include "cli/options/subcommand.h"
#include "cli/shared/progress.h"
#include "cli/shared/table.h"
#include "ref/core/os/threads.h"
#include "ref/core/wait.h"
#include "ref/io/json.h"
#include "run/run.h"
#include "verify/check/check_run.h"

static const char *const dtype_names[] = {"f32", "i64", NULL};
static const char *const size_names[] = {"small", "large", NULL};
static const char *const algorithm_names[] = {"auto", "direct", "ring", "last", NULL}; /* as ar_sim_algorithm */

#define ARI_VALUES ari_bench_options
static const ari_option options[] = {
    ARI_OPTION_SIZE("m", m, 1, 1e6, "M",
                    "gemm: rows of X; with --n and --k: one shape in place of the default ones; kernels: rows"),
    ARI_OPTION_SIZE("n", n, 1, 1e6, "N",
                    "gemm: rows of W; kernels: columns (2048 where only the other is given; default 32 x 1024, which "
                    "stays in a cache, and 16384 x 1024, which does not)"),
    ARI_OPTION_SIZE("k", k, 1, 1e6, "K", "gemm: columns of both"),
    ARI_OPTION_SIZE("batch", r.run.batch, 1, 1e6, "B",
                    "gemm: matrices of that shape (default 1); block, step, ddp: sequences (default 2, 8, 8)"),
    ARI_OPTION_SIZE("seq", r.run.seq, 1, 4096, "S", "block, step, ddp: tokens of a sequence (default 512, 64, 64)"),
    ARI_OPTION_ENUM("size", block_size, size_names,
                    "block: the two of width 768, or of 4096 with 8 KV heads and an MLP of 11008 (default small)"),
    ARI_OPTION_FLAG("profile", profile, "block: also tell how long each slot of the device's table takes"),
    ARI_OPTION_INT("repetitions", repetitions, 1, 1000, "R",
                   "of which the medians are told (default 7; grad, kernels, fused, block, step, allreduce 15)"),
    ARI_OPTION_INT("ranks", ranks, 2, 4096, "N", "allreduce: simulated ranks (default: 2, 4 and 8)"),
    ARI_OPTION_SIZE("bytes", bytes, 1, 1e12, "D",
                    "allreduce: bytes of each rank's input (default: seven sizes, 1 KiB to 100 MiB)",
                    .more = "The sizes are 1 KiB, 4 KiB, 16 KiB, 64 KiB, 1 MiB, 25 MiB and 100 MiB."),
    ARI_OPTION_ENUM("dtype", dtype, dtype_names, "allreduce: what is summed (default: both)"),
    ARI_OPTION_ENUM("algorithm", algorithm, algorithm_names,
                    "allreduce: how data moves (default auto: last for short messages, else direct)"),
    ARI_OPTION_STRING("cluster", cluster, "SPEC",
                      "ddp: tell what a step takes on that cluster; words as check has them",
                      .choices = ar_sim_cluster_names),
    ARI_OPTION_FLAG("paced", paced, "ddp: collectives also take here, asleep, what the cluster's links take"),
    ARI_LAYOUT_OPTIONS("step: tensor-parallel ranks (default 4 where no layout is given)",
                       "step: exact or native (default: both)"),
    ARI_OPTION_GROUP(ari_step_layout_options, r),
    ARI_OPTION_GROUP(ari_pipeline_options, r),
    ARI_OPTION_ENUM("precision", r.run.precision, ari_precision_names,
                    "block: what the native one multiplies: f32, tf32 or bf16; sums and all else fp32 (default f32)"),
    ARI_ZERO_OPTIONS,
    {0},
};

static const char *const benchmarks[] = {"gemm", "grad", "kernels", "fused", "block", "step", "ddp", "allreduce", NULL};

static const ari_positional positionals[] = {
    ARI_POSITIONAL("WHAT", STRING, what, "gemm, grad, kernels, fused, block, step, ddp or allreduce", .required = true,
                   .choices = benchmarks),
    ARI_POSITIONAL("MODEL", FOLDER, model,
                   "step, ddp: as check has it (default llama-demo); block: the model whose block is timed",
                   .choices = ari_model_names),
    {0},
};

typedef ari_bench_session session;

/* --- the benchmarks ----------------------------------------------------------------------------------------------- */

void ari_bench_progress(session *s, size_t done, size_t all)
{
    char what[32];
    snprintf(what, sizeof what, "bench %s", s->v->what);
    ari_progress_update(&s->progress, (double)done / (double)all, what);
}

ar_status ari_bench_end(session *s, const ari_rows *r, int threads, const char *words, ...)
{
    const ari_bench_options *v = s->v;
    ari_progress_end(&s->progress);
    if (ari_wants_text(&v->common)) {
        va_list args;
        AR_TRY(ari_rows_print(r, stdout, 0));
        va_start(args, words);
        vprintf(words, args);
        va_end(args);
        if (s->more)
            AR_TRY(ari_rows_print(s->more, stdout, 0));
    }
    json_t *o = ari_json_begin("bench");
    json_object_set_new(o, "what", json_string(v->what));
    ari_device_json(o, &s->device);
    if (threads > 0)
        json_object_set_new(o, "threads", json_integer(threads));
    if (s->more)
        json_object_set_new(o, s->more_key, ari_rows_json(s->more));
    return ari_json_end(ari_json_whole(o, json_pack("{s:o}", "rows", ari_rows_json(r))), &v->common);
}

static const char *plural(int n)
{
    return n == 1 ? "" : "s";
}

#define ARI_ROW ar_bench_gemm_row
static const ari_field gemm_fields[] = {
    ARI_FIELD("batch", "batch", COUNT, batch),
    ARI_FIELD("m", "m", COUNT, m),
    ARI_FIELD("n", "n", COUNT, n),
    ARI_FIELD("k", "k", COUNT, k),
    ARI_FIELD("native_gflops", "native GF/s", RATE, native_gflops),
    ARI_FIELD("exact_over_native", "exact/native", RATIO, exact_over_native),
    ARI_FIELD("exact_over_native_prepared", "weights prepared", RATIO, exact_over_native_prepared),
    ARI_FIELD("spread", "spread", SHARE, spread),
    ARI_FIELD("pedantic_over_native", "pedantic", RATIO, pedantic_over_native),
    ARI_FIELD("pack_seconds", "pack", MILLISECONDS, pack_seconds),
    ARI_FIELD("products_seconds", "products", MILLISECONDS, products_seconds),
    ARI_FIELD("sums_seconds", "sums", MILLISECONDS, sums_seconds),
};
#undef ARI_ROW

/* What a GPU's figures are not of cuBLAS alone for. */
static void print_refused(void)
{
    char refused[600];
    if (ar_gpu_refused_products(refused, sizeof refused) > 0)
        fprintf(stderr, "int8 products that cuBLAS refused, done by a kernel: %s\n", refused);
}

static ar_status run_gemm(session *s)
{
    const ari_bench_options *v = s->v;
    ar_bench_gemm_row rows[ARI_BENCH_GEMM_SHAPES];
    const int given = (v->m > 0) + (v->n > 0) + (v->k > 0);
    const size_t n = given ? 1 : ARI_BENCH_GEMM_SHAPES;
    if (given != 0 && given != 3)
        return ar_error_set(AR_ERR_ARG, "--m, --n and --k go together");
    memcpy(rows, ari_bench_gemm_shapes_for(&s->device), sizeof rows);
    if (given)
        rows[0] = (ar_bench_gemm_row){.batch = v->r.run.batch ? v->r.run.batch : 1, .m = v->m, .n = v->n, .k = v->k};
    for (size_t i = 0; i < n; i++) {
        ari_bench_progress(s, i, n);
        AR_TRY(ari_bench_gemm(&rows[i], &s->device, s->threads, s->repetitions));
    }
    print_refused();
    return ari_bench_end(
        s, ARI_ROWS(gemm_fields, rows, n), s->threads,
        "\nY[m,n] = X[m,k] W[n,k]^T, %d thread%s; time of the exact product over that of sgemm, medians. 'weights\n"
        "prepared': W's exponents and integers were made before, as in a training step. 'spread': of the "
        "repetitions'\nexact/native, (largest - smallest)/median. 'pedantic': sgemm in cuBLAS's pedantic mode over sgemm. "
        "'pack',\n'products', 'sums': the parts of one prepared product.\n",
        s->threads, plural(s->threads));
}

#define ARI_ROW ar_bench_grad_row
static const ari_field grad_fields[] = {
    ARI_FIELD("out", "out", COUNT, out),
    ARI_FIELD("in", "in", COUNT, in),
    ARI_FIELD("tokens", "tokens", COUNT, tokens),
    ARI_FIELD("seq", "seq", COUNT, seq),
    ARI_FIELD("seconds", "time", SECONDS, seconds),
    ARI_FIELD("over_contraction", "of one contraction", RATIO, over_contraction),
    ARI_FIELD("over_native", "of sgemm", RATIO, over_native),
    ARI_FIELD("spread", "spread", SHARE, spread),
};
#undef ARI_ROW

static ar_status run_grad(session *s)
{
    enum { n = ARI_BENCH_GRAD_SHAPES };
    ar_bench_grad_row rows[n];
    for (size_t i = 0; i < n; i++) {
        ari_bench_progress(s, i, n);
        rows[i] = ari_bench_grad_shapes[i];
        AR_TRY(ari_bench_grad(&rows[i], &s->device, s->threads, s->repetitions));
    }
    return ari_bench_end(
        s, ARI_ROWS(grad_fields, rows, n), s->threads,
        "\nThe exact gradient of a weight [out, in], %d thread%s: each sequence's contraction is rounded and goes "
        "into\nthe accumulator. Medians of its time over that of one exact contraction over all tokens, and of "
        "sgemm.\n'spread': of the first ratio, (largest - smallest)/median.\n",
        s->threads, plural(s->threads));
}

enum { KERNEL_SIZES = 2 };

/* A kernel in one of the dtypes. */
typedef struct kernel_line {
    const char *dtype;
    ar_bench_kernel_row row;
} kernel_line;

#define ARI_ROW kernel_line
static const ari_field kernel_fields[] = {
    ARI_FIELD("kernel", "kernel", TEXT, row.name),
    ARI_FIELD("dtype", "type", TEXT, dtype),
    ARI_FIELD("rows", "rows", COUNT, row.rows),
    ARI_FIELD("cols", "columns", COUNT, row.cols),
    ARI_FIELD("bytes_per_element", "bytes", COUNT, row.bytes),
    ARI_FIELD("seconds", "time", MILLISECONDS, row.seconds),
    ARI_FIELD("gbps", "GB/s", RATIO, row.gbps),
    ARI_FIELD("over_copy", "times a copy", RATIO, row.over_copy),
    ARI_FIELD("spread", "spread", SHARE, row.spread),
};
#undef ARI_ROW

/* All kernels in one size. */
static ar_status run_kernel_size(session *s, kernel_line *lines, size_t *n, const size_t size[2], size_t begun)
{
    ari_kernel_bench *b = NULL;
    AR_TRY(ari_kernel_bench_create(&b, size[0], size[1], &s->device, s->threads));
    ar_status st = AR_OK;
    for (size_t i = 0; i < ARI_BENCH_KERNELS && st == AR_OK; i++) {
        ar_bench_kernel_row found[2];
        size_t count = 0;
        ari_bench_progress(s, begun * ARI_BENCH_KERNELS + i, KERNEL_SIZES * ARI_BENCH_KERNELS);
        st = ari_bench_kernel(found, &count, b, i, s->repetitions);
        for (size_t of = 0; of < count; of++)
            lines[(*n)++] = (kernel_line){found[of].dtype == AR_F32 ? "f32" : "bf16", found[of]};
    }
    ari_kernel_bench_destroy(b);
    return st;
}

/* Tensors of 128 KiB, of which a second cache level holds all that a kernel moves, and of 64 MiB, of which no cache does.
 */
static ar_status run_kernels(session *s)
{
    static const size_t sizes[KERNEL_SIZES][2] = {{32, 1024}, {16384, 1024}};
    const size_t given[2] = {s->v->m ? s->v->m : 2048, s->v->n ? s->v->n : 2048};
    const bool one = s->v->m || s->v->n;
    kernel_line lines[KERNEL_SIZES * 2 * ARI_BENCH_KERNELS];
    size_t n = 0;
    for (size_t i = 0; i < (one ? 1 : KERNEL_SIZES); i++)
        AR_TRY(run_kernel_size(s, lines, &n, one ? given : sizes[i], i));
    return ari_bench_end(
        s, ARI_ROWS(kernel_fields, lines, n), s->threads,
        "\nKernels on tensors of [rows, columns], %d thread%s; medians. 'bytes': of an element, in the tensors that a "
        "call\nmust read and write. 'GB/s': those bytes in that time. 'times a copy': over the time in which the same "
        "threads\ncopy half as many bytes, which reads and writes as many: near 1, memory is what the kernel waits for; "
        "above,\nits arithmetic. 'spread': of that ratio, (largest - smallest)/median.\n",
        s->threads, plural(s->threads));
}

#define ARI_ROW ar_bench_fused_row
static const ari_field fused_fields[] = {
    ARI_FIELD("kernel", "kernel", TEXT, kernel),
    ARI_FIELD("numerics", "numerics", TEXT, numerics_name),
    ARI_FIELD("rows", "rows", COUNT, rows),
    ARI_FIELD("cols", "columns", COUNT, cols),
    ARI_FIELD("bytes", "bytes", RATE, bytes),
    ARI_FIELD("bytes_apart", "apart", RATE, bytes_apart),
    ARI_FIELD("seconds", "time", MILLISECONDS, seconds),
    ARI_FIELD("gbps", "GB/s", RATE, gbps),
    ARI_FIELD("apart_over", "apart takes", RATIO, apart_over),
    ARI_FIELD("spread", "spread", SHARE, spread),
};
#undef ARI_ROW

static ar_status run_fused(session *s)
{
    enum { n = 2 * ARI_BENCH_FUSED };
    ar_bench_fused_row rows[n];
    for (size_t i = 0; i < n; i++) {
        const ar_numerics numerics = i < ARI_BENCH_FUSED ? AR_NUMERICS_NATIVE : AR_NUMERICS_EXACT;
        ari_bench_progress(s, i, n);
        rows[i] = ari_bench_fused_at(i % ARI_BENCH_FUSED, numerics, &s->device);
        AR_TRY(ari_bench_fused(&rows[i], &s->device, s->threads, s->repetitions));
    }
    return ari_bench_end(
        s, ARI_ROWS(fused_fields, rows, n), s->threads,
        "\nWith the sums of the parameters' gradients, %d thread%s; medians. 'bytes': of the tensors that the "
        "kernel moves,\nan element; 'apart': where dX, each sum and the residual have a pass of their own, whose "
        "time is 'apart takes'\ntimes the kernel's. 'spread': of that ratio, (largest - smallest)/median.\n",
        s->threads, plural(s->threads));
}

/* The run of step and ddp; ari_layout_unload. Gives its tokens; free(). */
static ar_status begin_run(session *s, ar_run *run, int64_t **ids)
{
    const ari_bench_options *v = s->v;
    char folder[512];
    *run = ari_run_of(&v->r, &v->common);
    run->batch = run->batch ? run->batch : 8;
    run->seq = run->seq ? run->seq : 64;
    run->threads = s->threads;
    AR_TRY(ari_layout_check(&v->r));
    AR_TRY(ari_layout_load(&v->r, run));
    AR_TRY(ari_run_config(&s->config, folder, sizeof folder, &(ar_run){.model = v->model ? v->model : "llama-demo"}));
    return ari_text_ids(ids, run->batch, run->seq, s->config.vocab, NULL, v->common.seed);
}

/* A step in one layout and one of the numerics. */
typedef struct step_line {
    const char *model, *numerics;
    char layout[ARI_LAYOUT_TEXT], shown[ARI_LAYOUT_TEXT];
    size_t batch, seq;
    ar_bench_side_row row;
} step_line;

static step_line step_line_of(const session *s, const ar_run *run, ar_parallel parallel, ar_bench_side_row row)
{
    step_line l = {.model = s->config.name,
                   .numerics = ari_numerics_names[run->numerics],
                   .batch = run->batch,
                   .seq = run->seq,
                   .row = row};
    ar_parallel_text(l.layout, sizeof l.layout, &parallel);
    ari_layout_text(l.shown, &parallel, run->batch);
    return l;
}

/* One rank and the layout, in the numerics asked for or in both. */
#define ARI_ROW step_line
static const ari_field step_fields[] = {
    ARI_FIELD("model", NULL, TEXT, model),
    ARI_FIELD("layout", NULL, WORDS, layout),
    ARI_FIELD(NULL, "layout", WORDS, shown),
    ARI_FIELD("numerics", "numerics", TEXT, numerics),
    ARI_FIELD("batch", NULL, COUNT, batch),
    ARI_FIELD("seq", NULL, COUNT, seq),
    ARI_FIELD("seconds", "time", SECONDS, row.seconds),
    ARI_FIELD("gflops", "GF/s", RATE, row.gflops),
    ARI_FIELD("gemm_fraction", "products", RATIO, row.gemm_fraction),
    ARI_FIELD("over_single", "of tp=1", RATIO, row.over_first),
    ARI_FIELD("spread", "spread", SHARE, row.spread),
};
#undef ARI_ROW

static ar_status run_step(session *s)
{
    static const ar_numerics all[] = {AR_NUMERICS_NATIVE, AR_NUMERICS_EXACT};
    const ari_bench_options *v = s->v;
    step_line lines[4];
    int64_t *ids = NULL;
    size_t n = 0;
    ar_bench_step_options o = {.config = &s->config, .repetitions = s->repetitions};
    ar_status st = begin_run(s, &o.run, &ids);
    o.input_ids = ids;
    if (!ari_layout_given(&v->r))
        o.run.parallel = (ar_parallel){.tp = 4};
    for (size_t i = 0; i < 2 && st == AR_OK; i++) {
        ar_bench_side_row row[2] = {0};
        if ((int)v->r.run.numerics >= 0 && v->r.run.numerics != all[i])
            continue;
        ari_bench_progress(s, n, 4);
        o.run.numerics = all[i];
        st = ari_bench_step(row, &o);
        lines[n++] = step_line_of(s, &o.run, (ar_parallel){.tp = 1}, row[0]);
        lines[n++] = step_line_of(s, &o.run, o.run.parallel, row[1]);
    }
    ari_layout_unload(&o.run);
    free(ids);
    AR_TRY(st);
    return ari_bench_end(
        s, ARI_ROWS(step_fields, lines, n), s->threads,
        "\nA training step of %s (AdamW, clipping), batch %zu x seq %zu, %d thread%s in all; medians. 'products': "
        "time\nof the model's matrix products alone, by sgemm, over that of the step. 'of tp=1': over the time of "
        "one rank's\nstep. 'spread': of that ratio, in the first row of the times, (largest - smallest)/median.\n",
        s->config.name, o.run.batch, o.run.seq, s->threads, plural(s->threads));
}

typedef struct ddp_line {
    const char *model, *numerics, *mode;
    int ranks;
    size_t batch, seq, capacity;
    bool ddp;
    ar_bench_ddp_row row;
} ddp_line;

#define ARI_ROW ddp_line
static const ari_field ddp_fields[] = {
    ARI_FIELD("model", NULL, TEXT, model),
    ARI_FIELD("ranks", NULL, INT, ranks),
    ARI_FIELD("numerics", NULL, TEXT, numerics),
    ARI_FIELD("batch", NULL, COUNT, batch),
    ARI_FIELD("seq", NULL, COUNT, seq),
    ARI_FIELD("ddp", NULL, FLAG, ddp),
    ARI_FIELD("bucket_bytes", "capacity", CAPACITY, capacity),
    ARI_FIELD("mode", "mode", TEXT, mode),
    ARI_FIELD("buckets", "buckets", COUNT, row.buckets),
    ARI_FIELD("all_reduces", "all-reduces", COUNT, row.all_reduces),
    ARI_FIELD("bytes", "MB", MEGABYTES, row.bytes),
    ARI_FIELD("virtual_seconds", "virtual", SECONDS, row.virtual_seconds),
    ARI_FIELD("seconds", "time", SECONDS, row.seconds),
    ARI_FIELD("over_alone", "of no DDP", RATIO, row.over_alone),
    ARI_FIELD("spread", "spread", SHARE, row.spread),
};
#undef ARI_ROW

static ar_status run_ddp(session *s)
{
    const ar_run *given = &s->v->r.run;
    ar_bench_ddp_row rows[ARI_BENCH_DDP_ROWS];
    ddp_line lines[ARI_BENCH_DDP_ROWS];
    const size_t n = ari_bench_ddp_rows(rows);
    int64_t *ids = NULL;
    ar_bench_step_options o = {.config = &s->config, .repetitions = s->repetitions};
    ar_sim_cluster cluster;
    if (s->v->cluster)
        AR_TRY(ar_sim_cluster_parse(&cluster, s->v->cluster));
    ari_run_values others = s->v->r;
    others.run.parallel.dp = 0;
    if (ari_layout_given(&others))
        return ar_error_set(AR_ERR_ARG, "bench ddp splits the samples alone: use --dp");
    ar_status st = begin_run(s, &o.run, &ids);
    o.input_ids = ids;
    o.run.parallel = (ar_parallel){.dp = given->parallel.dp > 1 ? given->parallel.dp : 2};
    o.run.numerics = (int)given->numerics >= 0 ? given->numerics : AR_NUMERICS_NATIVE;
    o.run.sim.cluster = s->v->cluster ? &cluster : NULL;
    o.run.sim.paced = s->v->paced;
    ari_bench_progress(s, 0, 1);
    if (st == AR_OK)
        st = ari_bench_ddp(rows, n, &o);
    free(ids);
    AR_TRY(st);
    const char *numerics = ari_numerics_names[o.run.numerics];
    const int world = ar_parallel_world(&o.run.parallel);
    for (size_t i = 0; i < n; i++)
        lines[i] = (ddp_line){.model = s->config.name,
                              .numerics = numerics,
                              .mode = rows[i].alone ? NULL : ari_bucket_mode_names[rows[i].mode],
                              .ranks = world,
                              .batch = o.run.batch,
                              .seq = o.run.seq,
                              .capacity = rows[i].alone ? ARI_NO_CAPACITY : rows[i].bucket_bytes,
                              .ddp = !rows[i].alone,
                              .row = rows[i]};
    return ari_bench_end(
        s, ARI_ROWS(ddp_fields, lines, n), s->threads,
        "\nA training step of %s (AdamW, %s), batch %zu x seq %zu, dp=%d, %d thread%s in all; medians. 'no DDP': "
        "the\nsame ranks with the same samples, each for itself. 'all-reduces', 'MB': of rank 0 in one step, bytes "
        "read and\nwritten between ranks. 'spread': of the ratio, in the first row of the times, (largest - "
        "smallest)/median.\n",
        s->config.name, numerics, o.run.batch, o.run.seq, world, s->threads, plural(s->threads));
}

typedef struct allreduce_line {
    const char *dtype, *algorithm;
    ar_bench_allreduce_row row;
} allreduce_line;

/* The rows that the options ask for: every number of ranks, of every type, in every size. */
#define ALLREDUCE_MOST (3 * 2 * ARI_BENCH_ALLREDUCE_SIZES)
static size_t allreduce_rows(const ari_bench_options *v, allreduce_line *lines)
{
    static const int ranks[] = {2, 4, 8};
    static const ar_dtype dtypes[] = {AR_F32, AR_I64};
    size_t n = 0;
    for (size_t r = 0; r < (v->ranks ? 1 : sizeof ranks / sizeof *ranks); r++)
        for (size_t t = 0; t < 2; t++)
            for (size_t i = 0;
                 (v->dtype < 0 || (size_t)v->dtype == t) && i < (v->bytes ? 1 : ARI_BENCH_ALLREDUCE_SIZES); i++)
                lines[n++] = (allreduce_line){dtype_names[t],
                                              algorithm_names[v->algorithm],
                                              {.ranks = v->ranks ? v->ranks : ranks[r],
                                               .bytes = v->bytes ? v->bytes : ari_bench_allreduce_sizes[i],
                                               .dtype = dtypes[t],
                                               .algorithm = (ar_sim_algorithm)v->algorithm}};
    return n;
}

#define ARI_ROW allreduce_line
static const ari_field allreduce_fields[] = {
    ARI_FIELD("ranks", "ranks", INT, row.ranks),
    ARI_FIELD("bytes", "size", BYTES, row.bytes),
    ARI_FIELD("numerics", "type", TEXT, dtype),
    ARI_FIELD("algorithm", "how", TEXT, algorithm),
    ARI_FIELD("seconds", "time", MILLISECONDS, row.seconds),
    ARI_FIELD("bus_gbps", "bus GB/s", RATIO, row.bus_gbps),
    ARI_FIELD("over_copy", NULL, RATIO, row.over_copy),
    ARI_FIELD("copy_seconds", "copy", MILLISECONDS, row.copy_seconds),
    ARI_FIELD("copy", NULL, TEXT, row.copy),
    ARI_FIELD(NULL, "times a copy", RATIO, row.over_copy),
    ARI_FIELD("spread", "spread", SHARE, row.spread),
};
#undef ARI_ROW

static ar_status run_allreduce(session *s)
{
    allreduce_line lines[ALLREDUCE_MOST];
    const size_t n = allreduce_rows(s->v, lines);
    for (size_t i = 0; i < n; i++) {
        ari_bench_progress(s, i, n);
        AR_TRY(ari_bench_allreduce(&lines[i].row, ari_layout_timeout_ns(&s->v->r), s->repetitions));
    }
    return ari_bench_end(
        s, ARI_ROWS(allreduce_fields, lines, n), 0,
        "\nOne all-reduce (sum) between N ranks, which are threads of this process, each with an input and an "
        "output of\nthis size; medians. 'bus': 2(N-1)/N x size over the time, the rate of each link of a ring that "
        "took as long.\n'copy': the same threads each copy their input to their output, so the memory has the same "
        "traffic; the\nfastest of memcpy, streaming stores and rep movsb. 'spread': of times a copy, (largest - "
        "smallest)/median.\n");
}

/* --- the command -------------------------------------------------------------------------------------------------- */

typedef struct benchmark {
    const char *name;
    ar_status (*run)(session *s);
    size_t repetitions; /* unless given */
    bool one_thread;    /* unless given; else one on each core */
} benchmark;

static const benchmark *find_benchmark(const char *name)
{
    static const benchmark all[] = {{"gemm", run_gemm, 7, true},
                                    {"grad", run_grad, 15, true},
                                    {"kernels", run_kernels, 15, true},
                                    {"fused", run_fused, 15, true},
                                    {"block", ari_bench_run_block, 15, false},
                                    {"step", run_step, 15, false},
                                    {"ddp", run_ddp, 7, false},
                                    {"allreduce", run_allreduce, 15, false}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (strcmp(name, all[i].name) == 0)
            return &all[i];
    return NULL;
}

static ar_status run(void *values, int *exit_code)
{
    const ari_bench_options *v = values;
    const benchmark *b = find_benchmark(v->what);
    (void)exit_code;
    if (!b)
        return ar_error_set(
            AR_ERR_ARG, "there is no benchmark '%s': gemm, grad, kernels, fused, block, step, ddp, allreduce", v->what);
    AR_TRY(ari_bench_check(v));
    const int threads = b->one_thread ? 1 : ari_cores();
    session s = {.v = v,
                 .device = ari_layout_device(&v->r),
                 .threads = v->common.threads > 0 ? v->common.threads : threads,
                 .repetitions = v->repetitions > 0 ? (size_t)v->repetitions : b->repetitions};
    ari_progress_begin(&s.progress, &v->common);
    const ar_status st = b->run(&s);
    ari_progress_end(&s.progress);
    return st;
}

/* dtype and numerics: both. */
static const ari_bench_options defaults = {
    .r = {.run.numerics = (ar_numerics)-1, .run.ddp.bucket_bytes = ARI_NOT_GIVEN, .timeout = 60.0},
    .dtype = -1,
    .block_size = -1};

const ari_args_spec ari_bench_spec = {
    .command = "bench",
    .summary = "Times what anyrank does against what bounds it, interleaved in one run.",
    .example = "anyrank bench gemm\nanyrank bench gemm --m 1024 --n 768 --k 3072 --threads 1\nanyrank bench block\n"
               "anyrank bench step llama-demo --tp 4\nanyrank bench ddp --dp 2\nanyrank bench allreduce --ranks 4 "
               "--bytes 1048576",
    .options = options,
    .positionals = positionals,
    .common_at = offsetof(ari_bench_options, common),
    .size = sizeof(ari_bench_options),
    .defaults = &defaults,
    .run = run,
};

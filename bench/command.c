/* SPDX-License-Identifier: Apache-2.0 */
/* anyrank bench: ratios measured side by side in one run. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "bench/bench.h"
#include "cli/options/args.h"
#include "ref/core/os/threads.h"
#include "ref/io/json.h"

const char *const ari_bench_dtype_names[] = {"f32", "i64", NULL};
static const char *const size_names[] = {"small", "large", NULL};
const char *const ari_bench_algorithm_names[] = {"auto", "direct", "ring", "last", NULL};

#define TIMEOUT 60.0 /* unless given */
#define ARI_VALUES ari_bench_options
static const ari_option options[] = {
    ARI_OPTION_SECTION("sizes"),
    ARI_OPTION_SIZE("m", m, 1, 1e6, "M",
                    "gemm: rows of X; with --n and --k: one shape in place of the default ones; kernels: rows"),
    ARI_OPTION_SIZE("n", n, 1, 1e6, "N",
                    "gemm: rows of W; kernels: columns (2048 where only the other is given; default 32 x 1024, which "
                    "stays in a cache, and 16384 x 1024, which does not)"),
    ARI_OPTION_SIZE("k", k, 1, 1e6, "K", "gemm: columns of both"),
    ARI_OPTION_SIZE("batch", r.run.batch, 1, 1e6, "B",
                    "gemm: matrices of that shape (default 1); block, ddp: sequences (default 2, 8)"),
    ARI_OPTION_SIZE("seq", r.run.seq, 1, 4096, "S", "block, ddp: tokens of a sequence (default 512, 64)"),
    ARI_OPTION_ENUM(
        "size", block_size, size_names,
        "block: two of width 768 and two with experts, or two of 4096 with 8 KV heads and an MLP of 11008 (default small)"),
    ARI_OPTION_SECTION("measuring"),
    ARI_OPTION_FLAG("profile", profile, "block: also tell how long each slot of the device's table takes"),
    ARI_OPTION_INT("repetitions", repetitions, 1, 1000, "R",
                   "of which the medians are told (default 7; kernels, block, allreduce 15)"),
    ARI_OPTION_SECTION("all-reduce"),
    ARI_OPTION_INT("ranks", ranks, 2, 4096, "N", "allreduce: simulated ranks (default: 2, 4 and 8)"),
    ARI_OPTION_SIZE("bytes", bytes, 1, 1e12, "D",
                    "allreduce: bytes of each rank's input (default: seven sizes, 1 KiB to 100 MiB)",
                    .more = "The sizes are 1 KiB, 4 KiB, 16 KiB, 64 KiB, 1 MiB, 25 MiB and 100 MiB."),
    ARI_OPTION_ENUM("dtype", dtype, ari_bench_dtype_names, "allreduce: what is summed (default: both)"),
    ARI_OPTION_ENUM("algorithm", algorithm, ari_bench_algorithm_names,
                    "allreduce: how data moves (default auto: last for short messages, else direct)"),
    ARI_OPTION_SECTION("cluster"),
    ARI_OPTION_STRING("cluster", cluster, "SPEC",
                      "ddp: tell what a step takes on that cluster; words as check has them",
                      .choices = ar_sim_cluster_names),
    ARI_OPTION_FLAG("paced", paced, "ddp: collectives also take here, asleep, what the cluster's links take"),
    ARI_OPTION_SECTION("ddp"),
    ARI_OPTION_INT("dp", r.run.parallel.dp, 1, 4096, "N", "ddp: data-parallel ranks (default 2)"),
    ARI_OPTION_DOUBLE("timeout", r.timeout, 0.01, 86400, "S",
                      "ddp, allreduce: longest wait of a rank for another, in seconds (default 60)"),
    ARI_OPTION_SECTION("numerics"),
    ARI_OPTION_ENUM("numerics", r.run.numerics, ari_numerics_names, "ddp: exact or native (default native)"),
    ARI_OPTION_ENUM("precision", r.run.precision, ari_precision_names,
                    "block: tf32 or bf16: also in this precision (default f32)"),
    ARI_OPTION_GROUP(ari_device_options, r),
    {0},
};

static const char *const benchmarks[] = {"gemm", "kernels", "block", "ddp", "allreduce", NULL};

static const ari_positional positionals[] = {
    ARI_POSITIONAL("WHAT", STRING, what, "gemm, kernels, block, ddp or allreduce", .required = true,
                   .choices = benchmarks),
    ARI_POSITIONAL("MODEL", FOLDER, model,
                   "ddp: as check has it (default llama-demo); block: the model whose block is timed",
                   .choices = ari_model_names),
    {0},
};

/* --- options ------------------------------------------------------------------------------------------------------ */

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

/* One that the benchmark would ignore is refused, so that no figure is taken for what it is not. */
static ar_status check_options(const ari_bench_options *v)
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
                {"--timeout", v->r.timeout != TIMEOUT, "ddp and allreduce"},
                {"--dp", run->parallel.dp > 0, "ddp"}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        if (rows[i].given && !is_one_of(rows[i].by, v->what))
            return ar_error_set(AR_ERR_ARG, "bench %s has no use for %s: it is for bench %s", v->what, rows[i].option,
                                rows[i].by);
    }
    if (v->paced && !v->cluster)
        return ar_error_set(AR_ERR_ARG, "--paced takes as long as links of --cluster do: give --cluster SPEC too");
    if (v->model && v->block_size >= 0)
        return ar_error_set(AR_ERR_ARG, "bench block: --size is of its own blocks, not of the model %.100s", v->model);
    ari_run_values r = v->r;
    if (strcmp(v->what, "block") == 0)
        r.run.numerics = AR_NUMERICS_NATIVE; /* both; the precision is the native one's */
    return v->r.device ? ari_layout_check(&r) : AR_OK;
}

/* --- output ------------------------------------------------------------------------------------------------------- */

void ari_bench_progress(ari_bench_session *s, size_t done, size_t all)
{
    char what[32];
    snprintf(what, sizeof what, "bench %s", s->v->what);
    ari_progress_update(&s->progress, (double)done / (double)all, what);
}

ar_status ari_bench_end(ari_bench_session *s, const ari_rows *r, int threads, const char *words, ...)
{
    const ari_bench_options *v = s->v;
    ar_cpu_info cpu;
    ar_cpu_info_get(&cpu);
    ari_progress_end(&s->progress);
    if (ari_wants_text(&v->common)) {
        va_list args;
        AR_TRY(ari_rows_print(r, stdout, 0));
        va_start(args, words);
        vprintf(words, args);
        va_end(args);
        if (s->more)
            AR_TRY(ari_rows_print(s->more, stdout, 0));
        printf("\n%s: %s\n%s %s, kernels %s: %s\n", cpu.cpu, cpu.features, cpu.blas, cpu.blas_version, cpu.blas_kernels,
               cpu.blas_reason);
    }
    json_t *o = ari_json_begin("bench");
    json_object_set_new(o, "what", json_string(v->what));
    ari_device_json(o, &s->device);
    json_object_set_new(o, "machine",
                        json_pack("{s:s, s:s, s:s, s:s, s:s}", "cpu", cpu.cpu, "features", cpu.features, "blas",
                                  cpu.blas, "kernels", cpu.blas_kernels, "reason", cpu.blas_reason));
    if (threads > 0)
        json_object_set_new(o, "threads", json_integer(threads));
    if (s->more)
        json_object_set_new(o, s->more_key, ari_rows_json(s->more));
    return ari_json_end(ari_json_whole(o, json_pack("{s:o}", "rows", ari_rows_json(r))), &v->common);
}

/* --- the command -------------------------------------------------------------------------------------------------- */

typedef struct benchmark {
    const char *name;
    ar_status (*run)(ari_bench_session *s);
    size_t repetitions; /* unless given */
    bool one_thread;    /* unless given; else one on each core */
} benchmark;

static const benchmark *find_benchmark(const char *name)
{
    static const benchmark all[] = {{"gemm", ari_bench_gemm, 7, true},
                                    {"kernels", ari_bench_kernels, 15, true},
                                    {"block", ari_bench_block, 15, false},
                                    {"ddp", ari_bench_ddp, 7, false},
                                    {"allreduce", ari_bench_allreduce, 15, false}};
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
        return ar_error_set(AR_ERR_ARG, "there is no benchmark '%s': gemm, kernels, block, ddp, allreduce", v->what);
    AR_TRY(check_options(v));
    const int threads = b->one_thread ? 1 : ari_cores();
    ari_bench_session s = {.v = v,
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
    .r = {.run.numerics = (ar_numerics)-1, .run.ddp.bucket_bytes = ARI_NOT_GIVEN, .timeout = TIMEOUT},
    .dtype = -1,
    .block_size = -1};

const ari_args_spec ari_bench_spec = {
    .command = "bench",
    .summary = "Times what anyrank does against what bounds it, interleaved in one run.",
    .example = "anyrank bench gemm\nanyrank bench gemm --m 1024 --n 768 --k 3072 --threads 1\nanyrank bench block\n"
               "anyrank bench ddp --dp 2\nanyrank bench allreduce --ranks 4 "
               "--bytes 1048576",
    .options = options,
    .positionals = positionals,
    .size = sizeof(ari_bench_options),
    .defaults = &defaults,
    .run = run,
};

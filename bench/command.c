/* SPDX-License-Identifier: Apache-2.0 */
/* anyrank bench: ratios measured side by side in one run. */
#include <string.h>

#include "bench/bench.h"
#include "cli/options/args.h"
#include "ref/core/os/threads.h"

const char *const ari_bench_dtype_names[] = {"f32", "i64", NULL};
static const char *const size_names[] = {"small", "large", NULL};
const char *const ari_bench_algorithm_names[] = {"auto", "direct", "ring", "last", NULL};

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
                      "ddp: longest wait of a rank for another, in seconds (default 60)"),
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
    AR_TRY(ari_bench_check(v));
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
    .r = {.run.numerics = (ar_numerics)-1, .run.ddp.bucket_bytes = ARI_NOT_GIVEN, .timeout = 60.0},
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

/* SPDX-License-Identifier: Apache-2.0 */
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "anyrank/config.h"
#include "anyrank/device.h"
#include "anyrank/process.h"
#include "cli/info.h"
#include "cli/shared/table.h"
#include "ref/core/clock.h"
#include "ref/core/os/os.h"
#include "ref/io/json.h"

typedef struct info_values {
    ari_common common;
    bool probe;
} info_values;

#define ARI_VALUES info_values
static const ari_option options[] = {
    ARI_OPTION_FLAG(
        "probe", probe,
        "measure sgemm with each of the BLAS's kernel sets that this CPU can run, in processes of their own"),
    {0},
};

/* --- the probe of kernel sets ------------------------------------------------------------------------------------- */

/* A set that the CPU cannot run ends its process by an illegal instruction, hence the features. */
typedef struct kernel_set {
    const char *name, *value; /* as the library calls it, and as its variable does */
    const char *features[4];  /* all needed; empty places are NULL */
} kernel_set;

#define AVX512                                        \
    {                                                 \
        "avx512f", "avx512dq", "avx512bw", "avx512vl" \
    }
#define AVX2          \
    {                 \
        "avx2", "fma" \
    }
enum { KERNEL_SETS = 3 };
/* A library whose sets can be asked for. BLIS_ARCH_TYPE takes numbers, which change between versions. */
typedef struct probed_blas {
    const char *blas, *version; /* "": any version */
    const char *variable;
    kernel_set sets[KERNEL_SETS];
} probed_blas;

static const probed_blas probed[] = {
#if defined(__aarch64__)
    {"BLIS",
     "0.9.0",
     "BLIS_ARCH_TYPE",
     {{"firestorm", "15", {NULL}}, {"thunderx2", "16", {NULL}}, {"cortexa57", "17", {NULL}}}},
#else
    {"BLIS", "0.9.0", "BLIS_ARCH_TYPE", {{"skx", "0", AVX512}, {"haswell", "3", AVX2}, {"generic", "25", {NULL}}}},
    {"OpenBLAS",
     "",
     "OPENBLAS_CORETYPE",
     {{"SkylakeX", "SkylakeX", AVX512}, {"Haswell", "Haswell", AVX2}, {"Prescott", "Prescott", {NULL}}}},
#endif
};

/* Speed of the kernel set with the same index. */
typedef struct probe_row {
    double gflops;   /* NaN: not measured */
    char reason[96]; /* why not; "" otherwise */
} probe_row;

/* The first feature that the set needs and the CPU has not, or NULL. */
static const char *lacking(const kernel_set *set, const char *has)
{
    for (size_t i = 0; i < sizeof set->features / sizeof set->features[0] && set->features[i] != NULL; i++) {
        const size_t length = strlen(set->features[i]);
        const char *word = has;
        while (*word != '\0' && (strcspn(word, " ") != length || strncmp(word, set->features[i], length) != 0))
            word += strcspn(word, " ") + strspn(word + strcspn(word, " "), " ");
        if (*word == '\0')
            return set->features[i];
    }
    return NULL;
}

/* Starts this program again as `probe-gemm`; its standard output, for pclose, or NULL. */
static FILE *start_child(const char *variable, const char *value)
{
    char program[PATH_MAX];
    if (!ari_program_again(program, sizeof program) || setenv(variable, value, 1) != 0 ||
        setenv("ANYRANK_PROBED", program, 1) != 0)
        return NULL; /* (the library has read this process's choice long since) */
    return popen("exec \"$ANYRANK_PROBED\" probe-gemm", "r");
}

static void probe_one(probe_row *row, const char *variable, const kernel_set *set, const char *has)
{
    char text[64] = "";
    row->gflops = (double)NAN;
    const char *feature = lacking(set, has);
    if (feature != NULL) {
        snprintf(row->reason, sizeof row->reason, "this CPU has no %s", feature);
        return;
    }
    FILE *from = start_child(variable, set->value);
    if (from == NULL) {
        snprintf(row->reason, sizeof row->reason, "no process could be started");
        return;
    }
    const bool told = fgets(text, sizeof text, from) != NULL;
    const int status = pclose(from);
    char *end = NULL;
    const double gflops = strtod(text, &end);
    if (told && end != text && status == 0)
        row->gflops = gflops;
    else
        snprintf(row->reason, sizeof row->reason, "its process failed (%s %d)",
                 WIFSIGNALED(status) ? "signal" : "exit status",
                 WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
}

static const probed_blas *probed_of(const ar_cpu_info *cpu)
{
    for (size_t i = 0; i < sizeof probed / sizeof probed[0]; i++)
        if (strcmp(cpu->blas, probed[i].blas) == 0 &&
            strncmp(cpu->blas_version, probed[i].version, strlen(probed[i].version)) == 0)
            return &probed[i];
    return NULL;
}

/* Fills all rows. AR_ERR_UNSUPPORTED where it is not known how to ask for a set. */
static ar_status probe(probe_row *rows, const ar_cpu_info *cpu)
{
    const probed_blas *library = probed_of(cpu);
    if (library == NULL)
        return ar_error_set(AR_ERR_UNSUPPORTED,
                            "--probe: kernel sets can be asked for in BLIS %s and in OpenBLAS, and this is %s %s",
                            probed[0].version, cpu->blas, cpu->blas_version);
    for (size_t i = 0; i < KERNEL_SETS; i++)
        probe_one(&rows[i], library->variable, &library->sets[i], cpu->features);
    return AR_OK;
}

/* --- the probing process ------------------------------------------------------------------------------------------ */

enum { PROBE_SIZE = 512, PROBE_LIMIT_S = 60 };
static const double PROBE_SECONDS = 0.4; /* the best of what fits: the first calls warm caches up */

/* Best rate of c = a b^T, all [PROBE_SIZE, PROBE_SIZE], in GFLOP/s on one thread. */
static ar_status measure_gflops(double *gflops, ar_device *device, ar_queue *queue)
{
    const size_t shape[2] = {PROBE_SIZE, PROBE_SIZE};
    const size_t count = (size_t)PROBE_SIZE * PROBE_SIZE;
    ar_buf memory = {NULL};
    ar_tensor m[3];
    ar_status st = AR_OK;
    AR_TRY(device->ops->alloc(device, NULL, &memory, 3 * count * sizeof(float)));
    float *values = memory.ptr;
    for (size_t i = 0; i < 3 * count; i++)
        values[i] = (float)(i % 17) - 8.0F;
    for (size_t i = 0; i < 3; i++)
        AR_TRY_TO(done, st, ar_tensor_view(&m[i], AR_F32, 2, shape, ar_buf_at(memory, i * count * sizeof(float))));
    const uint64_t start = ari_now_ns();
    *gflops = 0.0;
    uint64_t before = start;
    while ((double)(before - start) < PROBE_SECONDS * 1e9) {
        AR_TRY_TO(done, st, device->ops->gemm_f32(device, queue, &m[2], &m[0], &m[1], false, AR_PRECISION_F32));
        const uint64_t after = ari_now_ns();
        *gflops = fmax(*gflops, 2.0 * PROBE_SIZE * (double)count / (double)(after - before));
        before = after;
    }
done:
    device->ops->free(device, NULL, memory);
    return st;
}

int ari_command_probe_gemm(const ari_subcommand *all, int argc, char **argv)
{
    (void)all;
    (void)argv;
    ar_device *device = NULL;
    ar_queue *queue = NULL;
    double gflops = 0.0;
    ar_status st = AR_OK;
    if (argc != 1)
        AR_TRY_TO(done, st, ar_error_set(AR_ERR_ARG, "it takes no arguments"));
    alarm(PROBE_LIMIT_S);
    AR_TRY_TO(done, st, ar_queue_create(&queue, AR_QUEUE_INLINE, "probe"));
    AR_TRY_TO(done, st, ar_device_cpu_create(&device, 1));
    AR_TRY_TO(done, st, measure_gflops(&gflops, device, queue));
    printf("%.1f\n", gflops);
done:
    ar_device_destroy(device);
    ar_queue_destroy(queue);
    if (st != AR_OK)
        ari_print_error("probe-gemm", st);
    return ari_exit_code(st);
}

/* --- accelerators and transports ---------------------------------------------------------------------------------- */

static const double GIB = 1024.0 * 1024.0 * 1024.0;
enum { GPUS_SHOWN = 64, DESCRIPTION_BYTES = 400 };

typedef struct accelerators {
    char cuda[DESCRIPTION_BYTES], nccl[DESCRIPTION_BYTES], mpi[DESCRIPTION_BYTES]; /* versions, or why there is none */
    bool has_nccl, has_mpi;
    int gpus;
    ar_gpu_info gpu[GPUS_SHOWN];
} accelerators;

static void look(accelerators *a)
{
    ar_gpu_describe(a->cuda, sizeof a->cuda);
    a->has_nccl = ar_transport_describe(AR_TRANSPORT_NCCL, a->nccl, sizeof a->nccl);
    a->has_mpi = ar_transport_describe(AR_TRANSPORT_MPI, a->mpi, sizeof a->mpi);
    const int there = ar_gpu_count();
    for (int i = 0; i < there && a->gpus < GPUS_SHOWN; i++) {
        if (ar_gpu_info_get(&a->gpu[a->gpus], i) != AR_OK)
            snprintf(a->gpu[a->gpus].name, sizeof a->gpu[0].name, "%s", ar_error_message());
        a->gpus++;
    }
}

static void add_gpu_row(ari_table *table, const ar_gpu_info *g, int index)
{
    ari_table_cell(table, "GPU %d", index);
    if (g->memory == 0) /* it does not answer, and its name says why */
        ari_table_cell(table, "%s", g->name);
    else
        ari_table_cell(table, "%s, compute capability %d.%d, %d multiprocessors, %.1f of %.1f GiB free", g->name,
                       g->major, g->minor, g->processors, (double)g->free_memory / GIB, (double)g->memory / GIB);
}

/* --- output ------------------------------------------------------------------------------------------------------- */

static ar_status print_machine(const ar_cpu_info *cpu, const accelerators *a)
{
    static const ari_column columns[] = {{NULL, ARI_LEFT}, {NULL, ARI_LEFT}};
    ari_table table = ARI_TABLE(columns);
    char blas[sizeof cpu->blas + sizeof cpu->blas_version + 1];
    (void)snprintf(blas, sizeof blas, "%s %s", cpu->blas, cpu->blas_version);
    const char *const entries[][2] = {
        {"anyrank", ari_version()},
        {"build", ari_build_type()},
        {"CPU", cpu->cpu},
        {"features", cpu->features},
        {"BLAS", blas},
        {"why it", ANYRANK_WHY_BLAS},
        {"BLAS kernels", cpu->blas_kernels},
        {"why these", cpu->blas_reason},
        {"exact path", cpu->exact_path},
        {"why this", cpu->exact_reason},
        {"CUDA", a->cuda},
        {"NCCL", a->nccl},
        {"MPI", a->mpi},
        {"data", ar_data_dir()},
    };
    for (size_t i = 0; i < sizeof entries / sizeof entries[0]; i++) {
        ari_table_row(&table, "%s\t%s", entries[i][0], entries[i][1]);
        if (strcmp(entries[i][0], "CPU") == 0)
            ari_table_row(&table, "cores\t%d", cpu->cores);
        for (int g = 0; strcmp(entries[i][0], "CUDA") == 0 && g < a->gpus; g++)
            add_gpu_row(&table, &a->gpu[g], g);
    }
    return ari_table_end(&table, stdout, 0);
}

static ar_status print_text(const ar_cpu_info *cpu, const accelerators *a, const probe_row *rows, size_t n)
{
    static const ari_column probe_columns[] = {{"kernels", ARI_LEFT}, {"GFLOP/s", ARI_RIGHT}, {"", ARI_LEFT}};
    ari_table table = ARI_TABLE(probe_columns);
    AR_TRY(print_machine(cpu, a));
    if (n == 0)
        return AR_OK;
    printf("\nsgemm %d x %d x %d, one thread:\n", PROBE_SIZE, PROBE_SIZE, PROBE_SIZE);
    for (size_t i = 0; i < n; i++) {
        const char *name = probed_of(cpu)->sets[i].name;
        ari_table_cell(&table, "%s", name);
        ari_table_cell(&table, isnan(rows[i].gflops) ? "-" : "%.1f", rows[i].gflops);
        ari_table_cell(&table, "%s", strcmp(name, cpu->blas_kernels) == 0 ? "chosen" : rows[i].reason);
    }
    return ari_table_end(&table, stdout, 2);
}

/* The space-separated words of a text as a JSON array. */
static json_t *words(const char *text)
{
    json_t *array = json_array();
    for (const char *at = text + strspn(text, " "); *at != '\0'; at += strspn(at, " ")) {
        const size_t length = strcspn(at, " ");
        json_array_append_new(array, json_stringn(at, length));
        at += length;
    }
    return array;
}

static json_t *described(bool available, const char *text)
{
    return json_pack("{s:b, s:s}", "available", available, available ? "version" : "reason", text);
}

static json_t *cuda_and_gpus(const accelerators *a)
{
    json_t *cuda = described(a->gpus > 0, a->cuda), *gpus = json_array();
    for (int i = 0; i < a->gpus; i++) {
        const ar_gpu_info *g = &a->gpu[i];
        json_array_append_new(gpus,
                              json_pack("{s:i, s:s, s:i, s:i, s:i, s:I, s:I}", "index", i, "name", g->name, "major",
                                        g->major, "minor", g->minor, "processors", g->processors, "memory_bytes",
                                        (json_int_t)g->memory, "free_bytes", (json_int_t)g->free_memory));
    }
    json_object_set_new(cuda, "gpus", gpus);
    return cuda;
}

static ar_status write_json(const ari_common *common, const ar_cpu_info *cpu, const accelerators *a,
                            const probe_row *rows, size_t n)
{
    json_t *result = ari_json_begin("info");
    json_t *probes = n == 0 ? json_null() : json_array();
    for (size_t i = 0; i < n; i++)
        json_array_append_new(probes, json_pack("{s:s, s:o, s:s}", "kernels", probed_of(cpu)->sets[i].name, "gflops",
                                                isnan(rows[i].gflops) ? json_null() : ari_json_number(rows[i].gflops),
                                                "reason", rows[i].reason));
    json_t *rest =
        json_pack("{s:s, s:s, s:{s:s, s:i, s:o}, s:{s:s, s:s, s:s, s:s, s:s}, s:s, s:s, s:o, s:o, s:o, s:o, s:o}", //
                  "result", "same", "build_type", ari_build_type(),                                                //
                  "cpu", "name", cpu->cpu, "cores", cpu->cores, "features", words(cpu->features),                  //
                  "blas", "name", cpu->blas, "version", cpu->blas_version, "kernels", cpu->blas_kernels,           //
                  "reason", cpu->blas_reason, "choice", ANYRANK_WHY_BLAS,                                          //
                  "exact_path", cpu->exact_path, "exact_path_reason", cpu->exact_reason, "cuda", cuda_and_gpus(a), //
                  "nccl", described(a->has_nccl, a->nccl), "mpi", described(a->has_mpi, a->mpi),                   //
                  "data_dir", ari_json_text(ar_data_dir()), "probe", probes);
    return ari_json_end(ari_json_whole(result, rest), common);
}

static ar_status run_info(void *values, int *exit_code)
{
    const info_values *v = values;
    const size_t n = v->probe ? (size_t)KERNEL_SETS : 0;
    probe_row rows[KERNEL_SETS] = {{0}};
    ar_cpu_info cpu;
    accelerators found = {.gpus = 0};
    (void)exit_code;
    ar_cpu_info_get(&cpu);
    look(&found);
    if (v->probe)
        AR_TRY(probe(rows, &cpu));
    if (ari_wants_text(&v->common))
        AR_TRY(print_text(&cpu, &found, rows, n));
    return v->common.json ? write_json(&v->common, &cpu, &found, rows, n) : AR_OK;
}

const ari_args_spec ari_info_spec = {
    .command = "info",
    .summary = "Tells what this machine has, which paths are chosen, and why something is not available.",
    .example = "anyrank info\nanyrank info --probe --json -",
    .options = options,
    .size = sizeof(info_values),
    .run = run_info,
};

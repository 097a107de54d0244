/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>

#include "anyrank/device.h"
#include "anyrank/process.h"
#include "cli/options/args.h"
#include "cli/shared/table.h"
#include "gpu/cluster/process/transport/process_private.h"
#include "gpu/device_private.h"
#include "ref/cpu/device_private.h"
#include "ref/io/config_private.h"
#include "ref/io/json.h"

/* --- accelerators and transports ---------------------------------------------------------------------------------- */

static const double GIB = 1024.0 * 1024.0 * 1024.0;
enum { GPUS_SHOWN = 64, DESCRIPTION_BYTES = 400 };

typedef struct accelerators {
    char cuda[DESCRIPTION_BYTES], nccl[DESCRIPTION_BYTES], mpi[DESCRIPTION_BYTES]; /* versions, or why the library is
                                                                                      missing */
    bool has_nccl, has_mpi;
    int gpus;
    ar_gpu_info gpu[GPUS_SHOWN];
} accelerators;

static void look(accelerators *a)
{
    ari_gpu_describe(a->cuda, sizeof a->cuda);
    a->has_nccl = ari_transport_describe(AR_TRANSPORT_NCCL, a->nccl, sizeof a->nccl);
    a->has_mpi = ari_transport_describe(AR_TRANSPORT_MPI, a->mpi, sizeof a->mpi);
    const int gpu_count = ari_gpu_count();
    for (int i = 0; i < gpu_count && a->gpus < GPUS_SHOWN; i++) {
        if (ari_gpu_info_get(&a->gpu[a->gpus], i) != AR_OK)
            snprintf(a->gpu[a->gpus].name, sizeof a->gpu[0].name, "%s", ar_error_message());
        a->gpus++;
    }
}

static void add_gpu_row(ari_table *table, const ar_gpu_info *g, int index)
{
    ari_table_cell(table, "GPU %d", index);
    if (g->memory == 0) /* the GPU does not respond, and its name says why */
        ari_table_cell(table, "%s", g->name);
    else
        ari_table_cell(table, "%s, compute capability %d.%d, %d multiprocessors, %.1f GiB", g->name, g->major, g->minor,
                       g->processors, (double)g->memory / GIB);
}

/* --- output ------------------------------------------------------------------------------------------------------- */

static ar_status print_text(const ar_cpu_info *cpu, const accelerators *a)
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
        {"BLAS kernels", cpu->blas_kernels},
        {"why these", cpu->blas_reason},
        {"exact path", cpu->exact_path},
        {"why this", cpu->exact_reason},
        {"CUDA", a->cuda},
        {"NCCL", a->nccl},
        {"MPI", a->mpi},
        {"data", ari_data_dir()},
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

/* The space-separated words of a text as a JSON array. */
static json_t *words(const char *text)
{
    json_t *array = json_array();
    for (const char *cursor = text + strspn(text, " "); *cursor != '\0'; cursor += strspn(cursor, " ")) {
        const size_t length = strcspn(cursor, " ");
        json_array_append_new(array, json_stringn(cursor, length));
        cursor += length;
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
        json_array_append_new(gpus, json_pack("{s:i, s:s, s:i, s:i, s:i, s:I}", "index", i, "name", g->name, "major",
                                              g->major, "minor", g->minor, "processors", g->processors, "memory_bytes",
                                              (json_int_t)g->memory));
    }
    json_object_set_new(cuda, "gpus", gpus);
    return cuda;
}

static ar_status write_json(const ari_common *common, const ar_cpu_info *cpu, const accelerators *a)
{
    json_t *result = ari_json_begin("info");
    json_t *rest =
        json_pack("{s:s, s:s, s:{s:s, s:i, s:o}, s:{s:s, s:s, s:s, s:s}, s:s, s:s, s:o, s:o, s:o, s:o}",           //
                  "result", "same", "build_type", ari_build_type(),                                                //
                  "cpu", "name", cpu->cpu, "cores", cpu->cores, "features", words(cpu->features),                  //
                  "blas", "name", cpu->blas, "version", cpu->blas_version, "kernels", cpu->blas_kernels,           //
                  "reason", cpu->blas_reason,                                                                      //
                  "exact_path", cpu->exact_path, "exact_path_reason", cpu->exact_reason, "cuda", cuda_and_gpus(a), //
                  "nccl", described(a->has_nccl, a->nccl), "mpi", described(a->has_mpi, a->mpi),                   //
                  "data_dir", ari_json_text(ari_data_dir()));
    return ari_json_end(ari_json_merge(result, rest), common);
}

static ar_status run_info(void *values, int *exit_code)
{
    const ari_common *common = values;
    ar_cpu_info cpu;
    accelerators found = {.gpus = 0};
    (void)exit_code;
    ari_cpu_info_get(&cpu);
    look(&found);
    if (ari_prints_text(common))
        AR_TRY(print_text(&cpu, &found));
    return common->json ? write_json(common, &cpu, &found) : AR_OK;
}

const ari_args_spec ari_info_spec = {
    .command = "info",
    .summary = "Tells what this machine has, which paths are chosen, and why something is not available.",
    .example = "anyrank info\nanyrank info --json -",
    .size = sizeof(ari_common),
    .run = run_info,
};

/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/transport.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Where one that is silent can still say why it could not join the others; -1: it is not silent. */
static int errors_fd = -1;

const char *const ari_transport_names[] = {"sim", "mpi", "nccl", NULL};

ar_status ari_transport_begin(ar_process **gives, const ari_transport_values *v, double timeout_s, bool check_calls)
{
    const ar_process_options o = {.transport = (ar_transport)v->transport,
                                  .timeout_ns = (uint64_t)(timeout_s * 1e9),
                                  .share_gpus = v->share_gpus,
                                  .check_calls = check_calls};
    *gives = NULL;
    if (v->share_gpus && o.transport != AR_TRANSPORT_NCCL)
        return ar_error_set(AR_ERR_ARG, "--share-gpus is for processes that NCCL connects: give --transport nccl");
    const ar_status st = o.transport == AR_TRANSPORT_SIM ? AR_OK : ar_process_create(gives, &o);
    /* Nobody else knows; but what process 0 found, it says itself. */
    if (st != AR_OK && errors_fd >= 0 && strncmp(ar_error_message(), "process 0:", strlen("process 0:")) != 0)
        dprintf(errors_fd, "anyrank: %s\n", ar_error_message());
    return st;
}

void ari_transport_end(ar_process *p)
{
    fflush(stdout);
    ar_process_destroy(p);
}

bool ari_transport_reports(const ar_process *p)
{
    return !p || ar_process_rank(p) == 0;
}

void ari_transport_print(FILE *to, const ar_process *p)
{
    if (p)
        fprintf(to, "ranks: %d processes, connected by %s\n", ar_process_size(p),
                ar_process_transport(p) == AR_TRANSPORT_MPI ? "MPI" : "NCCL");
}

void ari_transport_json(json_t *o, const ar_process *p)
{
    json_object_set_new(o, "transport", json_string(ar_transport_name(ar_process_transport(p))));
}

/* As Open MPI, MPICH and Slurm's PMI, torchrun and srun tell it. */
static bool is_another(void)
{
    static const char *const names[] = {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "RANK", "SLURM_PROCID"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *rank = getenv(names[i]);
        if (rank && *rank)
            return strtol(rank, NULL, 10) > 0;
    }
    return false;
}

static bool names_processes(int argc, char *const *argv)
{
    static const char name[] = "--transport";
    for (int i = 1; i < argc; i++) {
        const char *value = strncmp(argv[i], name, sizeof name - 1) == 0 ? argv[i] + sizeof name - 1 : NULL;
        if (value && *value == '=')
            value++;
        else if (value && *value == '\0')
            value = i + 1 < argc ? argv[i + 1] : NULL;
        else
            value = NULL;
        if (value && strcmp(value, ari_transport_names[AR_TRANSPORT_SIM]) != 0)
            return true;
    }
    return false;
}

void ari_transport_silence(int argc, char *const *argv)
{
    if (!names_processes(argc, argv) || !is_another())
        return;
    errors_fd = dup(STDERR_FILENO);
    /* Where there is no /dev/null the words come more than once, which is no harm. */
    if (!freopen("/dev/null", "w", stdout) || !freopen("/dev/null", "w", stderr))
        return;
}

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <jansson.h>

#include "anyrank/run.h"
#include "cli/options/args.h"
#include "cli/shared/command.h"

/* Options that say whether ranks are threads of this process or separate processes, shared by all subcommands that a
 * launcher can run. */
typedef struct ari_transport_values {
    int transport; /* ar_transport */
    bool share_gpus;
} ari_transport_values;

extern const ari_option ari_transport_options[]; /* options of an ari_transport_values */

/** Refuses an option that only threads of one process support if ranks are processes; option NULL: none. Errors:
 *  AR_ERR_ARG. */
AR_NODISCARD ar_status ari_transport_check(const ari_transport_values *v, const char *option);
/** Sets common->process to this process's place among the processes that the launcher started: NULL with sim, and NULL
 *  with nccl without a launcher, which sets common->nccl_threads. `common` is the start of the options' values. All
 *  processes must have been started with the same subcommand and options, except options of a single process. If some
 *  of the launcher's processes do not arrive, the program ends with a message some seconds after the timeout.
 *  check_calls: as in ar_process_options. The caller ends it by ari_transport_end. Errors: AR_ERR_ARG (share_gpus
 *  without nccl, several processes without a transport, different options), those of ar_process_create. */
AR_NODISCARD ar_status ari_transport_begin(ari_common *common, const ari_transport_values *v, const ari_args_spec *spec,
                                           double timeout_s, bool check_calls);
/** Refuses --transport nccl for ranks as threads that NCCL cannot connect here: ranks on other devices, or more ranks
 *  than GPUs. Errors: AR_ERR_ARG, AR_ERR_UNSUPPORTED (no NCCL). */
AR_NODISCARD ar_status ari_transport_fits(const ari_common *common, const ar_run *run, int ranks);
/** Leaves the other processes after the last output; an error status ends them too. NULL: nothing to leave. */
void ari_transport_end(ar_process *p, ar_status st);
/** Returns true if this process prints and writes files: it is the only one, or process 0. */
bool ari_transport_reports(const ar_process *p);
/** Prints the ranks' device, unless it is the CPU, and their connection, if they are processes: "device: 4 ranks share
 *  GPU 0 (NVIDIA H200)", "device: a GPU for each rank (4 x NVIDIA H200), connected by NCCL", "ranks: 4 processes,
 *  connected by MPI". world 0: the runs have different numbers of ranks. */
void ari_ranks_print(FILE *out, const ar_run *run, int world);
/** Adds "transport" to an object; world 0: of several runs, the largest one counts. */
void ari_transport_json(json_t *o, const ar_run *run, int world);

/** Prepares the process if the arguments name a transport of processes. Call it first. Silences every process except
 *  the first one that a launcher started, because they would all print the same. Lets CUDA load all kernels at once.
 *  Modifies the environment. */
void ari_transport_prepare(int argc, char *const *argv);
bool ari_transport_is_silent(void);
/** At the end of a failed process that has not joined the others: informs them. If they cannot be reached, prints the
 *  error even on a silenced process. */
void ari_transport_finish(int argc, char *const *argv, int exit_code);

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "anyrank/arch.h"
#include "anyrank/process.h"
#include "anyrank/status.h"
#include "ref/io/file.h"

/* Functions that all subcommands share: exit codes, errors, the version, output of results, and notes on a
 * configuration. */

/** Options of every subcommand. */
typedef struct ari_common {
    const char *json; /* file for the result; "-": standard output; NULL: none */
    bool quiet;
    bool no_color;
    int threads;     /* threads of the whole process; 0: as many as cores */
    uint64_t seed;   /* 0 if not given */
    int progress_fd; /* file descriptor for progress that a program reads (cli/shared/progress.h); 0: none */
    int argc;        /* arguments of the subcommand, starting with its name */
    char *const *argv;
    const char *repeated;       /* option that is given twice and whose last value counts; NULL: none */
    struct ar_process *process; /* this process's place after a run with processes as ranks has begun; NULL: ranks
                                   are threads */
    bool nccl_threads;          /* true if NCCL connects that run's ranks, which are threads */
} ari_common;

/* Exit status, as diff has it. */
typedef enum ari_exit {
    ARI_EXIT_SAME = 0,      /* the same, or success */
    ARI_EXIT_DIFFERENT = 1, /* a difference, or a failed check */
    ARI_EXIT_USAGE = 2,     /* an error that the caller can correct: options, files, configurations */
    ARI_EXIT_MACHINE = 3    /* the machine failed */
} ari_exit;

/** True if a cause is known (ar_first_difference), which `anyrank causes NAME` then explains. */
bool ari_cause_known(const char *cause);
/** Returns the exit code for a status: AR_OK 0; 3 for what the caller cannot mend (no memory, a late or ended rank, a
 *  broken invariant); otherwise 2. A difference is not a status: the caller returns 1. */
int ari_exit_code(ar_status st);

/** Prints "anyrank check: what went wrong" to stderr, from the thread's last message or, if there is none, from the
 *  status. command NULL: "anyrank: ...". */
void ari_print_error(const char *command, ar_status st);

/** "0.3.0". Static storage. */
const char *ari_version(void);
/** "Release". Static storage. */
const char *ari_build_type(void);
/** Prints version, build type, the BLAS with its kernels, and CUDA, one line each. Initialises the BLAS. */
void ari_print_version(FILE *out);

/** Returns true if the text report goes to stdout: without --quiet, and unless --json uses stdout. */
bool ari_prints_text(const ari_common *common);

/** Returns the beginning of every result: {"tool":"anyrank","version":...,"schema":1,"command":...}. A new reference;
 *  NULL if memory is short. */
json_t *ari_json_begin(const char *command);
/** Adds the members of `rest` to object and takes over the reference to `rest`. Returns the object. If either is NULL,
 *  frees both and returns NULL. */
json_t *ari_json_merge(json_t *object, json_t *rest);
/** Writes a result to the file of --json, if there is one. Takes over the reference to `result` in every case; NULL is
 *  AR_ERR_MEMORY. Errors: AR_ERR_IO, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_json_end(json_t *result, const ari_common *common);

/** Returns a JSON string, null for NULL and "". A new reference; NULL if memory is short. */
json_t *ari_json_text_or_null(const char *text);
/** Returns notes on a config such as "config.json: key 'foo' is not known here and was ignored", one for each unknown
 *  key and for keys whose names were not kept. Also prints them with "note: " to out (stderr, so that a report on
 *  stdout stays unchanged) unless out is NULL. A new reference to an array of strings; NULL if memory is short. */
json_t *ari_config_notes(FILE *out, const ar_config *c);

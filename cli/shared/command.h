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

/* Parts that all subcommands share: exit codes, errors, the version, output of results, and notes on a
 * configuration. */

/** Options of every subcommand. */
typedef struct ari_common {
    const char *json; /* file for the result; "-": standard output; NULL: none */
    bool quiet;
    bool no_color;
    int threads;     /* of the whole process; 0: as many as there are cores */
    uint64_t seed;   /* 0 unless given */
    int progress_fd; /* file descriptor for progress that a program reads (cli/shared/progress.h); 0: none */
    int argc;        /* the subcommand's arguments, from its name on */
    char *const *argv;
    const char *repeated;       /* option that is given twice and whose last value counts; NULL: none */
    struct ar_process *process; /* this one's place, once a run has begun whose ranks are processes; NULL: threads */
    bool nccl_threads;          /* the ranks of that run are threads that NCCL is to connect */
} ari_common;

/* Exit status, as diff has it. */
typedef enum ari_exit {
    ARI_EXIT_SAME = 0,      /* the same, or all well */
    ARI_EXIT_DIFFERENT = 1, /* a difference, or a failed check */
    ARI_EXIT_USAGE = 2,     /* the caller can put it right: options, files, configurations */
    ARI_EXIT_MACHINE = 3    /* the machine failed */
} ari_exit;

/** True if a cause is known (ar_first_difference), which `anyrank causes NAME` then explains. */
bool ari_cause_known(const char *cause);
/** Returns the exit code for a status: AR_OK 0; 3 for what the caller cannot mend (no memory, a late or ended rank, a
 *  broken invariant); otherwise 2. A difference is not a status: the caller returns 1. */
int ari_exit_code(ar_status st);

/** "anyrank check: what went wrong" on stderr, from the thread's last message or, without one, from the status.
 *  command NULL: "anyrank: ...". */
void ari_print_error(const char *command, ar_status st);

/** "0.3.0". Static storage. */
const char *ari_version(void);
/** "Release". Static storage. */
const char *ari_build_type(void);
/** Version, build type, the BLAS with its kernels, CUDA: one line each. Starts it. */
void ari_print_version(FILE *out);

/** True if the text for people goes to stdout: neither with --quiet, nor when --json has taken stdout. */
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

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
    const char *json; /* "-": standard output; NULL: none */
    bool quiet;
    bool no_color;
    int threads;     /* of the whole process; 0: as many as there are cores */
    uint64_t seed;   /* 0 unless given */
    int progress_fd; /* that a program reads the progress from (cli/shared/progress.h); 0: none */
    int argc;        /* the subcommand's arguments, from its name on */
    char *const *argv;
    const char *repeated;       /* an option that is given twice, of which the last value counts; NULL: none */
    struct ar_process *process; /* this one's place, once a run has begun whose ranks are processes; NULL: threads */
    bool nccl_threads;          /* the ranks of that run are threads that NCCL is to connect */
} ari_common;

/* As diff has them. */
typedef enum ari_exit {
    ARI_EXIT_SAME = 0,      /* the same, or all well */
    ARI_EXIT_DIFFERENT = 1, /* a difference, or a failed check */
    ARI_EXIT_USAGE = 2,     /* the caller can put it right: options, files, configurations */
    ARI_EXIT_MACHINE = 3    /* the machine failed */
} ari_exit;

/** True if a cause is known (ar_first_difference), which `anyrank causes NAME` then explains. */
bool ari_cause_known(const char *cause);
/** The exit code for a status: AR_OK 0; 3 for what the caller cannot put right (no memory, a rank that was late or
 * ended, a broken invariant); any other 2. A difference is no status: 1 is the caller's. */
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
bool ari_wants_text(const ari_common *common);

/** {"tool":"anyrank","version":...,"schema":1,"command":...}: what every result begins with. Gives; NULL without
 *  memory. */
json_t *ari_json_begin(const char *command);
/** Adds the members of `rest`, which it takes. Gives the object; NULL, and frees both, where either is NULL. */
json_t *ari_json_whole(json_t *object, json_t *rest);
/** Writes a result to where --json says; nothing without --json. Takes `result` in every case (json_decref); NULL is
 *  AR_ERR_MEMORY. Errors: AR_ERR_IO, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_json_end(json_t *result, const ari_common *common);

/** A JSON string; null for NULL and "". Gives; NULL without memory. */
json_t *ari_json_text_or_null(const char *text);
/** "config.json: key 'foo' is not known here and was ignored": of each unknown key, and of those whose names were not
 *  kept. Prints them to `out`, with "note: " before them (stderr, so that a report stays what it is), unless NULL.
 *  Gives them as an array of strings; NULL without memory. */
json_t *ari_config_notes(FILE *out, const ar_config *c);

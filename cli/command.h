/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CLI_COMMAND_H
#define ARI_CLI_COMMAND_H

#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>

#include "anyrank/config.h"
#include "anyrank/status.h"
#include "cli/options/args.h"
#include "ref/io/file.h"

/* What all subcommands share: exit codes, errors, the version, where results go, and notes of a configuration. */

/* As diff has them. */
typedef enum ari_exit {
    ARI_EXIT_SAME = 0,      /* the same, or all well */
    ARI_EXIT_DIFFERENT = 1, /* a difference, or a failed check */
    ARI_EXIT_USAGE = 2,     /* the caller can put it right: options, files, configurations */
    ARI_EXIT_MACHINE = 3    /* the machine failed */
} ari_exit;

/** The exit code for a status: AR_OK 0; 3 for what the caller cannot put right (no memory, a rank that was late or
 * ended, a broken invariant); any other 2. A difference is no status: 1 is the caller's. */
int ari_exit_code(ar_status st);

/** "anyrank check: what went wrong" on stderr, from the thread's last message or, without one, from the status.
 *  command NULL: "anyrank: ...". */
void ari_print_error(const char *command, ar_status st);

/** "0.1.0". Static storage. */
const char *ari_version(void);
/** "Release". Static storage. */
const char *ari_build_type(void);
/** Version, build type, the BLAS with its kernels, CUDA: one line each. Starts it. */
void ari_print_version(FILE *to);

/** Whether the text for people goes to stdout: not with --quiet, nor where --json took stdout. */
bool ari_wants_text(const ari_common *common);

/** {"tool":"anyrank","version":...,"command":...}: what every result begins with. Gives; NULL without memory. */
json_t *ari_json_begin(const char *command);
/** Adds the members of `rest`, which it takes. Gives the object; NULL, and frees both, where either is NULL. */
json_t *ari_json_whole(json_t *object, json_t *rest);
/** Writes a result to where --json says; nothing without --json. Takes `result` in every case (json_decref); NULL is
 *  AR_ERR_MEMORY. Errors: AR_ERR_IO, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_json_end(json_t *result, const ari_common *common);

/* A new subcommand is a spec in the file of its name, and a row in main.c's table. */
typedef struct ari_subcommand {
    const char *name;
    const char *summary;               /* NULL: not listed */
    const ari_args_spec *spec;         /* NULL: it takes no options */
    int (*run)(int argc, char **argv); /* without a spec */
} ari_subcommand;

/** Ends with the name NULL. */
extern const ari_subcommand ari_subcommands[];
extern const ari_args_spec ari_check_spec, ari_grads_spec, ari_train_spec, ari_reshard_spec, ari_verify_spec,
    ari_plan_spec, ari_lint_spec, ari_bugs_spec, ari_bench_spec, ari_info_spec;

/** Not listed: `anyrank info --probe` runs it in its own processes, since BLIS reads its choice of kernels once per
 *  process. Prints the speed of sgemm in GFLOP/s. */
int ari_command_probe_gemm(int argc, char **argv);
/** Not listed: `anyrank describe TEMPLATE OUT`, by which the build makes manual pages and completions: a copy of the
 *  template in which the tables of options replace the lines that ask for them. */
int ari_command_describe(int argc, char **argv);

/** A JSON string; null for NULL and "". Gives; NULL without memory. */
json_t *ari_json_text_or_null(const char *text);
/** "config.json: key 'foo' is not known here and was ignored": of each unknown key, and of those whose names were not
 *  kept. Prints them to `to`, with "note: " before them (stderr, so that a report stays what it is), unless NULL. Gives
 *  them as an array of strings; NULL without memory. */
json_t *ari_config_notes(FILE *to, const ar_config *c);

#endif

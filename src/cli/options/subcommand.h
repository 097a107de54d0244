/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CLI_SUBCOMMAND_H
#define ARI_CLI_SUBCOMMAND_H

#include "cli/options/args.h"

typedef struct ari_subcommand ari_subcommand;
/* A new subcommand is a spec in the file of its name, and a row in main.c's table, which ends with the name NULL. */
struct ari_subcommand {
    const char *name;
    const char *summary;                                          /* NULL: not listed */
    const ari_args_spec *spec;                                    /* NULL: it takes no options */
    int (*run)(const ari_subcommand *all, int argc, char **argv); /* without a spec */
};
extern const ari_args_spec ari_check_spec, ari_grads_spec, ari_train_spec, ari_reshard_spec, ari_verify_spec,
    ari_logprobs_spec, ari_plan_spec, ari_lint_spec, ari_bugs_spec, ari_causes_spec, ari_bench_spec, ari_info_spec;

/** A subcommand from its arguments to its exit code: prints the help, the version, or an error, and leaves the other
 *  processes. */
int ari_args_run(const ari_args_spec *spec, int argc, char *const *argv);
/** Not listed: `anyrank describe TEMPLATE OUT`, by which the build makes manual pages and completions: a copy of the
 *  template in which the tables of options replace the lines that ask for them. */
int ari_command_describe(const ari_subcommand *all, int argc, char **argv);

#endif

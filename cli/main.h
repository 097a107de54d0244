/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CLI_MAIN_H
#define ARI_CLI_MAIN_H

#include "cli/args.h"

/* The subcommands: each in the file of its name, with argv[0] the subcommand's name, and giving the exit code. A new
 * one is declared here and gets a row in main.c's table. */
typedef struct ari_subcommand {
    const char *name;
    const char *summary;               /* NULL: not listed */
    int (*run)(int argc, char **argv); /* NULL: not in this version */
    const ari_args_spec *spec;         /* NULL: it takes no options */
} ari_subcommand;

/** Ends with the name NULL. */
extern const ari_subcommand ari_subcommands[];
extern const ari_args_spec ari_check_spec, ari_grads_spec, ari_train_spec, ari_reshard_spec, ari_verify_spec,
    ari_bugs_spec, ari_bench_spec, ari_info_spec;

int ari_command_check(int argc, char **argv);
int ari_command_grads(int argc, char **argv);
int ari_command_train(int argc, char **argv);
int ari_command_reshard(int argc, char **argv);
int ari_command_verify(int argc, char **argv);
int ari_command_bugs(int argc, char **argv);
int ari_command_bench(int argc, char **argv);
int ari_command_info(int argc, char **argv);

/** Not listed: `anyrank info --probe` runs it in processes of their own, since BLIS reads its choice of kernels once
 * per process. Prints the speed of sgemm in GFLOP/s. */
int ari_command_probe_gemm(int argc, char **argv);

/** Not listed: `anyrank describe TEMPLATE OUT`, by which the build makes manual pages and completions: a copy of the
 *  template in which the tables of options replace the lines that ask for them. */
int ari_command_describe(int argc, char **argv);

#endif

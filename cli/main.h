/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CLI_MAIN_H
#define ARI_CLI_MAIN_H

/* The subcommands: each in the file of its name, with argv[0] the subcommand's name, and giving the exit code. A new
 * one is declared here and gets a row in main.c's table. */
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

#endif

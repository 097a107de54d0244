/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CLI_INFO_H
#define ARI_CLI_INFO_H

#include "cli/options/subcommand.h"

/** Not listed: `anyrank info --probe` runs it in its own processes, since BLIS reads its choice of kernels once per
 *  process. Prints the speed of sgemm in GFLOP/s. */
int ari_command_probe_gemm(const ari_subcommand *all, int argc, char **argv);

#endif

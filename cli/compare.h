/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "cli/options/args.h"

/** Runs `anyrank compare`: replaces this process by the Python package's program. argv[0] is "compare". Returns an exit
 *  status if the program cannot be started. */
int ari_command_compare(const ari_subcommand *subcommands, int argc, char **argv);

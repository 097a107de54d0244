/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CLI_CAUSES_H
#define ARI_CLI_CAUSES_H

#include "cli/options/subcommand.h"

/** Not listed: the table of causes as JSON, of which scripts/causes_page.py makes causes.md. */
int ari_command_causes(const ari_subcommand *all, int argc, char **argv);

#endif

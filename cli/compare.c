/* SPDX-License-Identifier: Apache-2.0 */
/* anyrank compare: the Python package runs and compares the user's training scripts. This program hands over to it. */
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/compare.h"
#include "ref/core/text.h"
#include "ref/io/config_private.h"

int ari_command_compare(const ari_subcommand *subcommands, int argc, char **argv)
{
    (void)subcommands;
    char door[PATH_MAX];
    if (!ari_package_path(door, sizeof door, "compare/door.py")) {
        fprintf(stderr,
                "anyrank compare: the Python package anyrank, which runs the script, is not beside this program; "
                "install the wheel (docs/guide/python.md)\n");
        return ARI_EXIT_USAGE;
    }
    char options[] = "-B", default_python[] = "python3";
    char *chosen = getenv("ANYRANK_PYTHON");
    char *python = chosen != NULL && chosen[0] != '\0' ? chosen : default_python;
    char **words = calloc((size_t)argc + 3, sizeof *words);
    if (words == NULL)
        return ARI_EXIT_MACHINE;
    words[0] = python;
    words[1] = options;
    words[2] = door;
    for (int i = 1; i < argc; i++)
        words[2 + i] = argv[i];
    execvp(python, words);
    fprintf(stderr,
            "anyrank compare: %s: %s; put the Python that has torch on the PATH as python3, or set "
            "ANYRANK_PYTHON to it\n",
            ARI_SHOW(python), strerror(errno));
    free(words);
    return ARI_EXIT_USAGE;
}

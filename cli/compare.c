/* SPDX-License-Identifier: Apache-2.0 */
/* anyrank compare: the Python package runs and compares the user's training scripts. This program has the table of
 * options, from which the help, the manual page and the completions come, and then starts the package. */
#include <errno.h>
#include <float.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/compare.h"
#include "ref/core/text.h"
#include "ref/io/config_private.h"

/* The package reads the words again. Here they are only checked. */
typedef struct compare_values {
    ari_common common;
    const char *script; /* a mistake: the script must come after -- */
    const char *ranks, *commit, *reference, *out, *html, *spec;
    ari_strings arguments, python, only, ignore, map;
    int steps, first_step;
    double rtol, atol, timeout;
    bool same_weights, to_the_end, bits, operations, verbose;
} compare_values;

#define ARI_VALUES compare_values
static const ari_option options[] = {
    ARI_OPTION_SECTION("runs"),
    ARI_OPTION_STRING("ranks", ranks, "A,B",
                      "numbers of ranks; the first is the reference (default 1,2; with another reference 1)"),
    ARI_OPTION_INT("steps", steps, 1, INT_MAX, "N", "training steps to compare (default 2)"),
    ARI_OPTION_INT("first-step", first_step, 1, INT_MAX, "K",
                   "number of the first step, in a script that resumes after K-1 (default 1)"),
    ARI_OPTION_STRINGS("args-for", arguments, "'RANKS ARGUMENTS'",
                       "further arguments for the run with so many ranks, as one word: '1 --accumulate 2'"),
    ARI_OPTION_FLAG("same-weights", same_weights, "load the reference's initial weights into the other runs"),
    ARI_OPTION_FLAG("to-the-end", to_the_end, "let the script finish instead of ending it after the compared steps"),
    ARI_OPTION_DOUBLE("timeout", timeout, 1, 1e9, "SECONDS", "end a run that takes longer (default 1800)"),
    ARI_OPTION_SECTION("against"),
    ARI_OPTION_STRING("commit", commit, "REV", "compare with the script as it was at this git commit"),
    ARI_OPTION_STRING("reference", reference, "COMMAND", "compare with another command"),
    ARI_OPTION_STRINGS("python", python, "PYTHON",
                       "given twice: compare the script in two Python environments; once: the Python to use"),
    ARI_OPTION_SECTION("rule"),
    ARI_OPTION_DOUBLE("rtol", rtol, 0, DBL_MAX, "X", "relative tolerance (default: measured on one rank, else 1e-4)"),
    ARI_OPTION_DOUBLE("atol", atol, 0, DBL_MAX, "Y", "absolute tolerance (default: measured on one rank, else 1e-5)"),
    ARI_OPTION_FLAG("bits", bits, "the same is what has the same bits"),
    ARI_OPTION_SECTION("tensors"),
    ARI_OPTION_STRINGS("only", only, "GLOB[,GLOB]", "only tensors of these names; may be given several times"),
    ARI_OPTION_STRINGS("ignore", ignore, "GLOB[,GLOB]", "no tensors of these names; may be given several times"),
    ARI_OPTION_STRINGS("map", map, "FILE", "how the run's files make full tensors, for names that differ (verify.md)"),
    ARI_OPTION_STRING("spec", spec, "FILE", "placement of plain tensors of hand-written layers (pytorch.md)"),
    ARI_OPTION_FLAG("operations", operations, "record each operation, to name the first wrong one"),
    ARI_OPTION_SECTION("output"),
    ARI_OPTION_FOLDER("out", out, "DIR", "keep the dumps and the scripts' output in this folder"),
    ARI_OPTION_FILE("html", html, "FILE.html", "write a page with the report", .written = true),
    ARI_OPTION_FLAG("verbose", verbose, "show what the script prints"),
    {0},
};

/* Used for completions, and for an error that says where the script belongs. */
static const ari_positional positionals[] = {
    ARI_POSITIONAL("SCRIPT", FILE, script, "the training script, after --"),
    {0},
};

/* Replaces this process by the package's program; returns only with an error. */
static ar_status run_compare(void *values, int *exit_code)
{
    const compare_values *v = values;
    char door[PATH_MAX], no_bytecode[] = "-B", default_python[] = "python3";
    (void)exit_code;
    if (v->script != NULL)
        return ar_error_set(AR_ERR_ARG, "%s: put -- before the script: anyrank compare [options] -- %s",
                            ARI_SHOW(v->script), ARI_SHOW(v->script));
    if (v->common.progress_fd != 0)
        return ar_error_set(AR_ERR_UNSUPPORTED, "--progress-fd: compare shows its progress on a terminal only");
    if (!ari_package_path(door, sizeof door, "compare/door.py"))
        return ar_error_set(AR_ERR_NOT_FOUND, "the Python package anyrank, which runs the script, is not beside this "
                                              "program; install the wheel (docs/guide/python.md)");
    char *chosen = getenv("ANYRANK_PYTHON");
    char *python = chosen != NULL && chosen[0] != '\0' ? chosen : default_python;
    char *const *given = v->common.argv + 1; /* the process's arguments, which end with NULL */
    size_t n = 0;
    while (given[n] != NULL)
        n++;
    ARI_OWNED char **words = NULL;
    AR_TRY(ari_alloc_zero((void **)&words, n + 4, sizeof *words, "arguments"));
    words[0] = python;
    words[1] = no_bytecode;
    words[2] = door;
    memcpy(words + 3, given, n * sizeof *words);
    execvp(python, words);
    return ar_error_set(AR_ERR_NOT_FOUND,
                        "%s: %s; put the Python that has torch on the PATH as python3, or set ANYRANK_PYTHON to it",
                        ARI_SHOW(python), strerror(errno));
}

const ari_args_spec ari_compare_spec = {
    .command = "compare",
    .usage = "[options] -- SCRIPT|-m MODULE [ARGUMENTS]",
    .summary = "Runs a training script on one rank and on two, or in two other ways, and compares every activation, "
               "gradient and weight of the first steps. You change no line of the script. {ranks} in its arguments "
               "becomes the run's number of ranks.",
    .example = "anyrank compare -- train.py --batch 8\n"
               "anyrank compare -- train.py --batch {8//ranks}       # a batch size per rank\n"
               "anyrank compare --ranks 2,4 -- -m my.training        # too large for one rank\n"
               "anyrank compare --commit HEAD~1 -- train.py          # did my change change anything?\n"
               "anyrank compare --python old/bin/python --python new/bin/python -- train.py",
    .options = options,
    .positionals = positionals,
    .size = sizeof(compare_values),
    .run = run_compare,
};

int ari_command_compare(const ari_subcommand *subcommands, int argc, char **argv)
{
    (void)subcommands;
    int count = 0; /* number of words before the first -- */
    while (count < argc && strcmp(argv[count], "--") != 0)
        count++;
    return ari_args_run(&ari_compare_spec, count, argv);
}

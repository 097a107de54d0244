/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "anyrank/device.h"
#include "cli/compare.h"
#include "cli/options/args.h"
#include "cli/options/transport.h"
#include "ref/core/os/os.h"
#include "ref/core/os/threads.h"
#include "ref/core/text.h"
#include "ref/cpu/device_private.h"

/* Subcommands in the order in which a new user needs them. */
static const ari_subcommand subcommands[] = {
    {"compare", "run a training script in two ways and compare every tensor", &ari_compare_spec, ari_command_compare},
    {"check", "compare every tensor of training steps with one rank's, bit for bit", &ari_check_spec, NULL},
    {"grads", "write outputs and gradients of one forward and backward", &ari_grads_spec, NULL},
    {"train", "train on text, the same bits on every layout", &ari_train_spec, NULL},
    {"verify", "compare two dumps of tensors", &ari_verify_spec, NULL},
    {"plan", "what a layout does with a model, without running it", &ari_plan_spec, NULL},
    {"lint", "check a layout without running numbers", &ari_lint_spec, NULL},
    {"bugs", "list the faults that can be injected, and run each", &ari_bugs_spec, NULL},
    {"causes", "list the causes that differences are explained by", &ari_causes_spec, NULL},
    {"info", "what this machine has, and which paths are chosen", &ari_info_spec, NULL},
    {"describe", NULL, NULL, ari_command_describe},
    {0},
};
enum { SUBCOMMANDS = sizeof subcommands / sizeof subcommands[0] - 1 };

static void print_help(FILE *out)
{
    fprintf(out, "usage: anyrank SUBCOMMAND [options]\n\n"
                 "anyrank trains a transformer on any number of simulated ranks and shows that\n"
                 "every activation, gradient and updated weight has the same bits as on one\n"
                 "rank.\n\n"
                 "subcommands:\n");
    for (size_t i = 0; i < SUBCOMMANDS; i++) {
        if (subcommands[i].summary != NULL)
            fprintf(out, "  %-9s %s\n", subcommands[i].name, subcommands[i].summary);
    }
    fprintf(out, "\nanyrank SUBCOMMAND --help tells a subcommand's options; anyrank --version the\n"
                 "version. Exit status: 0 the same, 1 a difference, 2 wrong usage or input, 3 the\n"
                 "machine failed.\n\n"
                 "example:\n"
                 "  anyrank check gpt2-demo --dp 2 --tp 4 --sp\n");
}

static int unknown_subcommand(const char *name)
{
    const char *names[SUBCOMMANDS];
    size_t n = 0;
    for (size_t i = 0; i < SUBCOMMANDS; i++) {
        if (subcommands[i].summary != NULL)
            names[n++] = subcommands[i].name;
    }
    const char *near = ari_nearest(name, names, n);
    if (near != NULL)
        fprintf(stderr, "anyrank: unknown subcommand '%s'; did you mean %s?\n", ARI_SHOW(name), near);
    else
        fprintf(stderr, "anyrank: unknown subcommand '%s'; anyrank --help lists them\n", ARI_SHOW(name));
    return ARI_EXIT_USAGE;
}

static int run_subcommand(int argc, char **argv)
{
    for (size_t i = 0; i < SUBCOMMANDS; i++) {
        const ari_subcommand *s = &subcommands[i];
        if (strcmp(s->name, argv[0]) != 0)
            continue;
        return s->run != NULL ? s->run(subcommands, argc, argv) : ari_args_run(s->spec, argc, argv);
    }
    return unknown_subcommand(argv[0]);
}

/* Output left in stdout's buffer must not be lost silently: a full disk is a failed run. */
static int close_output(int exit_code)
{
    if (fflush(stdout) == 0 && ferror(stdout) == 0)
        return exit_code;
    fprintf(stderr, "anyrank: standard output: %s\n", strerror(errno));
    return ARI_EXIT_MACHINE;
}

static int run_command(int argc, char **argv)
{
    if (argc < 2) {
        print_help(stderr);
        return ARI_EXIT_USAGE;
    }
    const char *command = argv[1];
    if (strcmp(command, "--help") == 0 || strcmp(command, "-h") == 0 || strcmp(command, "help") == 0) {
        /* `anyrank help check` is `anyrank check --help`. */
        char help[] = "--help";
        char *help_argv[] = {argc > 2 ? argv[2] : NULL, help, NULL};
        if (argc > 2 && command[0] != '-')
            return run_subcommand(2, help_argv);
        print_help(stdout);
        return ARI_EXIT_SAME;
    }
    if (strcmp(command, "--version") == 0) {
        ari_print_version(stdout);
        return ARI_EXIT_SAME;
    }
    if (command[0] == '-') {
        fprintf(stderr, "anyrank: %s: options stand after the subcommand; anyrank --help lists the subcommands\n",
                ARI_SHOW(command));
        return ARI_EXIT_USAGE;
    }
    return run_subcommand(argc - 1, argv + 1);
}

typedef struct command_line {
    int argc;
    char **argv;
    int exit_code;
} command_line;

static void *whole_command(void *user)
{
    command_line *command = user;
    ari_transport_prepare(command->argc, command->argv);
    ari_cpu_select_kernels();
    command->exit_code = close_output(run_command(command->argc, command->argv));
    ari_transport_finish(command->argc, command->argv, command->exit_code);
    return NULL;
}

/* Runs the command on a thread of its own, because the main thread's stack is only as large as `ulimit -s` allows. */
int main(int argc, char **argv)
{
    ari_threads_sleep(argv);
    ari_memory_return_large();
    /* A reader that closes early (`| head`) ends the command quietly, even if the parent ignores the signal. */
    signal(SIGPIPE, SIG_DFL);
    signal(SIGXFSZ, SIG_IGN); /* exceeding `ulimit -f` becomes an error with a message, like a full disk */
    command_line command = {argc, argv, ARI_EXIT_MACHINE};
    pthread_t thread;
    if (ari_thread_create(&thread, whole_command, &command) == 0)
        pthread_join(thread, NULL);
    else
        whole_command(&command);
    return command.exit_code;
}

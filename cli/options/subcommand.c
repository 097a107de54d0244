/* SPDX-License-Identifier: Apache-2.0 */

#include <ctype.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>

#include "cli/options/transport.h"
#include "ref/core/atomic_file.h"
#include "ref/core/size.h"

static const char *text_at(const void *values, size_t offset)
{
    return *(const char *const *)(const void *)((const char *)values + offset);
}

static bool same_file(const char *a, const char *b)
{
    struct stat x, y;
    return a && stat(a, &x) == 0 && S_ISREG(x.st_mode) && stat(b, &y) == 0 && x.st_dev == y.st_dev &&
           x.st_ino == y.st_ino;
}

/* Refuses to overwrite inputs, because the names of an input and an output are easily swapped. */
static ar_status keep_inputs(const ari_args_spec *spec, const ari_option_list *l, const void *values,
                             const ari_option *written, const char *path)
{
    const char *input = NULL;
    for (const ari_positional *p = spec->positionals; p && p->name && !input; p++)
        input = same_file(text_at(values, p->offset), path) ? text_at(values, p->offset) : NULL;
    for (size_t i = 0; i < l->n && !input; i++) {
        const ari_option *o = l->option[i];
        if (!o->written && (o->kind == ARI_OPT_STRING || o->kind == ARI_OPT_FILE))
            input = same_file(text_at(values, l->offset[i]), path) ? text_at(values, l->offset[i]) : NULL;
    }
    return input ? ar_error_set(AR_ERR_ARG, "--%s %s: that is %s, which is read; give the name of another file",
                                written->name, ARI_SHOW(path), ARI_SHOW(input))
                 : AR_OK;
}

/* Tries the files that the command will write, so that long work is not done in vain. */
static ar_status check_written(const ari_args_spec *spec, const void *values)
{
    const ari_option_list l = ari_options_of(spec);
    const char *paths[ARI_MAX_OPTIONS] = {NULL};
    for (size_t i = 0; i < l.n; i++) {
        const ari_option *o = l.option[i];
        paths[i] = o->written ? text_at(values, l.offset[i]) : NULL;
        const bool dash = paths[i] && strcmp(paths[i], "-") == 0;
        if (dash && i < l.local_count)
            return ar_error_set(AR_ERR_ARG, "--%s - is no file: give a path (/dev/stdout is one)", o->name);
        for (size_t k = 0; k < i && paths[i]; k++)
            if (paths[k] && strcmp(paths[k], paths[i]) == 0)
                return ar_error_set(AR_ERR_ARG, "--%s and --%s both name %s: one would replace the other",
                                    l.option[k]->name, o->name, ARI_SHOW(paths[i]));
        if (paths[i] && !dash)
            AR_TRY(keep_inputs(spec, &l, values, o, paths[i]));
        if (paths[i] && !dash && !ari_transport_is_silent())
            AR_TRY(ari_atomic_file_check(paths[i]));
    }
    return AR_OK;
}

static ar_status check_progress(const ari_common *common)
{
    if (common->progress_fd == 0 || fcntl(common->progress_fd, F_GETFD) >= 0)
        return AR_OK;
    return ar_error_set(AR_ERR_ARG, "--progress-fd %d: this file descriptor is not open", common->progress_fd);
}

/* Decides whether the subcommand runs, after handling the help and the version, which need no run. */
static ar_status begin_subcommand(const ari_args_spec *spec, int argc, char *const *argv, void *values, bool *runs)
{
    ari_args_action action = ARI_ARGS_RUN;
    AR_TRY(ari_args_parse(spec, argc, argv, values, &action));
    *runs = action == ARI_ARGS_RUN;
    if (action == ARI_ARGS_HELP || action == ARI_ARGS_HELP_ALL)
        ari_args_help(stdout, spec, action == ARI_ARGS_HELP_ALL);
    if (action == ARI_ARGS_VERSION)
        ari_print_version(stdout);
    AR_TRY(check_progress(values));
    return *runs ? check_written(spec, values) : AR_OK;
}

static bool is_of_word(char c)
{
    return isalnum((unsigned char)c) || c == '-' || c == '_';
}

/* Returns true if the advice contains the option's name as whole words: both "virtual stages" and "virtual_stages" name
 * --virtual-stages. The advice is preceded by a character. */
static bool advice_names(const char *advice, const char *option)
{
    for (const char *cursor = advice; *cursor; cursor++) {
        size_t n = 0;
        while (cursor[n] &&
               (option[n] == '-' ? strchr("- _", cursor[n]) != NULL : tolower((unsigned char)cursor[n]) == option[n]))
            n++;
        if (!option[n] && !is_of_word(cursor[-1]) && !is_of_word(cursor[n]))
            return true;
    }
    return false;
}

/* Adds the subcommand's options to an error. The library uses the names of its fields, as C and Python have them: "give
 * tp of at least 2 and sp" gets "(--tp, --sp)". */
static void add_options_to_error(const ari_args_spec *spec, ar_status st)
{
    static const char *const verbs[] = {": give ", "; give ", ": take ", "; take "};
    const ari_option_list l = ari_options_of(spec);
    const char *advice = NULL;
    char names[200] = "";
    size_t used = 0;
    for (size_t i = 0; i < sizeof verbs / sizeof verbs[0] && !advice; i++)
        advice = strstr(ar_error_message(), verbs[i]);
    if (!advice || strstr(ar_error_message(), "--"))
        return;
    for (size_t i = 0; i < l.n && used < sizeof names; i++)
        if (l.option[i]->help && advice_names(advice + 1, l.option[i]->name))
            used +=
                (size_t)snprintf(names + used, sizeof names - used, "%s--%s", used > 0 ? ", " : "", l.option[i]->name);
    if (used > 0)
        (void)ar_error_set(st, "%s (%s)", ar_error_message(), names);
}

int ari_args_run(const ari_args_spec *spec, int argc, char *const *argv)
{
    ARI_OWNED void *values = NULL;
    bool runs = false;
    int exit_code = ARI_EXIT_SAME;
    ar_status st = ari_alloc_zero(&values, 1, spec->size, "options");
    if (st == AR_OK && spec->defaults)
        memcpy(values, spec->defaults, spec->size);
    if (st == AR_OK) {
        ari_common *common = values;
        common->argc = argc;
        common->argv = argv;
        st = begin_subcommand(spec, argc, argv, values, &runs);
    }
    const ari_common *options = values;
    if (st == AR_OK && runs && options->repeated && !options->quiet)
        fprintf(stderr, "note: --%s is given more than once; the last counts\n", options->repeated);
    if (st == AR_OK && runs)
        st = spec->run(values, &exit_code);
    if (st != AR_OK) {
        fflush(stdout);
        add_options_to_error(spec, st);
        ari_print_error(spec->command, st);
        exit_code = st == AR_ERR_MISMATCH && spec->mismatch_differs ? ARI_EXIT_DIFFERENT : ari_exit_code(st);
    }
    if (values)
        ari_transport_end(((const ari_common *)values)->process, st);
    return exit_code;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/args.h"

#include <stdlib.h>
#include <string.h>

#include "cli/command.h"
#include "cli/transport.h"
#include "ref/core/nearest.h"
#include "ref/io/file.h"

const ari_option ari_common_options[] = {
    {.name = "json",
     .kind = ARI_OPT_FILE,
     .at = offsetof(ari_common, json),
     .value = "FILE|-",
     .help = "write the result as JSON to FILE, or to standard output",
     .own = true},
    {.name = "quiet",
     .letter = 'q',
     .kind = ARI_OPT_FLAG,
     .at = offsetof(ari_common, quiet),
     .help = "print nothing but errors and what --json asks for",
     .own = true},
    {.name = "no-color",
     .kind = ARI_OPT_FLAG,
     .at = offsetof(ari_common, no_color),
     .help = "print words only; so does the environment variable NO_COLOR",
     .own = true},
    {.name = "threads",
     .kind = ARI_OPT_INT,
     .at = offsetof(ari_common, threads),
     .min = 1,
     .max = 4096,
     .value = "N",
     .help = "threads of the whole process (default: the number of cores)",
     .own = true},
    {.name = "seed",
     .kind = ARI_OPT_U64,
     .at = offsetof(ari_common, seed),
     .value = "N",
     .help = "seed of everything random (default 0)"},
    {.name = "help", .letter = 'h', .kind = ARI_OPT_FLAG, .at = ARI_OPT_NO_FIELD, .help = "print this and exit"},
    {.name = "version", .kind = ARI_OPT_FLAG, .at = ARI_OPT_NO_FIELD, .help = "print the version and exit"},
    {0},
};

/* --- looking options up ------------------------------------------------------------------------------------------- */

/* An option and the struct that its field is in. */
typedef struct found_option {
    const ari_option *option;
    char *base;
} found_option;

static const ari_option *find_in(const ari_option *options, const char *name, size_t length, char letter)
{
    for (const ari_option *o = options; o != NULL && o->name != NULL; o++) {
        if (letter != 0 ? o->letter == letter : strlen(o->name) == length && strncmp(o->name, name, length) == 0)
            return o;
    }
    return NULL;
}

/* By name, or by letter if that is not 0. A subcommand's own option hides a common one. */
static found_option find(const ari_args_spec *spec, void *values, const char *name, size_t length, char letter)
{
    found_option f = {find_in(spec->options, name, length, letter), values};
    if (f.option == NULL) {
        f.option = find_in(ari_common_options, name, length, letter);
        f.base = (char *)values + spec->common_at;
    }
    return f;
}

/* The nearest name: one that the word begins, else the one at the smallest edit distance; NULL if none is near. */
static const char *nearest_option(const ari_args_spec *spec, const char *word)
{
    const char *names[ARI_OPT_MOST];
    size_t n = 0;
    const ari_option *const tables[] = {spec->options, ari_common_options};
    for (size_t t = 0; t < 2; t++) {
        for (const ari_option *o = tables[t]; o != NULL && o->name != NULL && n < ARI_OPT_MOST; o++)
            names[n++] = o->name;
    }
    const size_t length = strlen(word);
    if (length < 2)
        return NULL; /* everything short is near to it */
    for (size_t i = 0; i < n; i++) {
        if (strncmp(names[i], word, length) == 0)
            return names[i];
    }
    return ari_nearest(word, names, n);
}

static ar_status unknown_option(const ari_args_spec *spec, const char *argument)
{
    char typed[ARI_OPT_TEXT];
    const char *name = argument + strspn(argument, "-");
    snprintf(typed, sizeof typed, "%.*s", (int)strcspn(name, "="), name);
    const char *word = ARI_SHOW(typed);
    const char *near = nearest_option(spec, word);
    const char *dashes = argument[1] == '-' ? "--" : "-";
    if (near != NULL)
        return ar_error_set(AR_ERR_ARG, "unknown option %s%s; did you mean --%s?", dashes, word, near);
    return ar_error_set(AR_ERR_ARG, "unknown option %s%s; anyrank %s --help lists the options", dashes, word,
                        spec->command);
}

/* --- the parse ---------------------------------------------------------------------------------------------------- */

static bool looks_like_number(const char *argument)
{
    if (argument == NULL)
        return false;
    const char first = argument[strspn(argument, "+-")];
    return first >= '0' && first <= '9';
}

/* A flag, or an option without a field, which is an action. */
static ar_status set_flag(const found_option *f, const char *value, ari_args_action *action)
{
    const ari_option *o = f->option;
    if (value != NULL)
        return ar_error_set(AR_ERR_ARG, "--%s: got '%s', but it takes no value", o->name, ARI_SHOW(value));
    if (o->at == ARI_OPT_NO_FIELD)
        *action = strcmp(o->name, "help") == 0 ? ARI_ARGS_HELP : ARI_ARGS_VERSION;
    else
        *(bool *)(f->base + o->at) = true;
    return AR_OK;
}

/* Takes the option at argv[*i], and its value where it is the next argument. */
static ar_status take_option(const ari_args_spec *spec, int argc, char *const *argv, int *i, void *values,
                             ari_args_action *action)
{
    const char *argument = argv[*i];
    const bool is_long = argument[1] == '-';
    const char *name = argument + (is_long ? 2 : 1);
    const char *value = is_long ? strchr(name, '=') : NULL;
    const size_t length = value != NULL ? (size_t)(value - name) : strlen(name);
    const char letter = is_long ? 0 : argument[1];
    if (!is_long && length != 1)
        return unknown_option(spec, argument);
    const found_option f = find(spec, values, name, length, letter);
    const ari_option *o = f.option;
    if (o == NULL)
        return unknown_option(spec, argument);
    if (o->kind == ARI_OPT_LATER)
        return ar_error_set(AR_ERR_UNSUPPORTED, "--%s: not in this version", o->name);
    value = value != NULL ? value + 1 : NULL;
    if (o->kind == ARI_OPT_FLAG)
        return set_flag(&f, value, action);
    const char *next = *i + 1 < argc ? argv[*i + 1] : NULL;
    if (value == NULL && o->otherwise != NULL && !looks_like_number(next)) {
        value = o->otherwise;
    } else if (value == NULL) {
        /* A negative number is a value; another option is none. */
        if (next == NULL || (next[0] == '-' && next[1] == '-')) {
            char right[ARI_OPT_TEXT];
            ari_option_kind_of(o)->describe(o, right, sizeof right);
            return ar_error_set(AR_ERR_ARG, "--%s: its value is missing, expected %s", o->name, right);
        }
        *i += 1;
        value = next;
    }
    return ari_option_kind_of(o)->set(o, f.base + o->at, value);
}

static ar_status take_positional(const ari_args_spec *spec, size_t *taken, const char *argument, void *values)
{
    const ari_positional *p = spec->positionals;
    size_t n = 0;
    while (p != NULL && p[n].name != NULL)
        n++;
    if (*taken == n && n == 0)
        return ar_error_set(AR_ERR_ARG, "unexpected argument '%s'; anyrank %s takes options only", ARI_SHOW(argument),
                            spec->command);
    if (*taken == n)
        return ar_error_set(AR_ERR_ARG, "unexpected argument '%s' after %s '%s'", ARI_SHOW(argument), p[n - 1].name,
                            ARI_SHOW(*(const char **)((char *)values + p[n - 1].at)));
    if (argument[0] == '\0')
        return ar_error_set(AR_ERR_ARG, "%s is empty", p[*taken].name);
    *(const char **)((char *)values + p[*taken].at) = argument;
    *taken += 1;
    return AR_OK;
}

ar_status ari_args_parse(const ari_args_spec *spec, int argc, char *const *argv, void *values, ari_args_action *action)
{
    size_t taken = 0;
    bool options_over = false;
    *action = ARI_ARGS_RUN;
    for (int i = 1; i < argc; i++) {
        const char *argument = argv[i];
        if (!options_over && strcmp(argument, "--") == 0)
            options_over = true;
        else if (!options_over && argument[0] == '-' && argument[1] != '\0')
            AR_TRY(take_option(spec, argc, argv, &i, values, action));
        else
            AR_TRY(take_positional(spec, &taken, argument, values));
        if (*action != ARI_ARGS_RUN)
            return AR_OK;
    }
    const ari_positional *next = spec->positionals == NULL ? NULL : &spec->positionals[taken];
    if (next != NULL && next->name != NULL && next->required)
        return ar_error_set(AR_ERR_ARG, "%s is missing: %s", next->name, next->help);
    return AR_OK;
}

/* --- what was asked for, as text that can be compared ------------------------------------------------------------- */

static void print_values(FILE *to, const ari_option *options, const char *base)
{
    for (const ari_option *o = options; o && o->name; o++) {
        if (!o->own && o->at != ARI_OPT_NO_FIELD && !ari_option_kind_of(o)->print(to, o, base + o->at))
            fprintf(to, "no --%s\n", o->name);
    }
}

ar_status ari_args_tell(char **gives, const ari_args_spec *spec, const void *values)
{
    char *text = NULL;
    size_t size = 0;
    *gives = NULL;
    FILE *to = open_memstream(&text, &size);
    if (!to)
        return ar_error_set(AR_ERR_MEMORY, "no memory for a text of the options");
    fprintf(to, "anyrank %s, version %s\n", spec->command, ari_version());
    for (const ari_positional *p = spec->positionals; p && p->name; p++) {
        const char *given = *(const char *const *)((const char *)values + p->at);
        fprintf(to, "%s%s%s\n", given ? p->name : "no ", given ? " " : p->name, given ? given : "");
    }
    print_values(to, spec->options, values);
    print_values(to, ari_common_options, (const char *)values + spec->common_at);
    const bool failed = ferror(to) != 0;
    if (fclose(to) != 0 || failed) {
        free(text);
        return ar_error_set(AR_ERR_MEMORY, "no memory for a text of the options");
    }
    *gives = text;
    return AR_OK;
}

/* --- help --------------------------------------------------------------------------------------------------------- */

enum { HELP_WIDTH = 80, HELP_INDENT = 2 };

/* Prints a text from `column` on, with breaks at spaces; the cursor is there already. */
static void print_wrapped(FILE *to, const char *text, int column)
{
    int at = column;
    while (*text != '\0') {
        const int word = (int)strcspn(text, " ");
        if (at > column && at + 1 + word > HELP_WIDTH) {
            fprintf(to, "\n%*s", column, "");
            at = column;
        } else if (at > column) {
            fputc(' ', to);
            at++;
        }
        fprintf(to, "%.*s", word, text);
        at += word;
        text += word;
        text += strspn(text, " ");
    }
    fputc('\n', to);
}

/* "-q, --quiet", "--tp N", "--numerics exact|native". Gives its length. */
static int option_label(const ari_option *o, char *text, size_t size)
{
    int n =
        o->letter != 0 ? snprintf(text, size, "-%c, --%s", o->letter, o->name) : snprintf(text, size, "--%s", o->name);
    if (o->kind == ARI_OPT_ENUM) {
        for (size_t i = 0; o->choices[i] != NULL && (size_t)n < size; i++)
            n += snprintf(text + n, size - (size_t)n, "%c%s", i == 0 ? ' ' : '|', o->choices[i]);
    } else if (o->value != NULL && (size_t)n < size) {
        n += snprintf(text + n, size - (size_t)n, o->otherwise != NULL ? " [%s]" : " %s", o->value);
    }
    return n;
}

/* Labels longer than this have their help on the next line. */
enum { LABEL_LIMIT = 26 };

static int label_width(const ari_args_spec *spec)
{
    int width = 0;
    const ari_option *const tables[] = {spec->options, ari_common_options};
    for (size_t t = 0; t < 2; t++) {
        for (const ari_option *o = tables[t]; o != NULL && o->name != NULL; o++) {
            char label[ARI_OPT_TEXT];
            const int n = option_label(o, label, sizeof label);
            if (o->help != NULL && n > width && n <= LABEL_LIMIT)
                width = n;
        }
    }
    for (const ari_positional *p = spec->positionals; p != NULL && p->name != NULL; p++) {
        const int n = (int)strlen(p->name);
        width = n > width ? n : width;
    }
    return width;
}

static void print_entry(FILE *to, const char *label, const char *help, int width)
{
    const int column = HELP_INDENT + width + 2;
    fprintf(to, "%*s%s", HELP_INDENT, "", label);
    if ((int)strlen(label) > width)
        fprintf(to, "\n%*s", column, "");
    else
        fprintf(to, "%*s", column - HELP_INDENT - (int)strlen(label), "");
    print_wrapped(to, help, column);
}

/* No title where every option is one of a later version, which has no help. */
static void print_options(FILE *to, const char *title, const ari_option *options, int width)
{
    bool titled = false;
    for (const ari_option *o = options; o != NULL && o->name != NULL; o++) {
        char label[ARI_OPT_TEXT];
        if (o->help == NULL)
            continue;
        if (!titled)
            fprintf(to, "\n%s:\n", title);
        titled = true;
        option_label(o, label, sizeof label);
        print_entry(to, label, o->help, width);
    }
}

void ari_args_help(FILE *to, const ari_args_spec *spec)
{
    const int width = label_width(spec);
    fprintf(to, "usage: anyrank %s", spec->command);
    for (const ari_positional *p = spec->positionals; p != NULL && p->name != NULL; p++)
        fprintf(to, p->required ? " %s" : " [%s]", p->name);
    fprintf(to, " [options]\n\n");
    print_wrapped(to, spec->summary, 0);
    if (spec->positionals != NULL && spec->positionals->name != NULL)
        fputc('\n', to);
    for (const ari_positional *p = spec->positionals; p != NULL && p->name != NULL; p++)
        print_entry(to, p->name, p->help, width);
    print_options(to, "options", spec->options, width);
    print_options(to, "options of every subcommand", ari_common_options, width);
    if (spec->example == NULL)
        return;
    fprintf(to, "\n%s:\n", strchr(spec->example, '\n') != NULL ? "examples" : "example");
    for (const char *line = spec->example; *line != '\0';) {
        const int length = (int)strcspn(line, "\n");
        fprintf(to, "%*s%.*s\n", HELP_INDENT, "", length, line);
        line += length + (line[length] == '\n');
    }
}

bool ari_args_begin(const ari_args_spec *spec, int argc, char *const *argv, void *values, int *exit_code)
{
    ari_args_action action = ARI_ARGS_RUN;
    ar_status st = ari_args_parse(spec, argc, argv, values, &action);
    const ari_common *common = (const ari_common *)(const void *)((const char *)values + spec->common_at);
    /* Before the work whose result it takes. */
    if (st == AR_OK && action == ARI_ARGS_RUN && common->json && strcmp(common->json, "-") != 0 &&
        !ari_transport_is_silent())
        st = ari_out_check(common->json);
    *exit_code = ari_exit_code(st);
    if (st != AR_OK) {
        ari_print_error(spec->command, st);
        return false;
    }
    if (action == ARI_ARGS_HELP)
        ari_args_help(stdout, spec);
    if (action == ARI_ARGS_VERSION)
        ari_print_version(stdout);
    return action == ARI_ARGS_RUN;
}

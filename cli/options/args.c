/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/options/args.h"

#include <stdlib.h>
#include <string.h>

#include "ref/core/size.h"
#include "ref/core/text.h"

#define ARI_VALUES ari_common
static const ari_option common_options[] = {
    ARI_OPTION_FILE("json", json, "FILE|-", "write the result as JSON to FILE, or to standard output", .is_local = true,
                    .written = true),
    ARI_OPTION_FLAG("quiet", quiet, "print nothing but errors and what --json asks for", .letter = 'q',
                    .is_local = true),
    ARI_OPTION_FLAG("no-color", no_color, "print words only; so does the environment variable NO_COLOR",
                    .is_local = true),
    ARI_OPTION_INT("threads", threads, 1, 4096, "N", "threads of the whole process (default: the number of cores)",
                   .is_local = true),
    ARI_OPTION_U64("seed", seed, "N", "seed of everything random (default 0)"),
    ARI_OPTION_INT("progress-fd", progress_fd, 1, 65535, "N",
                   "report how far the job is to this open file descriptor, as lines of JSON", .is_local = true),
    {.name = "help",
     .letter = 'h',
     .kind = ARI_OPT_FLAG,
     .offset = ARI_OPT_NO_FIELD,
     .help = "list the options and exit"},
    {.name = "help-all", .kind = ARI_OPT_FLAG, .offset = ARI_OPT_NO_FIELD, .help = "explain all of them and exit"},
    {.name = "version", .kind = ARI_OPT_FLAG, .offset = ARI_OPT_NO_FIELD, .help = "print the version and exit"},
    {0},
};
#undef ARI_VALUES

/* --- looking options up ------------------------------------------------------------------------------------------- */

static void add_options(ari_option_list *l, const ari_option *options, size_t base, const char **section)
{
    for (const ari_option *o = options; o && o->name && l->n < ARI_MAX_OPTIONS; o++) {
        if (o->kind == ARI_OPT_SECTION)
            *section = o->name;
        if (o->kind == ARI_OPT_GROUP)
            add_options(l, o->group, base + o->offset, section);
        if (o->kind == ARI_OPT_SECTION || o->kind == ARI_OPT_GROUP)
            continue;
        l->section[l->n] = *section;
        l->option[l->n] = o;
        l->offset[l->n++] = o->offset == ARI_OPT_NO_FIELD ? o->offset : base + o->offset;
    }
}

ari_option_list ari_options_of(const ari_args_spec *spec)
{
    ari_option_list l = {.n = 0};
    const char *section = NULL;
    add_options(&l, spec ? spec->options : NULL, 0, &section);
    l.local_count = l.n;
    section = NULL;
    add_options(&l, common_options, 0, &section);
    return l;
}

/* Finds an option by name, or by letter if that is not 0; l->n: not found. A subcommand's own option hides a common
 * one. */
static size_t find_option(const ari_option_list *l, const char *name, size_t length, char letter)
{
    size_t i = 0;
    for (; i < l->n; i++) {
        const ari_option *o = l->option[i];
        if (letter != 0 ? o->letter == letter : strlen(o->name) == length && strncmp(o->name, name, length) == 0)
            break;
    }
    return i;
}

/* Returns the nearest name: one that begins with the word, else the one at the smallest edit distance; NULL if none is
 * near. */
static const char *nearest_option(const ari_option_list *l, const char *word)
{
    const char *names[ARI_MAX_OPTIONS];
    const size_t length = strlen(word);
    if (length < 2)
        return NULL; /* every short word is similar to it */
    for (size_t i = 0; i < l->n; i++) {
        names[i] = l->option[i]->name;
        if (strncmp(names[i], word, length) == 0)
            return names[i];
    }
    return ari_nearest(word, names, l->n);
}

static ar_status unknown_option(const ari_args_spec *spec, const ari_option_list *l, const char *argument)
{
    char typed[ARI_OPT_TEXT];
    const char *name = argument + strspn(argument, "-");
    snprintf(typed, sizeof typed, "%.*s", (int)strcspn(name, "="), name);
    const char *word = ARI_SHOW(typed);
    const char *near = nearest_option(l, word);
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
    const char first_char = argument[strspn(argument, "+-")];
    return first_char >= '0' && first_char <= '9';
}

/* A flag, or an option without a field, which is an action. */
static ar_status set_flag(const ari_option *o, bool *field, const char *value, ari_args_action *action)
{
    if (value != NULL)
        return ar_error_set(AR_ERR_ARG, "--%s: got '%s', but it takes no value", o->name, ARI_SHOW(value));
    if (o->offset == ARI_OPT_NO_FIELD)
        *action = strcmp(o->name, "help") == 0       ? ARI_ARGS_HELP
                  : strcmp(o->name, "help-all") == 0 ? ARI_ARGS_HELP_ALL
                                                     : ARI_ARGS_VERSION;
    else
        *field = true;
    return AR_OK;
}

/* Parses the option at argv[*i], and its value if that is the next argument. is_set: options that have been given. */
static ar_status take_option(const ari_args_spec *spec, const ari_option_list *l, bool is_set[ARI_MAX_OPTIONS],
                             int argc, char *const *argv, int *i, void *values, ari_args_action *action)
{
    const char *argument = argv[*i];
    const bool is_long = argument[1] == '-';
    const char *name = argument + (is_long ? 2 : 1);
    const char *value = is_long ? strchr(name, '=') : NULL;
    const size_t length = value != NULL ? (size_t)(value - name) : strlen(name);
    const char letter = is_long ? 0 : argument[1];
    const size_t found = !is_long && length != 1 ? l->n : find_option(l, name, length, letter);
    if (found == l->n)
        return unknown_option(spec, l, argument);
    const ari_option *o = l->option[found];
    if (is_set[found] && o->kind != ARI_OPT_STRINGS && o->kind != ARI_OPT_FLAG)
        ((ari_common *)values)->repeated = o->name;
    is_set[found] = true;
    void *field = o->offset == ARI_OPT_NO_FIELD ? NULL : (char *)values + l->offset[found];
    value = value != NULL ? value + 1 : NULL;
    if (o->kind == ARI_OPT_FLAG)
        return set_flag(o, field, value, action);
    const char *next_arg = *i + 1 < argc ? argv[*i + 1] : NULL;
    if (value == NULL && o->otherwise != NULL && !looks_like_number(next_arg)) {
        value = o->otherwise;
    } else if (value == NULL) {
        /* A negative number is a value; another option is not. */
        if (next_arg == NULL || (next_arg[0] == '-' && next_arg[1] == '-')) {
            char right[ARI_OPT_TEXT];
            ari_option_kind_of(o)->describe(o, right, sizeof right);
            return ar_error_set(AR_ERR_ARG, "--%s: its value is missing, expected %s", o->name, right);
        }
        *i += 1;
        value = next_arg;
    }
    return ari_option_kind_of(o)->set(o, field, value);
}

static ar_status take_positional(const ari_args_spec *spec, size_t *positional_count, const char *argument,
                                 void *values)
{
    const ari_positional *p = spec->positionals;
    size_t n = 0;
    while (p != NULL && p[n].name != NULL)
        n++;
    if (*positional_count == n && n == 0)
        return ar_error_set(AR_ERR_ARG, "unexpected argument '%s'; anyrank %s takes options only", ARI_SHOW(argument),
                            spec->command);
    if (*positional_count == n)
        return ar_error_set(AR_ERR_ARG, "unexpected argument '%s' after %s '%s'", ARI_SHOW(argument), p[n - 1].name,
                            ARI_SHOW(*(const char **)((char *)values + p[n - 1].offset)));
    if (argument[0] == '\0')
        return ar_error_set(AR_ERR_ARG, "%s is empty", p[*positional_count].name);
    *(const char **)((char *)values + p[*positional_count].offset) = argument;
    *positional_count += 1;
    return AR_OK;
}

ar_status ari_args_parse(const ari_args_spec *spec, int argc, char *const *argv, void *values, ari_args_action *action)
{
    const ari_option_list options = ari_options_of(spec);
    size_t positional_count = 0;
    bool options_over = false, is_set[ARI_MAX_OPTIONS] = {false};
    *action = ARI_ARGS_RUN;
    for (size_t i = 0; i < options.n; i++) {
        if (options.option[i]->kind == ARI_OPT_STRINGS)
            ((ari_strings *)(void *)((char *)values + options.offset[i]))->n = 0;
    }
    for (int i = 1; i < argc; i++) {
        const char *argument = argv[i];
        if (!options_over && strcmp(argument, "--") == 0)
            options_over = true;
        else if (!options_over && argument[0] == '-' && argument[1] != '\0')
            AR_TRY(take_option(spec, &options, is_set, argc, argv, &i, values, action));
        else
            AR_TRY(take_positional(spec, &positional_count, argument, values));
        if (*action != ARI_ARGS_RUN)
            return AR_OK;
    }
    const ari_positional *next_positional = spec->positionals == NULL ? NULL : &spec->positionals[positional_count];
    if (next_positional != NULL && next_positional->name != NULL && next_positional->required)
        return ar_error_set(AR_ERR_ARG, "%s is missing: %s", next_positional->name, next_positional->help);
    return AR_OK;
}

ar_status ari_args_reparse(const ari_args_spec *spec, void *values)
{
    const ari_common *common = values;
    ari_args_action action;
    return ari_args_parse(spec, common->argc, common->argv, values, &action);
}

/* --- what was asked for, as text that can be compared ------------------------------------------------------------- */

ar_status ari_args_describe(char **result, const ari_args_spec *spec, const void *values)
{
    ARI_OWNED char *text = NULL;
    size_t size = 0;
    *result = NULL;
    FILE *out = open_memstream(&text, &size);
    if (!out)
        return ar_error_set(AR_ERR_MEMORY, "no memory for a text of the options");
    fprintf(out, "anyrank %s, version %s\n", spec->command, ari_version());
    for (const ari_positional *p = spec->positionals; p && p->name; p++) {
        const char *argument = *(const char *const *)((const char *)values + p->offset);
        fprintf(out, "%s%s%s\n", argument ? p->name : "no ", argument ? " " : p->name, argument ? argument : "");
    }
    const ari_option_list l = ari_options_of(spec);
    for (size_t i = 0; i < l.n; i++) {
        const ari_option *o = l.option[i];
        if (!o->is_local && o->offset != ARI_OPT_NO_FIELD &&
            !ari_option_kind_of(o)->print(out, o, (const char *)values + l.offset[i]))
            fprintf(out, "no --%s\n", o->name);
    }
    if (!ari_text_closed(out, &text))
        return ar_error_set(AR_ERR_MEMORY, "no memory for a text of the options");
    ARI_GIVE(result, text);
    return AR_OK;
}

/* --- help --------------------------------------------------------------------------------------------------------- */

enum { HELP_WIDTH = 80, HELP_INDENT = 2, FIRST_CHOICES = 3 };
#define ALL_CHOICES SIZE_MAX

void ari_print_wrapped(FILE *out, const char *text, int column)
{
    int cursor_column = column;
    while (*text != '\0') {
        const int word = (int)strcspn(text, " ");
        if (cursor_column > column && cursor_column + 1 + word > HELP_WIDTH) {
            fprintf(out, "\n%*s", column, "");
            cursor_column = column;
        } else if (cursor_column > column) {
            fputc(' ', out);
            cursor_column++;
        }
        fprintf(out, "%.*s", word, text);
        cursor_column += word;
        text += word;
        text += strspn(text, " ");
    }
    fputc('\n', out);
}

/* Writes "-q, --quiet", "--tp N" or "--numerics exact|native", of many choices the first ones. Returns the length. */
static int option_label(const ari_option *o, size_t choices, char *text, size_t size)
{
    int n =
        o->letter != 0 ? snprintf(text, size, "-%c, --%s", o->letter, o->name) : snprintf(text, size, "--%s", o->name);
    if (o->kind == ARI_OPT_ENUM) {
        for (size_t i = 0; o->choices[i] != NULL && i <= choices && (size_t)n < size; i++)
            n += snprintf(text + n, size - (size_t)n, "%c%s", i == 0 ? ' ' : '|', i < choices ? o->choices[i] : "..");
    } else if (o->value != NULL && (size_t)n < size) {
        n += snprintf(text + n, size - (size_t)n, o->otherwise != NULL ? " [%s]" : " %s", o->value);
    }
    return n;
}

/* Labels longer than this have their help on the next line. */
enum { LABEL_LIMIT = 26 };

static int label_width(const ari_args_spec *spec, const ari_option_list *l)
{
    int width = 0;
    for (size_t i = 0; i < l->n; i++) {
        char label[ARI_OPT_TEXT];
        const int n = option_label(l->option[i], ALL_CHOICES, label, sizeof label);
        if (l->option[i]->help != NULL && n > width && n <= LABEL_LIMIT)
            width = n;
    }
    for (const ari_positional *p = spec->positionals; p != NULL && p->name != NULL; p++) {
        const int n = (int)strlen(p->name);
        width = n > width ? n : width;
    }
    return width;
}

static void print_entry(FILE *out, const char *label, const char *help, int width)
{
    const int column = HELP_INDENT + width + 2;
    fprintf(out, "%*s%s", HELP_INDENT, "", label);
    if ((int)strlen(label) > width)
        fprintf(out, "\n%*s", column, "");
    else
        fprintf(out, "%*s", column - HELP_INDENT - (int)strlen(label), "");
    ari_print_wrapped(out, help, column);
}

/* Prints the options [begin, end) under a title. Prints no title if all of them belong to a later version and so have
 * no help. */
static void print_options(FILE *out, const char *title, const ari_option_list *l, size_t begin, size_t end, int width)
{
    bool titled = false;
    for (size_t i = begin; i < end; i++) {
        char label[ARI_OPT_TEXT];
        if (l->option[i]->help == NULL)
            continue;
        if (!titled)
            fprintf(out, "\n%s:\n", title);
        titled = true;
        option_label(l->option[i], ALL_CHOICES, label, sizeof label);
        print_entry(out, label, l->option[i]->help, width);
    }
}

/* Prints the names of a section's options side by side from `column` on; names are never split. */
static void print_names(FILE *out, const char *title, const ari_option_list *l, const bool *in_section, int column)
{
    int cursor_column = fprintf(out, "%s:", title);
    for (size_t i = 0; i < l->n; i++) {
        char label[ARI_OPT_TEXT];
        if (!in_section[i] || l->option[i]->help == NULL)
            continue;
        const int n = option_label(l->option[i], FIRST_CHOICES, label, sizeof label);
        if (cursor_column > column && cursor_column + 2 + n > HELP_WIDTH)
            cursor_column = fprintf(out, "\n") - 1;
        cursor_column += fprintf(out, "%*s%s", cursor_column < column ? column - cursor_column : 2, "", label);
    }
    fputc('\n', out);
}

static bool same_section(const char *a, const char *b)
{
    return a == b || (a && b && strcmp(a, b) == 0);
}

/* Prints each section once, at the position of its first option; common options come last. */
static void print_sections(FILE *out, const ari_option_list *l)
{
    static const char rest[] = "common";
    bool is_printed[ARI_MAX_OPTIONS] = {false};
    int column = (int)sizeof rest + 1;
    for (size_t i = 0; i < l->n; i++) {
        const int n = l->section[i] ? (int)strlen(l->section[i]) + 2 : 0;
        column = n > column ? n : column;
    }
    for (size_t i = 0; i < l->n; i++) {
        bool in_section[ARI_MAX_OPTIONS] = {false};
        if (is_printed[i])
            continue;
        for (size_t k = i; k < l->n; k++) {
            in_section[k] = same_section(l->section[k], l->section[i]) && (k < l->local_count) == (i < l->local_count);
            is_printed[k] = is_printed[k] || in_section[k];
        }
        print_names(out, l->section[i] ? l->section[i] : i < l->local_count ? "options" : rest, l, in_section, column);
    }
}

static bool has_sections(const ari_option_list *l)
{
    for (size_t i = 0; i < l->n; i++) {
        if (l->section[i])
            return true;
    }
    return false;
}

void ari_args_help(FILE *out, const ari_args_spec *spec, bool is_full)
{
    const ari_option_list l = ari_options_of(spec);
    const bool names_alone = !is_full && has_sections(&l);
    const int width = names_alone ? 9 : label_width(spec, &l);
    const ari_positional *positionals = spec->usage == NULL ? spec->positionals : NULL;
    fprintf(out, "usage: anyrank %s", spec->command);
    for (const ari_positional *p = positionals; p != NULL && p->name != NULL; p++)
        fprintf(out, p->required ? " %s" : " [%s]", p->name);
    fprintf(out, " %s\n\n", spec->usage != NULL ? spec->usage : "[options]");
    ari_print_wrapped(out, spec->summary, 0);
    if (positionals != NULL && positionals->name != NULL)
        fputc('\n', out);
    for (const ari_positional *p = positionals; p != NULL && p->name != NULL; p++)
        print_entry(out, p->name, p->help, width);
    if (names_alone) {
        fprintf(out, "\nOptions, which anyrank %s --help-all explains:\n", spec->command);
        print_sections(out, &l);
    } else {
        print_options(out, "options", &l, 0, l.local_count, width);
        print_options(out, "options of every subcommand", &l, l.local_count, l.n, width);
    }
    if (spec->example == NULL)
        return;
    fprintf(out, "\n%s:\n", strchr(spec->example, '\n') != NULL ? "examples" : "example");
    for (const char *line = spec->example; *line != '\0';) {
        const int length = (int)strcspn(line, "\n");
        fprintf(out, "%*s%.*s\n", HELP_INDENT, "", length, line);
        line += length + (line[length] == '\n');
    }
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/args.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli/command.h"
#include "cli/transport.h"
#include "ref/core/nearest.h"
#include "ref/io/file.h"

enum { MAX_OPTIONS = 128, TEXT_SIZE = 512 };

const ari_option ari_common_options[] = {
    {.name = "json",
     .kind = ARI_OPT_STRING,
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
    const char *names[MAX_OPTIONS];
    size_t n = 0;
    const ari_option *const tables[] = {spec->options, ari_common_options};
    for (size_t t = 0; t < 2; t++) {
        for (const ari_option *o = tables[t]; o != NULL && o->name != NULL && n < MAX_OPTIONS; o++)
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
    char typed[TEXT_SIZE];
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

/* --- values ------------------------------------------------------------------------------------------------------- */

static bool has_range(const ari_option *o)
{
    return o->min < o->max || o->min > 0 || o->max < 0;
}

/* "an integer from 1 to 4096": what would be right. */
static void describe(const ari_option *o, char *text, size_t size)
{
    const char *kind = o->kind == ARI_OPT_DOUBLE ? "a number" : "an integer";
    size_t at = 0;
    switch (o->kind) {
    case ARI_OPT_ENUM:
        for (size_t i = 0; o->choices[i] != NULL && at < size; i++) {
            const char *before = i == 0 ? "" : o->choices[i + 1] == NULL ? " or " : ", ";
            at += (size_t)snprintf(text + at, size - at, "%s%s", before, o->choices[i]);
        }
        break;
    case ARI_OPT_STRING:
    case ARI_OPT_STRINGS:
        snprintf(text, size, "%s", o->value != NULL ? o->value : "a text");
        break;
    case ARI_OPT_U64:
        snprintf(text, size, "an integer from 0 to %llu", (unsigned long long)UINT64_MAX);
        break;
    case ARI_OPT_BYTES:
        snprintf(text, size, "a number of bytes, as 4096, 64KiB, 25MiB or 1GB");
        break;
    default:
        if (o->kind == ARI_OPT_SIZE && !has_range(o))
            snprintf(text, size, "an integer from 0 on");
        else if (!has_range(o))
            snprintf(text, size, "%s", kind);
        else if (o->max >= (o->kind == ARI_OPT_INT ? (double)INT_MAX : 9e18))
            snprintf(text, size, "%s from %.15g on", kind, o->min);
        else
            snprintf(text, size, "%s from %.15g to %.15g", kind, o->min, o->max);
        break;
    }
}

static ar_status bad_value(const ari_option *o, const char *value)
{
    char right[TEXT_SIZE];
    describe(o, right, sizeof right);
    return ar_error_set(AR_ERR_ARG, "--%s: got '%s', expected %s", o->name, ARI_SHOW(value), right);
}

/* A decimal integer and nothing else; false where it is none or does not fit. */
static bool parse_signed(long long *out, const char *value)
{
    char *end = NULL;
    if (value[strspn(value, "+-")] < '0' || value[strspn(value, "+-")] > '9')
        return false;
    errno = 0;
    *out = strtoll(value, &end, 10);
    return errno == 0 && *end == '\0';
}

static bool parse_unsigned(unsigned long long *out, const char *value)
{
    char *end = NULL;
    if (value[0] < '0' || value[0] > '9')
        return false;
    errno = 0;
    *out = strtoull(value, &end, 10);
    return errno == 0 && *end == '\0';
}

/* An integer, and behind it B, KiB, MiB or GiB (powers of 1024), kB, MB or GB (powers of 1000), or nothing. */
static bool parse_bytes(size_t *out, const char *value)
{
    static const struct {
        const char *name;
        size_t bytes;
    } units[] = {{"", 1},      {"B", 1},         {"KiB", 1024},      {"MiB", 1048576}, {"GiB", 1073741824},
                 {"kB", 1000}, {"MB", 1000000u}, {"GB", 1000000000u}};
    char *end = NULL;
    if (value[0] < '0' || value[0] > '9')
        return false;
    errno = 0;
    const unsigned long long number = strtoull(value, &end, 10);
    if (errno != 0 || number > SIZE_MAX)
        return false;
    for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
        if (strcmp(end, units[i].name) == 0)
            return !__builtin_mul_overflow((size_t)number, units[i].bytes, out);
    }
    return false;
}

static bool parse_double(double *out, const char *value)
{
    char *end = NULL;
    if (strspn(value, "0123456789+-.eE") != strlen(value))
        return false;
    *out = strtod(value, &end);
    return end != value && *end == '\0' && isfinite(*out);
}

static bool in_range(const ari_option *o, double value)
{
    return !has_range(o) || (value >= o->min && value <= o->max);
}

static ar_status set_enum(const ari_option *o, void *field, const char *value)
{
    size_t n = 0;
    for (; o->choices[n] != NULL; n++) {
        if (strcmp(o->choices[n], value) == 0) {
            *(int *)field = (int)n;
            return AR_OK;
        }
    }
    const char *near = strlen(value) < 2 ? NULL : ari_nearest(value, o->choices, n);
    if (near == NULL)
        return bad_value(o, value);
    char right[TEXT_SIZE];
    describe(o, right, sizeof right);
    return ar_error_set(AR_ERR_ARG, "--%s: got '%s', expected %s; did you mean %s?", o->name, ARI_SHOW(value), right,
                        near);
}

static ar_status add_string(const ari_option *o, ari_strings *all, const char *value)
{
    if (value[0] == '\0')
        return bad_value(o, value);
    if (all->n == ARI_OPT_MANY)
        return ar_error_set(AR_ERR_ARG, "--%s: given more than %d times", o->name, ARI_OPT_MANY);
    all->text[all->n++] = value;
    return AR_OK;
}

static ar_status set_value(const found_option *f, const char *value)
{
    const ari_option *o = f->option;
    void *field = f->base + o->at;
    long long integer = 0;
    unsigned long long natural = 0;
    size_t bytes = 0;
    double real = 0;
    switch (o->kind) {
    case ARI_OPT_INT:
        if (!parse_signed(&integer, value) || integer < INT_MIN || integer > INT_MAX || !in_range(o, (double)integer))
            return bad_value(o, value);
        *(int *)field = (int)integer;
        return AR_OK;
    case ARI_OPT_SIZE:
        if (!parse_unsigned(&natural, value) || natural > SIZE_MAX || !in_range(o, (double)natural))
            return bad_value(o, value);
        *(size_t *)field = (size_t)natural;
        return AR_OK;
    case ARI_OPT_BYTES:
        if (!parse_bytes(&bytes, value) || !in_range(o, (double)bytes))
            return bad_value(o, value);
        *(size_t *)field = bytes;
        return AR_OK;
    case ARI_OPT_U64:
        if (!parse_unsigned(&natural, value))
            return bad_value(o, value);
        *(uint64_t *)field = natural;
        return AR_OK;
    case ARI_OPT_DOUBLE:
        if (!parse_double(&real, value) || !in_range(o, real))
            return bad_value(o, value);
        *(double *)field = real;
        return AR_OK;
    case ARI_OPT_STRING:
        if (value[0] == '\0')
            return bad_value(o, value);
        *(const char **)field = value;
        return AR_OK;
    case ARI_OPT_STRINGS:
        return add_string(o, field, value);
    case ARI_OPT_ENUM:
        return set_enum(o, field, value);
    case ARI_OPT_FLAG:
    case ARI_OPT_LATER:
        break;
    }
    return ar_error_set(AR_ERR_INTERNAL, "--%s: an option of this kind takes no value", o->name);
}

/* --- the parse ---------------------------------------------------------------------------------------------------- */

static bool looks_like_number(const char *argument)
{
    if (argument == NULL)
        return false;
    const char first = argument[strspn(argument, "+-")];
    return first >= '0' && first <= '9';
}

/* Takes the option at argv[*i], and its value where it stands apart. */
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
    if (f.option == NULL)
        return unknown_option(spec, argument);
    const ari_option *o = f.option;
    if (o->kind == ARI_OPT_LATER)
        return ar_error_set(AR_ERR_UNSUPPORTED, "--%s: not in this version", o->name);
    if (o->kind == ARI_OPT_FLAG) {
        if (value != NULL)
            return ar_error_set(AR_ERR_ARG, "--%s: got '%s', but it takes no value", o->name, ARI_SHOW(value + 1));
        if (o->at == ARI_OPT_NO_FIELD)
            *action = strcmp(o->name, "help") == 0 ? ARI_ARGS_HELP : ARI_ARGS_VERSION;
        else
            *(bool *)(f.base + o->at) = true;
        return AR_OK;
    }
    if (value != NULL)
        return set_value(&f, value + 1);
    const char *next = *i + 1 < argc ? argv[*i + 1] : NULL;
    if (o->otherwise != NULL && !looks_like_number(next))
        return set_value(&f, o->otherwise);
    /* A negative number is a value; another option is none. */
    if (next == NULL || (next[0] == '-' && next[1] == '-')) {
        char right[TEXT_SIZE];
        describe(o, right, sizeof right);
        return ar_error_set(AR_ERR_ARG, "--%s: its value is missing, expected %s", o->name, right);
    }
    *i += 1;
    return set_value(&f, argv[*i]);
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
            char label[TEXT_SIZE];
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
        char label[TEXT_SIZE];
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

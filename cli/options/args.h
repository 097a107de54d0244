/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "cli/shared/command.h"

/* Options of a subcommand. Parsing, --help, the comparison between processes, manual pages and completions all come
 * from one table. A subcommand has a struct of values, whose fields hold the defaults before parsing, and one static
 * table of options, each with its field:
 *
 *    struct values { ari_common common; ari_layout_values layout; const char *model; int sweep; bool sp; };
 *    #define ARI_VALUES struct values
 *    static const ari_option options[] = {
 *        ARI_OPTION_INT("sweep", sweep, 1, 4096, "W", "every legal layout of up to W ranks"),
 *        ARI_OPTION_FLAG("sp", sp, "sequence parallel"),
 *        ARI_OPTION_GROUP(ari_device_options, layout), // a table that subcommands share, of ari_layout_values
 *        {0}};
 *
 * Accepted forms: --name value, --name=value, -x value, and `--`, after which everything is positional. If an option is
 * repeated, the last value counts, or all values (ARI_OPT_STRINGS). */
typedef enum ari_option_kind {
    ARI_OPT_FLAG,    /* bool, set to true; takes no value */
    ARI_OPT_INT,     /* int in [min, max] */
    ARI_OPT_SIZE,    /* size_t in [min, max] */
    ARI_OPT_BYTES,   /* size_t in [min, max], as 4096, 25MiB or 2GB */
    ARI_OPT_PART,    /* size_t N of 1/N in [min, max] */
    ARI_OPT_U64,     /* uint64_t, any */
    ARI_OPT_DOUBLE,  /* double, finite, in [min, max] */
    ARI_OPT_STRING,  /* const char *, borrowed from argv, not empty */
    ARI_OPT_FILE,    /* const char *, the path of a file */
    ARI_OPT_FOLDER,  /* const char *, the path of a folder */
    ARI_OPT_STRINGS, /* ari_strings, to which each use adds one */
    ARI_OPT_ENUM,    /* int, an index in `choices` */
    ARI_OPT_STAGES,  /* ar_stages, the layers of each stage separated by commas */
    ARI_OPT_GROUP,   /* a table of options, whose struct of values is the field */
    ARI_OPT_SECTION  /* no option: the following options belong to the section with this name */
} ari_option_kind;

enum {
    ARI_MAX_OPTIONS = 128,
    ARI_OPT_TEXT = 512
}; /* maximum number of a subcommand's options; size of a text about valid values */
#define ARI_OPT_MANY 8
/* All values of a repeated option, in order. */
typedef struct ari_strings {
    const char *text[ARI_OPT_MANY];
    size_t n;
} ari_strings;

typedef struct ari_option {
    const char *name; /* name without dashes; NULL ends a table */
    char letter;      /* short form; 0: none */
    ari_option_kind kind;
    size_t offset;   /* offset of the field in the struct of values */
    double min, max; /* for INT, SIZE, BYTES, PART, DOUBLE; both 0: everything that the type holds, from 0 on for
                        sizes */
    const char *const *choices;     /* for ENUM all choices; for strings and paths those offered by completions;
                                       terminated by NULL */
    const char *value;              /* name of the value in the help: "N", "FILE"; NULL for flags and enums */
    const char *otherwise;          /* INT, SIZE: the value if no number follows; NULL: a number is required */
    const char *help;               /* one or two lines including the default; NULL: not listed */
    const char *details;            /* further sentences for the manual page; NULL: none */
    bool is_local;                  /* applies to one process only, so processes may differ in it */
    bool written;                   /* for FILE: true if the command writes the file, which is then tried before any
                                       work */
    const struct ari_option *group; /* GROUP */
} ari_option;

/* Rows of a table by kind: name, field of ARI_VALUES, what limits or names the value, help; then any other fields. */
#define ARI_OPTION_ROW(which, called, field, ...)                                                     \
    {                                                                                                 \
        .name = (called), .kind = ARI_OPT_##which, .offset = offsetof(ARI_VALUES, field), __VA_ARGS__ \
    }
#define ARI_OPTION_NUMBER(which, called, field, min_value, max_value, word, ...) \
    ARI_OPTION_ROW(which, called, field, .min = (min_value), .max = (max_value), .value = (word), .help = __VA_ARGS__)
#define ARI_OPTION_INT(...) ARI_OPTION_NUMBER(INT, __VA_ARGS__)
#define ARI_OPTION_SIZE(...) ARI_OPTION_NUMBER(SIZE, __VA_ARGS__)
#define ARI_OPTION_BYTES(...) ARI_OPTION_NUMBER(BYTES, __VA_ARGS__)
#define ARI_OPTION_PART(...) ARI_OPTION_NUMBER(PART, __VA_ARGS__)
#define ARI_OPTION_DOUBLE(...) ARI_OPTION_NUMBER(DOUBLE, __VA_ARGS__)
#define ARI_OPTION_TEXT(which, called, field, word, ...) \
    ARI_OPTION_ROW(which, called, field, .value = (word), .help = __VA_ARGS__)
#define ARI_OPTION_STRING(...) ARI_OPTION_TEXT(STRING, __VA_ARGS__)
#define ARI_OPTION_STRINGS(...) ARI_OPTION_TEXT(STRINGS, __VA_ARGS__)
#define ARI_OPTION_FILE(...) ARI_OPTION_TEXT(FILE, __VA_ARGS__)
#define ARI_OPTION_FOLDER(...) ARI_OPTION_TEXT(FOLDER, __VA_ARGS__)
#define ARI_OPTION_ENUM(called, field, names, ...) \
    ARI_OPTION_ROW(ENUM, called, field, .choices = (names), .help = __VA_ARGS__)
#define ARI_OPTION_FLAG(called, field, ...) ARI_OPTION_ROW(FLAG, called, field, .help = __VA_ARGS__)
#define ARI_OPTION_U64(called, field, word, ...) ARI_OPTION_TEXT(U64, called, field, word, __VA_ARGS__)
#define ARI_OPTION_SECTION(title)                \
    {                                            \
        .name = (title), .kind = ARI_OPT_SECTION \
    }
#define ARI_OPTION_GROUP(table, field) ARI_OPTION_ROW(GROUP, "", field, .group = (table))

/* Operations that all options of a kind share. */
typedef struct ari_kind_ops {
    /* Parses a value and stores it in the option's field. NULL: the option takes no value. Errors: AR_ERR_ARG, with the
     * expected form. */
    ar_status (*set)(const ari_option *o, void *field, const char *value);
    /* Writes the expected form, such as "an integer from 1 to 4096". NULL: the option takes no value. */
    void (*describe)(const ari_option *o, char *text, size_t size);
    /* Prints "--tp 2" and a line feed. Returns false if the option was not given and has no printable default. */
    bool (*print)(FILE *out, const ari_option *o, const void *field);
} ari_kind_ops;
const ari_kind_ops *ari_option_kind_of(const ari_option *o);

/* An option without a field: --help, --version. */
#define ARI_OPT_NO_FIELD SIZE_MAX

/* A positional argument; its field is a const char *. */
typedef struct ari_positional {
    const char *name; /* "MODEL"; NULL ends a table */
    size_t offset;
    bool required;
    ari_option_kind kind;       /* STRING, FILE or FOLDER */
    const char *const *choices; /* values that completions offer; NULL: none */
    const char *help;
} ari_positional;
/* A row of a table: name, kind, field of ARI_VALUES, help; then any other fields. */
#define ARI_POSITIONAL(called, argument, field, ...)                                                             \
    {                                                                                                            \
        .name = (called), .offset = offsetof(ARI_VALUES, field), .kind = ARI_OPT_##argument, .help = __VA_ARGS__ \
    }

typedef struct ari_args_spec {
    const char *command;                            /* "check" */
    const char *usage;                              /* arguments in the usage line; NULL: derived from the tables
                                                       below */
    const char *summary;                            /* one sentence */
    const char *example;                            /* whole command lines separated by ' ' */
    const ari_option *options;                      /* NULL: only the common options */
    const ari_positional *positionals;              /* positional arguments; NULL: none */
    size_t size;                                    /* size of the struct of values, whose first field is its
                                                       ari_common */
    const void *defaults;                           /* values before parsing; NULL: all zero */
    ar_status (*run)(void *values, int *exit_code); /* runs the subcommand; *exit_code stays 0 unless the result is a
                                                       difference */
    bool mismatch_differs; /* true if AR_ERR_MISMATCH is a difference: a mistake of the program and not of its user */
} ari_args_spec;

/* Options of a subcommand with the offsets of their fields: the first `local_count` are its own with groups expanded,
 * then come those of every subcommand. */
typedef struct ari_option_list {
    const ari_option *option[ARI_MAX_OPTIONS];
    const char *section[ARI_MAX_OPTIONS]; /* section title of each option; NULL: no section */
    size_t offset[ARI_MAX_OPTIONS];
    size_t n, local_count;
} ari_option_list;
/** Returns the options of a subcommand; spec NULL: only those that every subcommand has. */
ari_option_list ari_options_of(const ari_args_spec *spec);

typedef enum ari_args_action {
    ARI_ARGS_RUN,
    ARI_ARGS_HELP,     /* the options' names, by section */
    ARI_ARGS_HELP_ALL, /* the full description of each option */
    ARI_ARGS_VERSION
} ari_args_action;

/** Parses argv[1 ..] into *values; argv[0] is the subcommand's name. *action differs from RUN if --help, --help-all or
 *  --version precedes the first error. Errors: AR_ERR_ARG (unknown option, with the nearest name; a value missing,
 *  malformed or out of range, with the valid values; too few or too many positionals), AR_ERR_UNSUPPORTED (an option of
 *  a later version). Strings are borrowed from argv. */
AR_NODISCARD ar_status ari_args_parse(const ari_args_spec *spec, int argc, char *const *argv, void *values,
                                      ari_args_action *action);

/** Parses the arguments of ari_args_run once more over the present *values, so that the given options take effect
 *  again. Errors: those of ari_args_parse; the arguments were valid before. */
AR_NODISCARD ar_status ari_args_reparse(const ari_args_spec *spec, void *values);

/** Describes a command line: the subcommand, the version, and every option and positional with its value, in one line
 *  each, such as "--tp 2" or "no --sp". Options of a single process are left out. Release *result with free(). Errors:
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_args_describe(char **result, const ari_args_spec *spec, const void *values);

/** Prints a text from `column` on in lines of 80 columns, and a line feed; the cursor is there already. */
void ari_print_wrapped(FILE *out, const char *text, int column);

/** Prints usage, positionals, options and examples. If the options have sections, prints only their names unless
 *  `is_full` is set. */
void ari_args_help(FILE *out, const ari_args_spec *spec, bool is_full);

/* --- subcommands -------------------------------------------------------------------------------------------------- */

typedef struct ari_subcommand ari_subcommand;
/* A subcommand. To add one, define a spec in the file of its name and add a row to main.c's table, which ends with the
 * name NULL. */
struct ari_subcommand {
    const char *name;
    const char *summary;                                                  /* NULL: not listed */
    const ari_args_spec *spec;                                            /* NULL: it takes no options */
    int (*run)(const ari_subcommand *subcommands, int argc, char **argv); /* NULL: ari_args_run with the spec */
};
extern const ari_args_spec ari_compare_spec, ari_check_spec, ari_grads_spec, ari_train_spec, ari_verify_spec,
    ari_plan_spec, ari_lint_spec, ari_bugs_spec, ari_causes_spec, ari_info_spec;

/** Runs a subcommand from its arguments to its exit code: prints the help, the version, or an error, and ends the
 *  connection to other processes. */
int ari_args_run(const ari_args_spec *spec, int argc, char *const *argv);
/** Runs `anyrank describe TEMPLATE OUT`, which is not listed: the build uses it to make manual pages and completions.
 *  Copies the template and replaces the lines that ask for tables of options. */
int ari_command_describe(const ari_subcommand *subcommands, int argc, char **argv);

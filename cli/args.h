/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CLI_ARGS_H
#define ARI_CLI_ARGS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "anyrank/status.h"

/* Options of a subcommand, from a table: parsing, --help, what processes compare, the manual pages and the completions
 * come from it. A subcommand has a struct of values, whose fields hold the defaults before the
 * parse, and one static table of options, each with the offset of its field:
 *
 *     struct values { ari_common common; const char *model; int tp; bool sp; };
 *     static const ari_option options[] = {
 *         {.name = "tp", .kind = ARI_OPT_INT, .at = offsetof(struct values, tp), .min = 1, .max = 4096, .value = "N",
 *          .help = "tensor-parallel ranks (default 1)"},
 *         {.name = "sp", .kind = ARI_OPT_FLAG, .at = offsetof(struct values, sp), .help = "sequence parallel"},
 *         {0}};
 *
 * Accepted forms: --name value, --name=value, -x value, and `--`, after which everything is positional. The last of a
 * repeated option counts, or all of it (ARI_OPT_STRINGS). */
typedef enum ari_option_kind {
    ARI_OPT_FLAG,    /* bool, set to true; takes no value */
    ARI_OPT_INT,     /* int in [min, max] */
    ARI_OPT_SIZE,    /* size_t in [min, max] */
    ARI_OPT_BYTES,   /* size_t in [min, max], as 4096, 25MiB or 2GB */
    ARI_OPT_U64,     /* uint64_t, any */
    ARI_OPT_DOUBLE,  /* double, finite, in [min, max] */
    ARI_OPT_STRING,  /* const char *, borrowed from argv, not empty */
    ARI_OPT_FILE,    /* the same: the path of a file */
    ARI_OPT_FOLDER,  /* the same: the path of a folder */
    ARI_OPT_STRINGS, /* ari_strings: each time one more of them */
    ARI_OPT_ENUM,    /* int: the index in `choices` */
    ARI_OPT_LATER    /* declared, not in this version: parsing it is an error that says so */
} ari_option_kind;

enum { ARI_OPT_MOST = 128, ARI_OPT_TEXT = 512 }; /* options of a subcommand; what would be right, in words */
#define ARI_OPT_MANY 8
/* All values of an option that may be given several times, in their order. */
typedef struct ari_strings {
    const char *text[ARI_OPT_MANY];
    size_t n;
} ari_strings;

typedef struct ari_option {
    const char *name; /* without the dashes; NULL ends a table */
    char letter;      /* 0: no short form */
    ari_option_kind kind;
    size_t at;                  /* offset of the field in the struct of values */
    double min, max;            /* INT, SIZE, BYTES, DOUBLE; both 0: all that the type holds, from 0 on for sizes */
    const char *const *choices; /* ENUM: all; strings: those that completions offer. Ends with NULL */
    const char *value;          /* what the help calls the value: "N", "FILE"; NULL for flags and enums */
    const char *otherwise;      /* INT, SIZE: the value where no number follows; NULL: one must */
    const char *help;           /* one or two lines, with the default; NULL: not listed */
    const char *more;           /* sentences that the manual page adds; NULL: none */
    bool own;                   /* of one process alone: where ranks are processes, they may differ in it */
} ari_option;

/* What the options of a kind have in common. */
typedef struct ari_kind_ops {
    /* Stores a value in its field. NULL: takes none. Errors: AR_ERR_ARG, with what would be right. */
    ar_status (*set)(const ari_option *o, void *field, const char *value);
    /* "an integer from 1 to 4096": what would be right. NULL: takes none. */
    void (*describe)(const ari_option *o, char *text, size_t size);
    /* "--tp 2" and a line feed; false where it was not given and has no default that could be printed. */
    bool (*print)(FILE *to, const ari_option *o, const void *field);
} ari_kind_ops;
const ari_kind_ops *ari_option_kind_of(const ari_option *o);

/** Decimal digits, up to what *end then points to; false where there is none or the number does not fit. */
bool ari_natural(uint64_t *out, const char *text, const char **end);

/** Refuses "-" as the path of a file to write; NULL is none (AR_ERR_ARG). */
AR_NODISCARD ar_status ari_args_check_path(const char *option, const char *path);
/** Refuses one path for two files to write; NULL is none (AR_ERR_ARG). */
AR_NODISCARD ar_status ari_args_check_paths(const char *option, const char *path, const char *other,
                                            const char *other_path);

/* An option without a field: --help, --version. */
#define ARI_OPT_NO_FIELD SIZE_MAX
/** What every subcommand takes; the fields are those of ari_common. */
extern const ari_option ari_common_options[];

/* A positional argument; its field is a const char *. */
typedef struct ari_positional {
    const char *name; /* "MODEL"; NULL ends a table */
    size_t at;
    bool required;
    ari_option_kind kind;       /* STRING, FILE or FOLDER */
    const char *const *choices; /* those that completions offer; NULL: none */
    const char *help;
} ari_positional;

/** What every subcommand takes. */
typedef struct ari_common {
    const char *json; /* "-": standard output; NULL: none */
    bool quiet;
    bool no_color;
    int threads;   /* of the whole process; 0: as many as there are cores */
    uint64_t seed; /* 0 unless given */
} ari_common;

typedef struct ari_args_spec {
    const char *command;               /* "check" */
    const char *summary;               /* one line, a sentence */
    const char *example;               /* whole command lines, separated by '\n' */
    const ari_option *options;         /* NULL: only the common ones */
    const ari_positional *positionals; /* NULL: none */
    size_t common_at;                  /* offset of the ari_common in the struct of values */
} ari_args_spec;

typedef enum ari_args_action { ARI_ARGS_RUN, ARI_ARGS_HELP, ARI_ARGS_VERSION } ari_args_action;

/** Parses argv[1 ..] into *values; argv[0] is the subcommand's name. *action is HELP or VERSION if --help or --version
 *  stands before the first error.
 *  Errors: AR_ERR_ARG (unknown option, with the nearest one; a value missing, malformed or out of range, with what
 * would be right; too few or too many positionals), AR_ERR_UNSUPPORTED (an option of a later version). Strings are
 * borrowed from argv. */
AR_NODISCARD ar_status ari_args_parse(const ari_args_spec *spec, int argc, char *const *argv, void *values,
                                      ari_args_action *action);

/** The subcommand, the version, and every option and positional with its value, in one line each: "--tp 2", "no --sp".
 *  Without what is a process's own. Gives; free(). Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_args_tell(char **gives, const ari_args_spec *spec, const void *values);

/** Prints usage, positionals, options and examples. */
void ari_args_help(FILE *to, const ari_args_spec *spec);

/** Parses, and does what needs no subcommand: prints the help, the version, or an error. True if the subcommand shall
 *  run; otherwise *exit_code is what it returns. */
bool ari_args_begin(const ari_args_spec *spec, int argc, char *const *argv, void *values, int *exit_code);

#endif

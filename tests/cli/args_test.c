/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/options/args.h"
#include "support/row.h"
#include "tests/support/test.h"

/* The command's files are no part of the library. */
#include "cli/options/args.c"
#include "cli/options/kinds.c"
#include "cli/options/subcommand.c"
#include "cli/options/transport.c"
#include "cli/shared/command.c"

static const char *const numerics[] = {"exact", "native", NULL};

typedef struct values {
    ari_common common;
    const char *model, *text;
    int tp, numerics, sweep;
    size_t batch, bytes;
    double lr;
    bool sp;
    ar_stages stages;
} values;

static const ari_option options[] = {
    ROW(.name = "tp", .kind = ARI_OPT_INT, .offset = offsetof(values, tp), .min = 1, .max = 4096, .value = "N",
        .help = "ranks"),
    ROW(.name = "sweep", .kind = ARI_OPT_INT, .offset = offsetof(values, sweep), .min = 1, .max = 64, .value = "W",
        .otherwise = "8", .help = "all"),
    {.name = "sp", .letter = 's', .kind = ARI_OPT_FLAG, .offset = offsetof(values, sp), .help = "sequence parallel"},
    {.name = "batch", .letter = 'b', .kind = ARI_OPT_SIZE, .offset = offsetof(values, batch), .min = 1, .max = 1e6},
    {.name = "bytes", .kind = ARI_OPT_BYTES, .offset = offsetof(values, bytes)},
    {.name = "lr", .kind = ARI_OPT_DOUBLE, .offset = offsetof(values, lr), .min = 0, .max = 1},
    {.name = "text", .kind = ARI_OPT_STRING, .offset = offsetof(values, text), .value = "FILE", .help = "a file"},
    {.name = "stages", .kind = ARI_OPT_STAGES, .offset = offsetof(values, stages), .value = "LIST", .help = "layers"},
    {.name = "numerics",
     .kind = ARI_OPT_ENUM,
     .offset = offsetof(values, numerics),
     .choices = numerics,
     .help = "which"},
    {0},
};
static const ari_positional positionals[] = {
    {.name = "MODEL", .offset = offsetof(values, model), .help = "a folder"},
    {0},
};
static const ari_args_spec spec = {
    .command = "try",
    .summary = "Tries the parser.",
    .example = "anyrank try --tp 2",
    .options = options,
    .positionals = positionals,
};

enum { MAX_WORDS = 24 };

/* Parses words separated by spaces; an underscore stands for an empty word. */
static ar_status parse(values *v, ari_args_action *action, const char *line)
{
    static char text[256];
    char *argv[MAX_WORDS] = {text};
    int argc = 1;
    *v = (values){.tp = 1, .numerics = -1, .batch = 8, .lr = 0.5};
    snprintf(text, sizeof text, "try %s", line);
    for (char *word = strtok(text, " "); word != NULL && argc < MAX_WORDS; word = strtok(NULL, " ")) {
        if (word != text)
            argv[argc++] = strcmp(word, "_") == 0 ? word + 1 : word;
    }
    return ari_args_parse(&spec, argc, argv, v, action);
}

static values parsed(const char *line)
{
    values v;
    ari_args_action action = ARI_ARGS_HELP;
    cr_assert_eq(parse(&v, &action, line), AR_OK, "%s: %s", line, ar_error_message());
    cr_assert_eq(action, ARI_ARGS_RUN);
    return v;
}

static void refused(const char *line, const char *message)
{
    values v;
    ari_args_action action = ARI_ARGS_RUN;
    cr_assert_eq(parse(&v, &action, line), AR_ERR_ARG, "%s: %s", line, ar_error_message());
    cr_assert_str_eq(ar_error_message(), message);
}

Test(args, nothing_given_leaves_the_defaults)
{
    const values v = parsed("");
    cr_assert(v.tp == 1 && v.batch == 8 && v.lr == 0.5 && !v.sp && v.numerics == -1);
    cr_assert(v.model == NULL && v.text == NULL && v.common.json == NULL && v.common.seed == 0);
}

Test(args, bytes_are_plain_or_have_a_unit)
{
    cr_expect_eq(parsed("--bytes 0").bytes, 0);
    cr_expect_eq(parsed("--bytes 4096").bytes, 4096);
    cr_expect_eq(parsed("--bytes 17B").bytes, 17);
    cr_expect_eq(parsed("--bytes 64KiB").bytes, 65536);
    cr_expect_eq(parsed("--bytes=25MiB").bytes, 26214400);
    cr_expect_eq(parsed("--bytes 2GiB").bytes, 2147483648u);
    cr_expect_eq(parsed("--bytes 3kB").bytes, 3000);
    cr_expect_eq(parsed("--bytes 5MB").bytes, 5000000);
    cr_expect_eq(parsed("--bytes 1GB").bytes, 1000000000);
    static const char *const wrong[] = {
        "-1", "1.5MiB", "MiB", "25Mib", "25MiBx", "18446744073709551616", "17179869184GiB"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        char line[64], says[128];
        snprintf(line, sizeof line, "--bytes %s", wrong[i]);
        snprintf(says, sizeof says, "--bytes: got '%s', expected a number of bytes, as 4096, 64KiB, 25MiB or 1GB",
                 wrong[i]);
        refused(line, says);
    }
}

Test(args, stages_are_numbers_with_commas)
{
    const ar_stages three = parsed("--stages 3,0,65535").stages;
    cr_expect(three.n == 3 && three.layers[0] == 3 && three.layers[1] == 0 && three.layers[2] == 65535);
    cr_expect_eq(parsed("").stages.n, 0);
    cr_expect_eq(parsed("--stages=7").stages.layers[0], 7);
    static const char *const wrong[] = {"_", ",", "3,", ",3", "3,,4", "3;4", "-1", "1.5", "65536", "3,x"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        char line[64], says[128];
        snprintf(line, sizeof line, "--stages %s", wrong[i]);
        snprintf(says, sizeof says, "--stages: got '%s', expected numbers of layers, at most 256 of them, as 3,5,4",
                 wrong[i][0] == '_' ? "" : wrong[i]);
        refused(line, says);
    }
}

Test(args, every_kind_is_stored_in_its_field)
{
    const values v = parsed("llama-demo --tp 4 --sp --batch 32 --lr 1e-3 --text a.txt --numerics native");
    cr_assert_str_eq(v.model, "llama-demo");
    cr_assert_str_eq(v.text, "a.txt");
    cr_assert(v.tp == 4 && v.sp && v.batch == 32 && v.lr == 1e-3 && v.numerics == 1);
}

Test(args, a_value_may_follow_an_equals_sign)
{
    const values v = parsed("--tp=2 --text=a=b --json=- --seed=18446744073709551615");
    cr_assert_eq(v.tp, 2);
    cr_assert_str_eq(v.text, "a=b");
    cr_assert_str_eq(v.common.json, "-");
    cr_assert_eq(v.common.seed, UINT64_MAX);
}

Test(args, options_and_positionals_mix_and_the_last_repetition_counts)
{
    const values v = parsed("--tp 2 gpt2-demo -s -b 3 --tp 8 -q --no-color --threads 2");
    cr_assert_str_eq(v.model, "gpt2-demo");
    cr_assert(v.tp == 8 && v.sp && v.batch == 3 && v.common.quiet && v.common.no_color && v.common.threads == 2);
}

Test(args, after_two_dashes_everything_is_positional)
{
    const values v = parsed("--sp -- --tp");
    cr_assert_str_eq(v.model, "--tp");
    cr_assert_str_eq(parsed("-").model, "-");
}

Test(args, help_and_version_end_the_parse)
{
    values v;
    ari_args_action action = ARI_ARGS_RUN;
    cr_assert_ok(parse(&v, &action, "-h --nonsense"));
    cr_assert_eq(action, ARI_ARGS_HELP);
    cr_assert_ok(parse(&v, &action, "--version --nonsense"));
    cr_assert_eq(action, ARI_ARGS_VERSION);
}

Test(args, a_number_that_may_be_left_out_is_taken_only_where_one_follows)
{
    cr_expect_eq(parsed("--sweep").sweep, 8);
    cr_expect_eq(parsed("--sweep 4").sweep, 4);
    cr_expect_eq(parsed("--sweep=4").sweep, 4);
    cr_expect_eq(parsed("--sweep --sp").sweep, 8);
    const values v = parsed("--sweep llama-demo");
    cr_expect_eq(v.sweep, 8);
    cr_expect_str_eq(v.model, "llama-demo");
}

static const struct {
    const char *line, *message;
} refusals[] = {
    /* unknown options name the nearest */
    {"--spp", "unknown option --spp; did you mean --sp?"},
    {"--numeric=exact", "unknown option --numeric; did you mean --numerics?"},
    {"--qiet", "unknown option --qiet; did you mean --quiet?"},
    {"--frobnicate 3", "unknown option --frobnicate; anyrank try --help lists the options"},
    {"-tp 3", "unknown option -tp; did you mean --tp?"},
    {"-x", "unknown option -x; anyrank try --help lists the options"},
    /* values, with what would be right */
    {"--tp zero", "--tp: got 'zero', expected an integer from 1 to 4096"},
    {"--tp 0", "--tp: got '0', expected an integer from 1 to 4096"},
    {"--tp 4097", "--tp: got '4097', expected an integer from 1 to 4096"},
    {"--tp 2x", "--tp: got '2x', expected an integer from 1 to 4096"},
    {"--tp 99999999999999999999", "--tp: got '99999999999999999999', expected an integer from 1 to 4096"},
    {"--tp=", "--tp: got '', expected an integer from 1 to 4096"},
    {"--tp _", "--tp: got '', expected an integer from 1 to 4096"},
    {"--batch -1", "--batch: got '-1', expected an integer from 1 to 1000000"},
    {"--lr -0.1", "--lr: got '-0.1', expected a number from 0 to 1"},
    {"--lr nan", "--lr: got 'nan', expected a number from 0 to 1"},
    {"--lr 1e999", "--lr: got '1e999', expected a number from 0 to 1"},
    {"--lr 0x1", "--lr: got '0x1', expected a number from 0 to 1"},
    {"--numerics fast", "--numerics: got 'fast', expected exact or native"},
    {"--seed -1", "--seed: got '-1', expected an integer from 0 to 18446744073709551615"},
    {"--text=", "--text: got '', expected FILE"},
    /* choices that are near */
    {"--numerics nativ", "--numerics: got 'nativ', expected exact or native; did you mean native?"},
    {"--numerics e", "--numerics: got 'e', expected exact or native"},
    /* missing and superfluous values */
    {"--tp", "--tp: its value is missing, expected an integer from 1 to 4096"},
    {"--text --sp", "--text: its value is missing, expected FILE"},
    {"--sp=yes", "--sp: got 'yes', but it takes no value"},
    {"--help=yes", "--help: got 'yes', but it takes no value"},
    /* positionals */
    {"one two", "unexpected argument 'two' after MODEL 'one'"},
    {"_", "MODEL is empty"},
    /* escapes do not reach the terminal */
    {"--tp \x1b[31m", "--tp: got '?[31m', expected an integer from 1 to 4096"},
    {"--\x1b[31m", "unknown option --?[31m; anyrank try --help lists the options"},
    /* a number that may be left out */
    {"--sweep 0", "--sweep: got '0', expected an integer from 1 to 64"},
    {"--sweep -1", "--sweep: got '-1', expected an integer from 1 to 64"},
    {"--sweep=", "--sweep: got '', expected an integer from 1 to 64"},
    {"--sweep 4x", "--sweep: got '4x', expected an integer from 1 to 64"},
};

Test(args, what_is_wrong_is_refused_with_what_would_be_right)
{
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++)
        refused(refusals[i].line, refusals[i].message);
}

Test(args, a_required_positional_is_missed)
{
    const ari_positional required[] = {
        {.name = "DUMP", .offset = offsetof(values, model), .required = true, .help = "x"}, {0}};
    ari_args_spec strict = spec;
    strict.positionals = required;
    values v = {0};
    ari_args_action action = ARI_ARGS_RUN;
    char name[] = "try";
    char *argv[] = {name};
    cr_assert_eq(ari_args_parse(&strict, 1, argv, &v, &action), AR_ERR_ARG);
    cr_assert_str_eq(ar_error_message(), "DUMP is missing: x");
}

Test(args, long_arguments_are_cut_in_messages_not_in_memory)
{
    static char word[100000];
    char name[] = "try";
    char *argv[] = {name, word};
    values v = {0};
    ari_args_action action = ARI_ARGS_RUN;
    memset(word, 'x', sizeof word - 1);
    word[0] = word[1] = '-';
    cr_assert_eq(ari_args_parse(&spec, 2, argv, &v, &action), AR_ERR_ARG);
    cr_assert_lt(strlen(ar_error_message()), 1000);
}

Test(args, the_help_lists_every_option_within_80_columns)
{
    OWNED(free) char *text = NULL;
    size_t size = 0;
    FILE *to = open_memstream(&text, &size);
    ari_args_help(to, &spec, true);
    fclose(to);
    cr_assert(strstr(text, "usage: anyrank try [MODEL] [options]\n") == text);
    cr_assert_not_null(strstr(text, "\n  --tp N "));
    cr_assert_not_null(strstr(text, "\n  -s, --sp "));
    cr_assert_not_null(strstr(text, "\n  --sweep [W] "));
    cr_assert_not_null(strstr(text, "\n  --numerics exact|native  which\n"));
    cr_assert_not_null(strstr(text, "\n  --json FILE|- "));
    cr_assert_not_null(strstr(text, "\nexample:\n  anyrank try --tp 2\n"));
    cr_assert_null(strstr(text, "--bytes"), "an option without help is not listed");
    for (const char *line = text; *line != '\0'; line += strcspn(line, "\n") + 1)
        cr_assert_leq(strcspn(line, "\n"), 80);
}

Test(args, files_to_write_are_tried_before_any_work)
{
    typedef struct files {
        ari_common common;
        const char *trace, *csv;
    } files;
#define ARI_VALUES files
    static const ari_option written[] = {ARI_OPTION_FILE("trace", trace, "FILE", "a file", .written = true),
                                         ARI_OPTION_FILE("csv", csv, "FILE", "another", .written = true),
                                         {0}};
#undef ARI_VALUES
    const ari_args_spec writing = {.command = "try", .options = written};
    const files fine = {.trace = "/dev/null", .common.json = "-"}, dash = {.trace = "-"};
    const files same = {.trace = "/dev/null", .csv = "/dev/null"}, no_folder = {.csv = "/no/such/folder/csv"};
    cr_assert_ok(check_written(&writing, &fine));
    cr_assert_eq(check_written(&writing, &dash), AR_ERR_ARG);
    cr_assert_str_eq(ar_error_message(), "--trace - is no file: give a path (/dev/stdout is one)");
    cr_assert_eq(check_written(&writing, &same), AR_ERR_ARG);
    cr_assert_str_eq(ar_error_message(), "--trace and --csv both name /dev/null: one would replace the other");
    cr_assert_eq(check_written(&writing, &no_folder), AR_ERR_IO);
}

Test(args, options_of_a_group_are_found_in_its_struct)
{
    typedef struct inner {
        int size;
        bool on;
    } inner;
    typedef struct outer {
        ari_common common;
        int before;
        inner in;
    } outer;
#define ARI_VALUES inner
    static const ari_option shared[] = {
        ARI_OPTION_INT("size", size, 1, 9, "N", "a size"), ARI_OPTION_FLAG("on", on, "a flag"), {0}};
#undef ARI_VALUES
#define ARI_VALUES outer
    static const ari_option own[] = {
        ARI_OPTION_INT("before", before, 1, 9, "N", "another size"), ARI_OPTION_GROUP(shared, in), {0}};
#undef ARI_VALUES
    const ari_args_spec grouped = {.command = "try", .options = own};
    char words[][16] = {"try", "--size", "7", "--on", "--before=3", "-q"};
    char *argv[] = {words[0], words[1], words[2], words[3], words[4], words[5]};
    outer v = {.before = 1};
    ari_args_action action = ARI_ARGS_HELP;
    cr_assert_ok(ari_args_parse(&grouped, 6, argv, &v, &action));
    cr_assert(v.before == 3 && v.in.size == 7 && v.in.on && v.common.quiet);
}

Test(exit_code, every_status_has_one)
{
    /* What no other option or file would put right is the machine's, or ours. */
    static const ar_status machine[] = {AR_ERR_MEMORY, AR_ERR_TIMEOUT, AR_ERR_ABORTED, AR_ERR_DEVICE, AR_ERR_INTERNAL};
    static const ar_status all[] = {
#define LISTED(code, name, text) AR_##name,
        AR_STATUS_TABLE(LISTED)
#undef LISTED
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        int expected = all[i] == AR_OK ? 0 : 2;
        for (size_t k = 0; k < sizeof machine / sizeof *machine; k++)
            expected = all[i] == machine[k] ? 3 : expected;
        cr_expect_eq(ari_exit_code(all[i]), expected, "%s gives %d", ar_status_name(all[i]), ari_exit_code(all[i]));
    }
}

/* --- telling ------------------------------------------------------------------------------------------------------ */

static void tells(const char *line, const char *text)
{
    const values v = parsed(line);
    char *told = NULL, expected[512];
    cr_assert_ok(ari_args_describe(&told, &spec, &v));
    snprintf(expected, sizeof expected, "anyrank try, version %s\n%s", ari_version(), text);
    cr_expect_str_eq(told, expected);
    free(told);
}

Test(args_tell, has_a_line_for_each_option_that_processes_share)
{
    tells("", "no MODEL\n--tp 1\nno --sweep\nno --sp\n--batch 8\n--bytes 0\n--lr 0.5\nno --text\nno --stages\n"
              "no --numerics\n--seed 0\n");
    tells(
        "m --tp 2 --sweep 3 --sp --batch 9 --bytes 1KiB --lr 0.1 --text t --stages 2,1 --numerics native --seed 7 -q --threads 3",
        "MODEL m\n--tp 2\n--sweep 3\n--sp\n--batch 9\n--bytes 1024\n--lr 0.1\n--text t\n--stages 2,1\n--numerics native\n--seed 7\n");
}

Test(args_tell, tells_numbers_apart)
{
    tells("--lr 0.10000000000000002", "no MODEL\n--tp 1\nno --sweep\nno --sp\n--batch 8\n--bytes 0\n"
                                      "--lr 0.10000000000000002\nno --text\nno --stages\nno --numerics\n--seed 0\n");
}

Test(transport, names_the_first_option_in_which_a_process_differs)
{
    cr_expect_ok(compare_options(3, "a\n--tp 2\n", "a\n--tp 2\n"));
    cr_assert_eq(compare_options(3, "a\n--tp 2\n--sp\n", "a\n--tp 2\nno --sp\n"), AR_ERR_ARG);
    cr_expect_str_eq(ar_error_message(),
                     "process 3 was started with '--sp', process 0 with 'no --sp': all take the same options");
    cr_assert_eq(compare_options(1, "anyrank a\n", "anyrank b\n--tp 2\n"), AR_ERR_ARG);
    cr_expect_str_eq(ar_error_message(),
                     "process 1 was started with 'anyrank a', process 0 with 'anyrank b': all take the same options");
    cr_expect_eq(compare_options(1, "", "anyrank b\n"), AR_ERR_ARG);
}

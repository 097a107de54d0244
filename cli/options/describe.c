/* SPDX-License-Identifier: Apache-2.0 */
/* anyrank describe TEMPLATE OUT: manual pages and completions out of the tables of options. A template is a page or a
 * script, of which each line with "@describe PIECE WORD.." is replaced by that piece:
 *
 *     manual SUBCOMMAND NAME..    entries of these options; without names all of its own that are left
 *     manual-common               entries of those of every subcommand that are left
 *     manual-subcommands          entries of the subcommands
 *     bash, zsh, zsh-subcommands, fish
 *     python SUBCOMMAND NAME..    the options as keyword arguments, with types and texts; the function names those
 *                                 options itself, so that the class of the others lacks them
 *
 * The text after an option in a manual page adds to its entry. A page that lacks an option is an error. */
#include <ctype.h>
#include <errno.h>
#include <string.h>

#include "cli/options/args.h"
#include "ref/core/size.h"
#include "ref/core/text.h"

typedef struct page {
    FILE *to;
    const ari_subcommand *all; /* of the program */
    const char *subcommand;    /* that a manual page is about; NULL: none so far */
    ari_option_list options;   /* its */
    bool done[ARI_MAX_OPTIONS];
} page;

/* Options listed by --help. */
static ari_option_list listed(const ari_args_spec *spec)
{
    ari_option_list all = ari_options_of(spec), l = {.n = 0};
    for (size_t i = 0; i < all.n; i++) {
        if (all.option[i]->help)
            l.option[l.n++] = all.option[i];
        l.local_count = i < all.local_count ? l.n : l.local_count;
    }
    return l;
}

/* The first from s on that takes options; NULL: none. */
static const ari_subcommand *described(const ari_subcommand *s)
{
    while (s->name && !s->spec)
        s++;
    return s->name ? s : NULL;
}

/* The subcommand of a page's word; NULL, with the error's message: there is none. */
static const ari_subcommand *subcommand_named(const page *p, const char *name)
{
    const ari_subcommand *s = described(p->all);
    while (s && name && strcmp(s->name, name) != 0)
        s = described(s + 1);
    if (!name || !s) {
        const ar_status st =
            ar_error_set(AR_ERR_ARG, "there is no subcommand '%s' with options", ARI_SHOW(name ? name : ""));
        (void)st;
        return NULL;
    }
    return s;
}

static bool takes_value(const ari_option *o)
{
    return o->kind != ARI_OPT_FLAG;
}

static void print_words(FILE *to, const char *const *words)
{
    for (size_t i = 0; words && words[i]; i++)
        fprintf(to, "%s%s", i == 0 ? "" : " ", words[i]);
}

/* `length` characters of a text, with a backslash before those in `special`, and `quote` for each '. */
static void print_escaped(FILE *to, const char *text, size_t length, const char *special, const char *quote)
{
    for (const char *c = text; c < text + length; c++) {
        if (*c == '\'')
            fputs(quote, to);
        else
            fprintf(to, "%s%c", strchr(special, *c) ? "\\" : "", *c);
    }
}

/* The length of a help text that a shell shows: without the default after it. */
static size_t gist(const char *help)
{
    const char *otherwise = strstr(help, " (default");
    return otherwise ? (size_t)(otherwise - help) : strlen(help);
}

/* --- manual pages ------------------------------------------------------------------------------------------------- */

/* A text for roff, and `end`: names of options are bold, and a minus sign is a hyphen only between letters. */
static void print_roff(FILE *to, const char *text, const char *end)
{
    size_t bold = 0; /* characters left of an option's name */
    for (const char *c = text; *c; c++) {
        const bool begins = c == text || !isalnum((unsigned char)c[-1]);
        if (bold == 0 && begins && strncmp(c, "--", 2) == 0 && islower((unsigned char)c[2])) {
            bold = 2 + strspn(c + 2, "abcdefghijklmnopqrstuvwxyz0123456789-");
            fputs("\\fB", to);
        }
        const bool hyphen = bold == 0 && c != text && isalpha((unsigned char)c[-1]) && isalpha((unsigned char)c[1]);
        print_escaped(to, c, 1, hyphen ? "\\" : "-\\", "\\(aq");
        if (bold > 0 && --bold == 0)
            fputs("\\fR", to);
    }
    fputs(end, to);
}

/* "-q, --quiet", "--tp N", "--numerics exact|native". */
static void print_label(FILE *to, const ari_option *o)
{
    if (o->letter)
        fprintf(to, "\\fB\\-%c\\fR, ", o->letter);
    fputs("\\fB\\-\\-", to);
    print_escaped(to, o->name, strlen(o->name), "-", "'");
    fputs("\\fR", to);
    for (size_t i = 0; o->kind == ARI_OPT_ENUM && o->choices[i]; i++) {
        fputs(i == 0 ? " \\fB" : "|\\fB", to);
        print_escaped(to, o->choices[i], strlen(o->choices[i]), "-", "'");
        fputs("\\fR", to);
    }
    if (o->value && o->kind != ARI_OPT_ENUM)
        fprintf(to, o->otherwise ? " [\\fI%s\\fR]" : " \\fI%s\\fR", o->value);
    fputc('\n', to);
}

static void print_entry(page *p, size_t i)
{
    const ari_option *o = p->options.option[i];
    if (p->done[i])
        return;
    p->done[i] = true;
    fputs(".TP\n", p->to);
    print_label(p->to, o);
    print_roff(p->to, o->help, ".\n");
    if (o->details)
        print_roff(p->to, o->details, "\n");
}

static ar_status manual(page *p, char *words)
{
    const char *name = strsep(&words, " ");
    const ari_subcommand *s = subcommand_named(p, name);
    if (!s)
        return AR_ERR_ARG;
    p->subcommand = s->name;
    p->options = listed(s->spec);
    for (size_t i = 0; !words && i < p->options.local_count; i++)
        print_entry(p, i);
    while ((name = strsep(&words, " "))) {
        size_t i = 0;
        while (i < p->options.n && strcmp(p->options.option[i]->name, name) != 0)
            i++;
        if (i == p->options.n)
            return ar_error_set(AR_ERR_ARG, "anyrank %s has no option --%s", s->name, ARI_SHOW(name));
        print_entry(p, i);
    }
    return AR_OK;
}

static ar_status manual_common(page *p, char *words)
{
    (void)words;
    for (size_t i = p->options.local_count; i < p->options.n; i++)
        print_entry(p, i);
    return AR_OK;
}

static ar_status manual_subcommands(page *p, char *words)
{
    (void)words;
    for (const ari_subcommand *s = described(p->all); s; s = described(s + 1)) {
        fprintf(p->to, ".TP\n.BR %s \", see \" anyrank\\-%s (1)\n", s->name, s->name);
        print_roff(p->to, s->summary, "\n");
    }
    return AR_OK;
}

static ar_status check_complete(const page *p)
{
    for (size_t i = 0; i < p->options.n; i++)
        if (!p->done[i])
            return ar_error_set(AR_ERR_ARG, "the page lacks --%s of %s", p->options.option[i]->name, p->subcommand);
    return AR_OK;
}

/* --- bash --------------------------------------------------------------------------------------------------------- */

/* The words, if any, and the kind of path for compgen. */
static void bash_values(FILE *to, const char *const *choices, ari_option_kind kind)
{
    if (choices) {
        fputs(" words=\"", to);
        print_words(to, choices);
        fputc('"', to);
    }
    fprintf(to, "%s ;;\n", kind == ARI_OPT_FILE ? " paths=-f" : kind == ARI_OPT_FOLDER ? " paths=-d" : "");
}

/* By "SUBCOMMAND PREVIOUS-WORD": values of options, and for all else options and positional arguments. */
static void bash_subcommand(FILE *to, const ari_subcommand *s)
{
    const ari_option_list l = listed(s->spec);
    for (size_t i = 0; i < l.n; i++) {
        const ari_option *o = l.option[i];
        if (!takes_value(o) || o->otherwise)
            continue;
        fprintf(to, "        \"%s --%s\")", s->name, o->name);
        bash_values(to, o->choices, o->kind);
    }
    fprintf(to, "        \"%s \"*)\n            options=\"", s->name);
    for (size_t i = 0; i < l.n; i++)
        fprintf(to, "%s--%s", i == 0 ? "" : " ", l.option[i]->name);
    fputs("\"\n            case $COMP_CWORD in\n", to);
    for (const ari_positional *a = s->spec->positionals; a && a->name; a++) {
        if (a[1].name)
            fprintf(to, "                %d)", 2 + (int)(a - s->spec->positionals));
        else
            fputs("                *)", to);
        bash_values(to, a->choices, a->kind);
    }
    fputs("            esac ;;\n", to);
}

static ar_status bash(page *p, char *words)
{
    (void)words;
    fputs("    local subcommands=\"", p->to);
    for (const ari_subcommand *s = described(p->all); s; s = described(s + 1))
        fprintf(p->to, "%s ", s->name);
    fputs("\"\n    case \"$subcommand $previous\" in\n", p->to);
    for (const ari_subcommand *s = described(p->all); s; s = described(s + 1))
        bash_subcommand(p->to, s);
    fputs("    esac\n", p->to);
    return AR_OK;
}

/* --- zsh ---------------------------------------------------------------------------------------------------------- */

static void zsh_values(FILE *to, const char *title, const char *const *choices, ari_option_kind kind)
{
    const char *ending = strchr(title, '.');
    print_escaped(to, title, strlen(title), ":\\", "'\\''");
    fputc(':', to);
    const bool path = kind == ARI_OPT_FILE || kind == ARI_OPT_FOLDER;
    if (path && choices)
        fprintf(to, " _anyrank_word_or_%s ", kind == ARI_OPT_FOLDER ? "folder" : "file");
    else if (kind == ARI_OPT_FILE && ending)
        fprintf(to, "_files -g \"*%s\"", ending);
    else if (path)
        fputs(kind == ARI_OPT_FOLDER ? "_files -/" : "_files", to);
    else if (choices)
        fputc('(', to);
    print_words(to, choices);
    if (!path && choices)
        fputc(')', to);
}

static void zsh_option(FILE *to, const ari_option *o)
{
    if (o->offset == ARI_OPT_NO_FIELD)
        fputs("(- *)", to);
    else if (o->letter)
        fprintf(to, "(-%c --%s)", o->letter, o->name);
    else if (o->kind == ARI_OPT_STRINGS)
        fputc('*', to);
    if (o->letter)
        fprintf(to, "'{-%c,--%s}'[", o->letter, o->name);
    else
        fprintf(to, "--%s%s[", o->name, takes_value(o) ? "=" : "");
    print_escaped(to, o->help, gist(o->help), "[]\\", "'\\''");
    fputs(o->otherwise ? "]::" : takes_value(o) ? "]:" : "]", to);
    if (takes_value(o))
        zsh_values(to, o->value ? o->value : o->name, o->choices, o->kind);
}

static ar_status zsh(page *p, char *words)
{
    (void)words;
    for (const ari_subcommand *s = described(p->all); s; s = described(s + 1)) {
        const ari_option_list l = listed(s->spec);
        fprintf(p->to, "        %s)\n            _arguments -S", s->name);
        for (size_t i = 0; i < l.n; i++) {
            fputs(" \\\n                '", p->to);
            zsh_option(p->to, l.option[i]);
            fputc('\'', p->to);
        }
        for (const ari_positional *a = s->spec->positionals; a && a->name; a++) {
            fputs(" \\\n                ':", p->to);
            zsh_values(p->to, a->name, a->choices, a->kind);
            fputc('\'', p->to);
        }
        fputs("\n            ;;\n", p->to);
    }
    return AR_OK;
}

static ar_status zsh_subcommands(page *p, char *words)
{
    (void)words;
    for (const ari_subcommand *s = described(p->all); s; s = described(s + 1)) {
        fprintf(p->to, "        '%s:", s->name);
        print_escaped(p->to, s->summary, strlen(s->summary), ":\\", "'\\''");
        fputs("'\n", p->to);
    }
    return AR_OK;
}

/* --- fish --------------------------------------------------------------------------------------------------------- */

static void fish_values(FILE *to, const char *const *choices, ari_option_kind kind)
{
    if (!choices && kind != ARI_OPT_FOLDER)
        return;
    fputs(" -a \"", to);
    print_words(to, choices);
    fprintf(to, "%s\"", kind == ARI_OPT_FOLDER ? " (__fish_complete_directories)" : "");
}

static void fish_text(FILE *to, const char *text)
{
    fputs(" -d '", to);
    print_escaped(to, text, gist(text), "\\", "\\'");
    fputs("'\n", to);
}

/* condition: the variable that says where the option is offered. */
static void fish_option(FILE *to, const char *condition, const ari_option *o)
{
    fprintf(to, "complete -c anyrank -n $%s -l %s", condition, o->name);
    if (o->letter)
        fprintf(to, " -s %c", o->letter);
    if (takes_value(o) && !o->otherwise)
        fputs(o->kind == ARI_OPT_FILE ? " -rF" : " -x", to);
    fish_values(to, o->choices, o->kind);
    fish_text(to, o->help);
}

static void fish_subcommand(FILE *to, const ari_subcommand *s)
{
    const ari_option_list l = listed(s->spec);
    fprintf(to, "\ncomplete -c anyrank -n $none -a %s", s->name);
    fish_text(to, s->summary);
    fprintf(to, "set -l %s \"__fish_seen_subcommand_from %s\"\n", s->name, s->name);
    for (const ari_positional *a = s->spec->positionals; a && a->name; a++) {
        fprintf(to, "complete -c anyrank -n $%s%s", s->name, a->kind == ARI_OPT_FILE ? " -F" : "");
        fish_values(to, a->choices, a->kind);
        fputc('\n', to);
    }
    for (size_t i = 0; i < l.local_count; i++)
        fish_option(to, s->name, l.option[i]);
}

static ar_status fish(page *p, char *words)
{
    (void)words;
    const ari_option_list common = listed(NULL);
    fputs("set -l subcommands", p->to);
    for (const ari_subcommand *s = described(p->all); s; s = described(s + 1))
        fprintf(p->to, " %s", s->name);
    fputs("\nset -l none \"not __fish_seen_subcommand_from $subcommands help\"\n"
          "set -l any \"__fish_seen_subcommand_from $subcommands\"\n",
          p->to);
    for (size_t i = 0; i < common.n; i++)
        fish_option(p->to, "any", common.option[i]);
    for (const ari_subcommand *s = described(p->all); s; s = described(s + 1))
        fish_subcommand(p->to, s);
    return AR_OK;
}

/* --- Python ------------------------------------------------------------------------------------------------------- */

/* Those that the Python package gives itself, as it reads the result and the progress. */
static bool given_by_python(const ari_option *o)
{
    static const char *const names[] = {"json", "quiet", "no-color", "progress-fd"};
    return ARI_IS_AMONG(o->name, names) || o->offset == ARI_OPT_NO_FIELD;
}

/* An option's name as a keyword: "bucket_bytes". */
static void python_name(FILE *to, const char *name)
{
    for (; *name; name++)
        fputc(*name == '-' ? '_' : *name, to);
}

/* A text as literals of at most a line each. */
static void python_text(FILE *to, const char *text)
{
    enum { WIDTH = 100 };
    while (*text) {
        size_t n = strlen(text);
        for (n = n > WIDTH ? WIDTH : n; text[n] && n > 1 && text[n - 1] != ' ';)
            n--;
        fputs("\n        \"", to);
        print_escaped(to, text, n, "\"\\", "'");
        fputc('"', to);
        text += n;
    }
}

/* The name that python/options.py.in gives the values of this kind. */
static void python_type(FILE *to, const ari_option *o)
{
    static const char *const types[] = {
        [ARI_OPT_FLAG] = "bool", [ARI_OPT_INT] = "int",     [ARI_OPT_SIZE] = "int",      [ARI_OPT_BYTES] = "Bytes",
        [ARI_OPT_PART] = "Part", [ARI_OPT_U64] = "int",     [ARI_OPT_DOUBLE] = "float",  [ARI_OPT_STRING] = "Text",
        [ARI_OPT_FILE] = "Path", [ARI_OPT_FOLDER] = "Path", [ARI_OPT_STRINGS] = "Texts", [ARI_OPT_STAGES] = "Counts"};
    if (o->kind != ARI_OPT_ENUM)
        fputs(o->otherwise ? "Optional" : types[o->kind], to);
    for (size_t i = 0; o->kind == ARI_OPT_ENUM && o->choices[i]; i++)
        fprintf(to, "%s\"%s\"", i == 0 ? "typing.Literal[" : ", ", o->choices[i]);
    fputs(o->kind == ARI_OPT_ENUM ? "]" : "", to);
}

static ar_status python(page *p, char *words)
{
    const ari_subcommand *s = subcommand_named(p, strsep(&words, " "));
    if (!s)
        return AR_ERR_ARG;
    const ari_option_list l = listed(s->spec);
    bool named[ARI_MAX_OPTIONS] = {false};
    for (const char *name; (name = strsep(&words, " "));)
        for (size_t i = 0; i < l.n; i++)
            named[i] = named[i] || strcmp(l.option[i]->name, name) == 0;
    fprintf(p->to, "\n\nclass %c%sOptions(typing.TypedDict, total=False):\n", toupper((unsigned char)s->name[0]),
            s->name + 1);
    for (size_t i = 0; i < l.n; i++) {
        if (given_by_python(l.option[i]) || named[i])
            continue;
        fputs("    ", p->to);
        python_name(p->to, l.option[i]->name);
        fputs(": ", p->to);
        python_type(p->to, l.option[i]);
        fputc('\n', p->to);
    }
    fprintf(p->to, "\n\nOPTIONS[\"%s\"] = {\n", s->name);
    for (size_t i = 0; i < l.n; i++) {
        if (given_by_python(l.option[i]))
            continue;
        fputs("    \"", p->to);
        python_name(p->to, l.option[i]->name);
        fputs("\": Option('", p->to);
        python_type(p->to, l.option[i]);
        fputs("',", p->to);
        python_text(p->to, l.option[i]->help);
        fputs("),\n", p->to);
    }
    fputs("}\n", p->to);
    return AR_OK;
}

/* --- the template ------------------------------------------------------------------------------------------------- */

static ar_status print_piece(page *p, char *words)
{
    static const struct {
        const char *name;
        ar_status (*print)(page *p, char *words);
    } pieces[] = {{"manual", manual},
                  {"manual-common", manual_common},
                  {"manual-subcommands", manual_subcommands},
                  {"bash", bash},
                  {"zsh", zsh},
                  {"zsh-subcommands", zsh_subcommands},
                  {"fish", fish},
                  {"python", python}};
    words[strcspn(words, "\n")] = '\0';
    const char *piece = strsep(&words, " ");
    for (size_t i = 0; i < sizeof pieces / sizeof *pieces; i++)
        if (strcmp(piece, pieces[i].name) == 0)
            return pieces[i].print(p, words);
    return ar_error_set(AR_ERR_ARG, "there is nothing '%s' to describe", ARI_SHOW(piece));
}

static ar_status print_page(FILE *to, FILE *template, const ari_subcommand *all)
{
    static const char mark[] = "@describe ";
    page p = {.to = to, .all = all};
    ARI_OWNED char *line = NULL;
    size_t size = 0;
    ar_status st = AR_OK;
    while (st == AR_OK && getline(&line, &size, template) >= 0) {
        char *at = strstr(line, mark);
        if (at)
            st = print_piece(&p, at + sizeof mark - 1);
        else
            fputs(line, to);
    }
    return st == AR_OK ? check_complete(&p) : st;
}

static ar_status describe_all(const char *from, const char *to, const ari_subcommand *all)
{
    FILE *in = fopen(from, "r"), *out = in ? fopen(to, "w") : NULL;
    ar_status st = AR_OK;
    if (!out)
        st = ar_error_set(AR_ERR_IO, "%s: %s", ARI_SHOW(in ? to : from), strerror(errno));
    if (st == AR_OK)
        st = print_page(out, in, all);
    if (out && (ferror(out) | fclose(out)) != 0 && st == AR_OK)
        st = ar_error_set(AR_ERR_IO, "%s: %s", ARI_SHOW(to), strerror(errno));
    if (out && st != AR_OK)
        (void)remove(to);
    if (in)
        fclose(in);
    return st;
}

int ari_command_describe(const ari_subcommand *all, int argc, char **argv)
{
    const ar_status st =
        argc == 3 ? describe_all(argv[1], argv[2], all) : ar_error_set(AR_ERR_ARG, "a TEMPLATE and the file to write");
    if (st != AR_OK)
        ari_print_error("describe", st);
    return ari_exit_code(st);
}

/* SPDX-License-Identifier: Apache-2.0 */
#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "ref/core/text.h"
#include "verify/dump/map.h"

ar_status ari_map_bad(const ari_map *m, const ari_map_rule *r, const char *format, ...)
{
    char text[512];
    ARI_FORMAT(text, format);
    if (r == NULL)
        return ar_error_set(AR_ERR_FORMAT, "InvalidMapping: %s: %s", ARI_SHOW(m->name), text);
    return ar_error_set(AR_ERR_FORMAT, "InvalidMapping: %s: rule %zu ('%s'): %s", ARI_SHOW(m->name), r->number,
                        r->match == NULL ? "" : ARI_SHOW(r->match), text);
}

/* --- globs -------------------------------------------------------------------------------------------------------- */
size_t ari_map_name_length(const char *text)
{
    size_t n = 0;
    while (isalnum((unsigned char)text[n]) || text[n] == '_')
        n++;
    return isdigit((unsigned char)text[0]) ? 0 : n;
}

/* Copies the name that begins at `text` and returns its length; 0: there is none, or it is too long. */
static size_t take_name(char name[ARI_MAP_NAME], const char *text)
{
    const size_t n = ari_map_name_length(text);
    if (n >= ARI_MAP_NAME)
        return 0;
    memcpy(name, text, n);
    name[n] = '\0';
    return n;
}

int ari_map_number(const ari_map_glob *g, const char *name)
{
    for (int i = 0; i < g->numbers; i++)
        if (strcmp(g->name[i], name) == 0)
            return i;
    return -1;
}

static const char *add_number(ari_map_glob *g, const char **text)
{
    if (g->numbers == ARI_MAP_CAPTURES)
        return "more numbers in braces than one glob may have";
    char *name = g->name[g->numbers];
    const size_t n = take_name(name, *text + 1);
    if (n == 0 || (*text)[n + 1] != '}')
        return "a brace begins a number, {name}; '\\{' is the brace itself";
    if (ari_map_number(g, name) >= 0)
        return "the same number twice";
    g->token[g->tokens++] = (ari_map_token){.kind = ARI_MAP_NUMBER, .number = g->numbers++};
    *text += n + 2;
    return NULL;
}

static const char *add_token(ari_map_glob *g, const char **text)
{
    const char c = **text;
    if (c == '{')
        return add_number(g, text);
    if (c == '\\' && (*text)[1] == '\0')
        return "ends in a single '\\'";
    if (c == '*' && ++g->stars > ARI_MAP_CAPTURES)
        return "more '*' than one glob may have";
    const ari_map_token_kind kind = c == '*' ? ARI_MAP_STAR : c == '?' ? ARI_MAP_ANY : ARI_MAP_BYTE;
    *text += c == '\\';
    g->token[g->tokens++] = (ari_map_token){.kind = kind, .byte = **text};
    *text += 1;
    return NULL;
}

ar_status ari_map_glob_compile(ari_map_glob *g, ari_arena *a, const char *text, const char **problem)
{
    memset(g, 0, sizeof *g);
    const size_t n = strlen(text);
    if (n > ARI_MAP_PATTERN) {
        *problem = "is too long";
        return AR_ERR_FORMAT;
    }
    AR_TRY(ARI_TAKE(&g->token, a, n, "a glob"));
    while (*text != '\0') {
        *problem = add_token(g, &text);
        if (*problem != NULL)
            return AR_ERR_FORMAT;
    }
    return AR_OK;
}

/* Moves *text past what the token stands for; false where something else is there. A star is not among them. */
static bool match_token(const ari_map_token *t, const char **text, ari_map_match *m)
{
    const char *c = *text;
    if (*c == '\0')
        return false;
    if (t->kind == ARI_MAP_BYTE) {
        *text = c + 1;
        return *c == t->byte;
    }
    if (t->kind == ARI_MAP_ANY) {
        for (c++; ((unsigned char)*c & 0xC0u) == 0x80u; c++)
            ; /* the rest of one character of UTF-8 */
        *text = c;
        return true;
    }
    size_t value = 0;
    for (; isdigit((unsigned char)*c); c++)
        if (__builtin_mul_overflow(value, (size_t)10, &value) ||
            __builtin_add_overflow(value, (size_t)(*c - '0'), &value) || value > INT32_MAX)
            return false;
    if (c == *text)
        return false;
    m->number[t->number] = value;
    *text = c;
    return true;
}

/* Every star takes as little as it can. What stands between two stars is put where it first fits: since a number takes
 * all digits, and nothing else varies in length, no later place would leave more to the rest. */
bool ari_map_glob_match(const ari_map_glob *g, const char *text, ari_map_match *m)
{
    memset(m, 0, sizeof *m);
    m->text = text;
    if (strnlen(text, ARI_MAP_MATCHED + 1) > ARI_MAP_MATCHED)
        return false;
    const char *at = text, *retry = NULL;
    size_t k = 0, after_star = 0;
    int star = -1;
    for (;;) {
        if (k < g->tokens && g->token[k].kind == ARI_MAP_STAR) {
            star++;
            after_star = ++k;
            retry = at;
            m->star[star][0] = m->star[star][1] = (size_t)(at - text);
            continue;
        }
        if (k == g->tokens && *at == '\0')
            return true;
        if (k < g->tokens && match_token(&g->token[k], &at, m)) {
            k++;
            continue;
        }
        if (star < 0 || *retry == '\0')
            return false;
        at = ++retry;
        k = after_star;
        m->star[star][1] = (size_t)(at - text);
    }
}

/* --- expressions -------------------------------------------------------------------------------------------------- */
typedef struct expression {
    const char *at;
    const ari_map_place *place; /* without an entry values are 0 */
    size_t index;
    const char *problem;
    int depth;
} expression;

static int64_t fail_expression(expression *e, const char *problem)
{
    if (e->problem == NULL)
        e->problem = problem;
    return 0;
}

static char peek(expression *e)
{
    while (*e->at == ' ')
        e->at++;
    return *e->at;
}

static int64_t value_of(expression *e, const char *name)
{
    const ari_map_place *p = e->place;
    const int number = ari_map_number(&p->r->glob, name);
    if (number >= 0)
        return (int64_t)p->match.number[number];
    if (p->r->unstack != NULL && strcmp(name, "index") == 0)
        return e->index > INT32_MAX ? fail_expression(e, "is beyond the range of numbers") : (int64_t)e->index;
    const bool is_rank = strcmp(name, "rank") == 0;
    const int d = ar_mesh_find(&p->m->mesh, name);
    if (d < 0 && !is_rank)
        return fail_expression(e, "names a number that neither the glob nor the mesh has");
    if (p->entry == NULL)
        return 0;
    if (p->rank < 0)
        return fail_expression(e, "names a coordinate, but the file is no rank's");
    return is_rank ? p->rank : p->at[d];
}

static int64_t sum(expression *e);

static int64_t factor(expression *e)
{
    const char c = peek(e);
    char name[ARI_MAP_NAME];
    if (c == '(') {
        if (++e->depth > ARI_MAP_CAPTURES)
            return fail_expression(e, "nests its brackets too deep");
        e->at++;
        const int64_t inner = sum(e);
        e->depth--;
        if (peek(e) != ')')
            return fail_expression(e, "has a bracket that is not closed");
        e->at++;
        return inner;
    }
    if (isdigit((unsigned char)c)) {
        int64_t n = 0;
        for (; isdigit((unsigned char)*e->at); e->at++) {
            n = n * 10 + (*e->at - '0');
            if (n > INT32_MAX)
                return fail_expression(e, "has a number beyond 2^31");
        }
        return n;
    }
    const size_t n = take_name(name, e->at);
    if (n == 0)
        return fail_expression(e, "expects a number, a name or a bracket");
    e->at += n;
    return value_of(e, name);
}

static int64_t apply_operator(expression *e, int64_t a, char op, int64_t b)
{
    int64_t out = 0;
    if (op == '/' || op == '%') {
        if (b == 0)
            return e->place->entry == NULL ? 0 : fail_expression(e, "divides by 0");
        return op == '/' ? a / b : a % b; /* not INT64_MIN / -1: values stay within 2^62 */
    }
    const bool beyond = op == '*'   ? __builtin_mul_overflow(a, b, &out)
                        : op == '+' ? __builtin_add_overflow(a, b, &out)
                                    : __builtin_sub_overflow(a, b, &out);
    return beyond || out > INT64_MAX / 2 || out < -(INT64_MAX / 2)
               ? fail_expression(e, "is beyond the range of numbers")
               : out;
}

static int64_t parse_product(expression *e)
{
    int64_t x = factor(e);
    for (char op = peek(e); e->problem == NULL && (op == '*' || op == '/' || op == '%'); op = peek(e)) {
        e->at++;
        x = apply_operator(e, x, op, factor(e));
    }
    return x;
}

static int64_t sum(expression *e)
{
    int64_t x = parse_product(e);
    for (char op = peek(e); e->problem == NULL && (op == '+' || op == '-'); op = peek(e)) {
        e->at++;
        x = apply_operator(e, x, op, parse_product(e));
    }
    return x;
}

/* --- patterns ----------------------------------------------------------------------------------------------------- */
typedef struct filling {
    FILE *out;
    const ari_map_place *place;
    size_t index;
    int star; /* the next '*' */
} filling;

static const char *put_star(filling *f, int star)
{
    const ari_map_match *m = &f->place->match;
    if (star >= f->place->r->glob.stars)
        return "has more '*' than the glob";
    if (f->place->entry != NULL)
        fwrite(m->text + m->star[star][0], 1, m->star[star][1] - m->star[star][0], f->out);
    return NULL;
}

/* Fills in the text between braces; *text moves from after the opening brace to after the closing one. */
static const char *put_braces(filling *f, const char **text)
{
    if ((*text)[0] == '*' && (*text)[1] >= '1' && (*text)[1] <= '9' && (*text)[2] == '}') {
        const int star = (*text)[1] - '1';
        *text += 3;
        return put_star(f, star);
    }
    expression e = {*text, f->place, f->index, NULL, 0};
    const int64_t value = sum(&e);
    if (e.problem == NULL && peek(&e) != '}')
        return "has braces with something that is no expression of numbers, names, + - * / % and brackets";
    if (e.problem == NULL && value < 0 && f->place->entry != NULL)
        return "comes to a number below 0";
    *text = e.at + 1;
    if (e.problem == NULL && f->place->entry != NULL)
        fprintf(f->out, "%lld", (long long)value);
    return e.problem;
}

static const char *put_pattern(filling *f, const char *pattern)
{
    const char *problem = NULL;
    while (*pattern != '\0' && problem == NULL) {
        const char c = *pattern++;
        if (c == '{') {
            problem = put_braces(f, &pattern);
        } else if (c == '*') {
            problem = put_star(f, f->star++);
        } else if (c == '\\' && *pattern == '\0') {
            problem = "ends in a single '\\'";
        } else {
            fputc(c == '\\' ? *pattern : c, f->out);
            pattern += c == '\\';
        }
    }
    return problem;
}

ar_status ari_map_fill(char **gives, const char *pattern, const ari_map_place *p, size_t index, const char **problem)
{
    ARI_OWNED char *text = NULL;
    size_t bytes = 0;
    if (strlen(pattern) > ARI_MAP_PATTERN) {
        *problem = "is too long";
        return AR_ERR_FORMAT;
    }
    filling f = {open_memstream(&text, &bytes), p, index, 0};
    if (f.out == NULL)
        return ar_error_set(AR_ERR_MEMORY, "no memory for a name");
    *problem = put_pattern(&f, pattern);
    if (!ari_text_closed(f.out, &text))
        return ar_error_set(AR_ERR_MEMORY, "no memory for a name");
    if (*problem != NULL)
        return AR_ERR_FORMAT;
    return p->entry != NULL ? ari_arena_text(p->arena, gives, text, "a name") : AR_OK;
}

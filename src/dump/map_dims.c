/* SPDX-License-Identifier: Apache-2.0 */
#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "dump/map.h"
#include "ref/core/atomic_file.h"
#include "ref/core/text.h"

/* The notation of SGLang's dump comparator (sglang/srt/debug_utils/comparator/dims_spec) as a spelling of `shard` and
 * `partial`, one word for each dimension of the file's tensor:
 *
 *   dims      = word {" " word} ["#" {" " remark}]
 *   word      = "1" | (name | "(" name "*" name {"*" name} ")") ["[" axis {"," axis} "]"]
 *   axis      = dimension of the mesh [":" qualifier {"+" qualifier}]
 *   qualifier = "zigzag" | "natural" | "partial" | "sharded"
 *   remark    = axis ":replicated" | "dp:=" group, which is refused
 *
 * The axes of a word divide from left to right, the outermost first. A dimension "1" has one element and is left out of
 * the full tensor. */

enum { MOST_NAMES = 2 * AR_ST_MAX_DIMS };

typedef struct reader {
    const ari_map *m;
    ari_map_rule *r;
    const char *text, *at;
    struct {
        const char *text;
        size_t length;
    } name[MOST_NAMES]; /* of dimensions, which are all different */
    size_t names;
} reader;

/* Points at where the reader is. */
static ar_status bad(const reader *s, const char *format, ...) AR_PRINTF(2, 3);
static ar_status bad(const reader *s, const char *format, ...)
{
    char text[256];
    ARI_FORMAT(text, format);
    const size_t column = (size_t)(s->at - s->text) + 1;
    char here[24] = "its end";
    if (*s->at != '\0')
        snprintf(here, sizeof here, "'%.1s'", isprint((unsigned char)*s->at) ? s->at : "?");
    return ari_map_bad(s->m, s->r, "key 'dims': '%s', character %zu, at %s: %s", ARI_SHOW(s->text), column, here, text);
}

static bool skip(reader *s, char c)
{
    if (*s->at != c)
        return false;
    s->at++;
    return true;
}

static ar_status read_name(reader *s)
{
    const size_t n = ari_map_name_length(s->at);
    if (n == 0)
        return bad(s, "expected the name of a dimension, such as h or (heads*d), or 1");
    for (size_t i = 0; i < s->names; i++)
        if (s->name[i].length == n && memcmp(s->name[i].text, s->at, n) == 0)
            return bad(s, "the name '%.*s' is there twice", (int)(n < 64 ? n : 64), s->at);
    if (s->names == MOST_NAMES)
        return bad(s, "more than %d names of dimensions", MOST_NAMES);
    s->name[s->names].text = s->at;
    s->name[s->names++].length = n;
    s->at += n;
    return AR_OK;
}

/* An axis that was not there before; `problem`: what it is to be there again, behind its name. */
static ar_status read_axis(reader *s, int *mesh, const char *problem)
{
    char name[ARI_MAP_NAME];
    const size_t n = ari_map_name_length(s->at);
    snprintf(name, sizeof name, "%.*s", (int)(n < sizeof name ? n : sizeof name - 1), s->at);
    *mesh = n > 0 && n < sizeof name ? ar_mesh_find(&s->m->mesh, name) : -1;
    if (*mesh < 0)
        return bad(s, "expected a dimension of the mesh, in which one may have 1 rank");
    bool used = (s->r->partial >> *mesh & 1u) != 0;
    for (size_t i = 0; i < s->r->splits; i++)
        used = used || s->r->split[i].mesh == *mesh;
    if (used)
        return bad(s, "'%s' %s", s->m->mesh.dim[*mesh].name, problem);
    s->at += n;
    return AR_OK;
}

/* zigzag, partial, and the words for what is so anyway. */
static ar_status read_qualifiers(reader *s, bool *zigzag, bool *partial)
{
    bool *const says[] = {zigzag, NULL, partial, NULL};
    static const char *const words[] = {"zigzag", "natural", "partial", "sharded"};
    bool seen[4] = {false};
    do {
        const size_t n = ari_map_name_length(s->at);
        size_t k = 0;
        while (k < 4 && (strlen(words[k]) != n || memcmp(words[k], s->at, n) != 0))
            k++;
        if (k == 4)
            return bad(s, "expected zigzag, natural, partial or sharded");
        if (seen[k] || (k < 2 && seen[1 - k]))
            return bad(s, k < 2 ? "the order is given twice" : "given twice");
        seen[k] = true;
        if (says[k] != NULL)
            *says[k] = true;
        if (*zigzag && *partial)
            return bad(s, "a summand has the whole dimension, of which there is no order over ranks");
        s->at += n;
    } while (skip(s, '+'));
    return AR_OK;
}

static ar_status read_axes(reader *s, int dim)
{
    do {
        int mesh = 0;
        bool zigzag = false, partial = false;
        AR_TRY(read_axis(s, &mesh, "is there twice"));
        if (skip(s, ':'))
            AR_TRY(read_qualifiers(s, &zigzag, &partial));
        if (partial)
            s->r->partial |= 1u << mesh;
        else /* as many at most as the mesh has dimensions */
            s->r->split[s->r->splits++] = (ari_map_split){mesh, dim, zigzag};
    } while (skip(s, ','));
    return skip(s, ']') ? AR_OK : bad(s, "expected ',' or ']'");
}

static ar_status read_word(reader *s, int dim)
{
    if (skip(s, '1')) {
        s->r->squeeze[dim] = true;
        return AR_OK;
    }
    if (skip(s, '(')) {
        AR_TRY(read_name(s));
        if (*s->at != '*')
            return bad(s, "expected '*': brackets fold several dimensions into one");
        while (skip(s, '*'))
            AR_TRY(read_name(s));
        if (!skip(s, ')'))
            return bad(s, "expected '*' or ')'");
    } else {
        AR_TRY(read_name(s));
    }
    return skip(s, '[') ? read_axes(s, dim) : AR_OK;
}

/* "dp:=attn_dp": of the ranks along it, one has samples, and what the others hold is empty. */
static bool is_data_parallel(const reader *s)
{
    const size_t n = ari_map_name_length(s->at);
    return n > 0 && strncmp(s->at + n, ":=", 2) == 0;
}

/* "tp:replicated": ranks along it hold copies, as they do of whatever divides nothing. */
static ar_status read_remark(reader *s)
{
    static const char replicated[] = ":replicated";
    int mesh = 0;
    AR_TRY(read_axis(s, &mesh, "cannot both divide the tensor and hold copies of it"));
    if (strncmp(s->at, replicated, sizeof replicated - 1) != 0)
        return bad(s, "expected ':replicated'");
    s->at += sizeof replicated - 1;
    return AR_OK;
}

static bool skip_spaces(reader *s)
{
    const char *start = s->at;
    while (*s->at == ' ')
        s->at++;
    return s->at > start;
}

static ar_status expect_gap(reader *s)
{
    return skip_spaces(s) || *s->at == '\0' || *s->at == '#' ? AR_OK : bad(s, "expected a space");
}

ar_status ari_map_read_dims(const ari_map *m, ari_map_rule *r, const json_t *value)
{
    reader s = {.m = m, .r = r, .text = json_string_value(value), .at = json_string_value(value)};
    if (s.text == NULL)
        return ari_map_bad(m, r, "key 'dims': expected a string, \"b s[cp:zigzag] h[tp]\"");
    skip_spaces(&s);
    for (r->worded = 0; *s.at != '\0' && *s.at != '#'; r->worded++) {
        if (r->worded == AR_ST_MAX_DIMS)
            return bad(&s, "more than %d dimensions", AR_ST_MAX_DIMS);
        AR_TRY(read_word(&s, r->worded));
        AR_TRY(expect_gap(&s));
    }
    if (r->worded == 0)
        return bad(&s, "expected a word for each dimension");
    if (!skip(&s, '#'))
        return AR_OK;
    skip_spaces(&s);
    while (*s.at != '\0') {
        if (is_data_parallel(&s))
            return bad(&s,
                       "'dp:=GROUP' is not supported here: python3 -m anyrank.convert reads it, and leaves out what "
                       "the ranks without samples hold");
        AR_TRY(read_remark(&s));
        if (!skip_spaces(&s) && *s.at != '\0')
            return bad(&s, "expected a space");
    }
    return AR_OK;
}

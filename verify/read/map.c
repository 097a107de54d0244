/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/read/map.h"

#include <ctype.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/text.h"
#include "ref/io/file.h"
#include "ref/io/json.h"
#include "ref/placement/placement_private.h"

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))
#define MAX_BYTES ((size_t)4 << 20) /* a rule takes about a hundred bytes */
#define MAX_RULES 4096
#define MAX_GLOB 512
#define MAX_MATCHED 4096 /* length of the longest name that is matched with a glob, in bytes */

ar_status ari_map_bad(const ari_map *m, const ari_map_rule *r, const char *format, ...)
{
    char text[512];
    ARI_FORMAT(text, format);
    if (r == NULL)
        return ar_error_set(AR_ERR_FORMAT, "InvalidMapping: %s: %s", ARI_SHOW(m->name), text);
    return ar_error_set(AR_ERR_FORMAT, "InvalidMapping: %s: rule %zu ('%s'): %s", ARI_SHOW(m->name), r->number,
                        r->match == NULL ? "" : ARI_SHOW(r->match), text);
}

/* --- names -------------------------------------------------------------------------------------------------------- */
typedef enum token_kind { END, BYTE, ANY, STAR, NUMBER, WRONG } token_kind;
/* Next element of a glob or pattern. */
typedef struct token {
    token_kind kind;
    char byte;               /* the byte for BYTE; the first wrong byte for WRONG */
    char name[ARI_MAP_NAME]; /* NUMBER */
} token;

static size_t name_length(const char *text)
{
    size_t n = 0;
    while (isalnum((unsigned char)text[n]) || text[n] == '_')
        n++;
    return isdigit((unsigned char)text[0]) || n >= ARI_MAP_NAME ? 0 : n;
}

/* Reads the next token and moves *text past it. */
static token next_token(const char **text)
{
    const char *c = *text;
    const size_t n = *c == '{' ? name_length(c + 1) : 0;
    token t = {.kind = *c == '\0' ? END : *c == '*' ? STAR : *c == '?' ? ANY : BYTE, .byte = *c};
    *text = c + (*c != '\0');
    if (*c == '\\' || *c == '{')
        t.kind = WRONG;
    if (*c == '\\' && c[1] != '\0') {
        t = (token){.kind = BYTE, .byte = c[1]};
        *text = c + 2;
    } else if (n > 0 && c[n + 1] == '}') {
        t.kind = NUMBER;
        memcpy(t.name, c + 1, n);
        *text = c + n + 2;
    }
    return t;
}

/* Returns an error text for a pattern with more than `stars` stars or `numbers` numbers, or another mistake; NULL: the
 * pattern is valid. */
static const char *pattern_problem(const char *text, int stars, int numbers)
{
    if (strlen(text) > MAX_GLOB)
        return "is too long";
    for (token t = next_token(&text); t.kind != END; t = next_token(&text)) {
        stars -= t.kind == STAR;
        numbers -= t.kind == NUMBER;
        if (t.kind == WRONG)
            return t.byte == '\\' ? "ends in a single '\\'"
                                  : "has a brace that begins no number, {name}; '\\{' is the brace itself";
        if (stars < 0)
            return "has more '*' than the glob, or than one may have";
        if (numbers < 0)
            return "has a number in braces, which only 'files' has, one for each dimension of the mesh";
    }
    return NULL;
}

/* Advances *text past what the token matches; returns false if the token does not match. */
static bool match_token(const token *t, const char **text, size_t *number)
{
    const char *c = *text;
    uint64_t value = 0;
    if (*c == '\0' || (t->kind == BYTE && *c != t->byte))
        return false;
    if (t->kind == NUMBER) {
        if (!ari_natural(&value, c, text) || value > INT32_MAX)
            return false;
        *number = (size_t)value;
        return true;
    }
    for (c++; t->kind == ANY && ((unsigned char)*c & 0xC0u) == 0x80u; c++)
        ; /* skip the rest of a UTF-8 character */
    *text = c;
    return true;
}

/* Matches the text between two stars at its first possible position. A later position would not help: a number takes
 * all digits, and nothing else varies in length. */
bool ari_map_glob_match(const char *glob, const char *text, ari_map_match *m)
{
    const char *cursor = text, *retry = NULL, *after = NULL;
    size_t stars = 0, numbers = 0, numbers_before = 0;
    *m = (ari_map_match){.text = text};
    if (strnlen(text, MAX_MATCHED + 1) > MAX_MATCHED)
        return false;
    for (;;) {
        const char *rest = glob;
        const token t = next_token(&rest);
        if (t.kind == STAR) {
            after = glob = rest;
            numbers_before = numbers;
            retry = cursor;
            m->star[stars][0] = m->star[stars][1] = (size_t)(cursor - text);
            stars++;
        } else if (t.kind == END && *cursor == '\0') {
            return true;
        } else if (t.kind != END && match_token(&t, &cursor, &m->number[numbers])) {
            numbers += t.kind == NUMBER;
            glob = rest;
        } else if (!after || *retry == '\0') {
            return false;
        } else {
            cursor = ++retry;
            glob = after;
            numbers = numbers_before;
            m->star[stars - 1][1] = (size_t)(cursor - text);
        }
    }
}

ar_status ari_map_fill(char **filled_name, ari_arena *a, const char *pattern, const ari_map_match *m)
{
    ARI_OWNED char *text = NULL;
    size_t bytes = 0, star = 0;
    FILE *out = open_memstream(&text, &bytes);
    if (out == NULL)
        return ar_error_set(AR_ERR_MEMORY, "no memory for a name");
    for (token t = next_token(&pattern); t.kind != END; t = next_token(&pattern)) {
        if (t.kind != STAR) {
            fputc(t.byte, out);
            continue;
        }
        fwrite(m->text + m->star[star][0], 1, m->star[star][1] - m->star[star][0], out);
        star++;
    }
    if (!ari_text_closed(out, &text))
        return ar_error_set(AR_ERR_MEMORY, "no memory for a name");
    return ari_arena_text(a, filled_name, text, "a name");
}

/* --- values ------------------------------------------------------------------------------------------------------- */
static ar_status check_keys(const ari_map *m, const ari_map_rule *r, const json_t *object, const char *const *keys,
                            size_t n)
{
    const char *key = ari_json_unknown_key(object, keys, n);
    if (!key)
        return AR_OK;
    const char *nearest = ari_nearest(key, keys, n);
    char key_list[200] = "";
    ari_text list = ari_text_in(key_list, sizeof key_list);
    for (size_t i = 0; i < n; i++)
        ari_say(&list, "%s%s", i > 0 ? ", " : "", keys[i]);
    return nearest ? ari_map_bad(m, r, "unknown key '%s', did you mean '%s'?", ARI_SHOW(key), nearest)
                   : ari_map_bad(m, r, "unknown key '%s'; known are %s", ARI_SHOW(key), key_list);
}

static ar_status read_int(const ari_map *m, const ari_map_rule *r, const char *key, const json_t *value, int64_t min,
                          int64_t max, int64_t *out)
{
    *out = json_integer_value(value);
    return json_is_integer(value) && *out >= min && *out <= max
               ? AR_OK
               : ari_map_bad(m, r, "key '%s': expected an integer from %lld to %lld", key, (long long)min,
                             (long long)max);
}

/* Checks that a value is a list of 1 to `max_count` elements; `content` describes the elements for messages. */
static ar_status check_list(const ari_map *m, const ari_map_rule *r, const char *key, const json_t *value,
                            size_t max_count, const char *content)
{
    const size_t n = json_array_size(value);
    return json_is_array(value) && n > 0 && n <= max_count
               ? AR_OK
               : ari_map_bad(m, r, "key '%s': expected a list of 1 to %zu %s", key, max_count, content);
}

static ar_status find_mesh_dim(const ari_map *m, const ari_map_rule *r, const char *key, const char *name, int *out)
{
    *out = name == NULL ? -1 : ari_mesh_find(&m->mesh, name);
    return *out >= 0 ? AR_OK
                     : ari_map_bad(m, r, "key '%s': '%s' is no dimension of the mesh", key,
                                   name == NULL ? "(no string)" : ARI_SHOW(name));
}

/* --- rules -------------------------------------------------------------------------------------------------------- */
static ar_status read_partial(const ari_map *m, ari_map_rule *r, const json_t *value)
{
    const bool is_single = json_is_string(value);
    if (!is_single && !json_is_array(value))
        return ari_map_bad(m, r, "key 'partial': expected a dimension of the mesh, or a list of them");
    for (size_t i = 0; i < (is_single ? 1 : json_array_size(value)); i++) {
        int d = 0;
        AR_TRY(find_mesh_dim(m, r, "partial", json_string_value(is_single ? value : json_array_get(value, i)), &d));
        r->partial |= 1u << d;
    }
    return AR_OK;
}

static ar_status add_split(const ari_map *m, ari_map_rule *r, const char *name, const json_t *spec)
{
    static const char *const keys[] = {"dim", "zigzag"};
    ari_map_split s = {0};
    int64_t dim = 0;
    AR_TRY(find_mesh_dim(m, r, "shard", name, &s.mesh));
    for (size_t i = 0; i < r->splits; i++)
        if (r->split[i].mesh == s.mesh)
            return ari_map_bad(m, r, "key 'shard': '%s' is there twice", m->mesh.dim[s.mesh].name);
    if (json_is_object(spec)) {
        const json_t *zigzag = json_object_get(spec, "zigzag");
        AR_TRY(check_keys(m, r, spec, keys, COUNT(keys)));
        if (zigzag && !json_is_boolean(zigzag))
            return ari_map_bad(m, r, "key 'shard': zigzag: expected true or false");
        s.zigzag = json_is_true(zigzag);
        spec = json_object_get(spec, "dim");
    }
    AR_TRY(read_int(m, r, "shard", spec, -AR_ST_MAX_DIMS, AR_ST_MAX_DIMS - 1, &dim));
    s.dim = (int)dim;
    r->split[r->splits++] = s; /* at most as many as mesh dimensions, because none occurs twice */
    return AR_OK;
}

/* Reads {"tp": 0, "dp": 1}, where the outermost mesh dimension divides first, or [["tp", 0], ["dp", 0]], which gives
 * the order. */
static ar_status read_shard(const ari_map *m, ari_map_rule *r, const json_t *value)
{
    const char *name;
    json_t *spec;
    int found = 0;
    for (size_t i = 0; i < json_array_size(value); i++) {
        const json_t *pair = json_array_get(value, i);
        if (json_array_size(pair) != 2)
            return ari_map_bad(m, r, "key 'shard': expected pairs, [[\"tp\", 0], [\"dp\", 0]]");
        AR_TRY(add_split(m, r, json_string_value(json_array_get(pair, 0)), json_array_get(pair, 1)));
    }
    if (json_is_array(value))
        return AR_OK;
    if (!json_is_object(value))
        return ari_map_bad(m, r, "key 'shard': expected an object, {\"tp\": 0}, or a list of pairs");
    json_object_foreach((json_t *)(uintptr_t)value, name, spec) AR_TRY(find_mesh_dim(m, r, "shard", name, &found));
    for (int d = 0; d < m->mesh.ndim; d++)
        if ((spec = json_object_get(value, m->mesh.dim[d].name)) != NULL)
            AR_TRY(add_split(m, r, m->mesh.dim[d].name, spec));
    return AR_OK;
}

static ar_status read_blocks(const ari_map *m, ari_map_rule *r, const json_t *value)
{
    r->straight = json_is_null(value);
    if (r->straight)
        return AR_OK;
    AR_TRY(check_list(m, r, "blocks", value, ARI_MAP_BLOCKS, "sizes, [8, 2, 2], or null"));
    for (; r->blocks < json_array_size(value); r->blocks++) {
        int64_t size = 0;
        AR_TRY(read_int(m, r, "blocks", json_array_get(value, r->blocks), 1, (int64_t)1 << 40, &size));
        r->block[r->blocks] = (size_t)size;
    }
    return AR_OK;
}

static ar_status read_into(const ari_map *m, ari_map_rule *r, const json_t *value)
{
    AR_TRY(check_list(m, r, "into", value, ARI_MAP_BLOCKS, "names, one for each of 'blocks'"));
    for (; r->intos < json_array_size(value); r->intos++) {
        const json_t *name = json_array_get(value, r->intos);
        if (!json_is_string(name) && !json_is_null(name))
            return ari_map_bad(m, r, "key 'into': expected names, or null for a block that is left out");
        r->into[r->intos] = json_string_value(name);
    }
    return AR_OK;
}

static ar_status read_shape(const ari_map *m, ari_map_rule *r, const json_t *value)
{
    AR_TRY(check_list(m, r, "shape", value, AR_ST_MAX_DIMS, "extents, null where any will do"));
    for (; (size_t)r->shape_dims < json_array_size(value); r->shape_dims++) {
        const json_t *extent = json_array_get(value, (size_t)r->shape_dims);
        int64_t x = 0;
        r->shape_given[r->shape_dims] = !json_is_null(extent);
        if (r->shape_given[r->shape_dims])
            AR_TRY(read_int(m, r, "shape", extent, 0, (int64_t)1 << 60, &x));
        r->shape[r->shape_dims] = (size_t)x;
    }
    return AR_OK;
}

static ar_status check_pattern(const ari_map *m, const ari_map_rule *r, const char *key, const char *pattern)
{
    int stars = 0;
    for (const char *cursor = r->match; *cursor != '\0';)
        stars += next_token(&cursor).kind == STAR;
    const char *problem = pattern ? pattern_problem(pattern, stars, 0) : NULL;
    return problem ? ari_map_bad(m, r, "key '%s': '%s' %s", key, ARI_SHOW(pattern), problem) : AR_OK;
}

/* Checks conditions that involve more than one key. */
static ar_status check_rule(const ari_map *m, const ari_map_rule *r)
{
    if (r->intos > 0 && r->intos != r->blocks)
        return ari_map_bad(m, r, "key 'into' has %zu names, 'blocks' has %zu sizes", r->intos, r->blocks);
    if (r->intos > 0 && r->rename)
        return ari_map_bad(m, r, "keys 'rename' and 'into' both name the tensors: give one of them");
    if (r->groups > 0 && r->intos == 0)
        return ari_map_bad(m, r, "key 'groups' tells how blocks alternate, for 'into' to take them apart");
    for (size_t i = 0; i < r->splits; i++)
        if ((r->partial >> r->split[i].mesh & 1u) != 0)
            return ari_map_bad(m, r, "'%s' cannot both divide the tensor and be summed over",
                               m->mesh.dim[r->split[i].mesh].name);
    AR_TRY(check_pattern(m, r, "rename", r->rename));
    for (size_t i = 0; i < r->intos; i++)
        AR_TRY(check_pattern(m, r, "into", r->into[i]));
    return AR_OK;
}

static ar_status read_rule(ari_map *m, ari_map_rule *r, const json_t *object)
{
    static const char *const keys[] = {"match",  "leave", "rename", "shard",   "blocks", "into",
                                       "groups", "dim",   "shape",  "partial", "note"};
    static const struct {
        const char *key;
        ar_status (*read)(const ari_map *, ari_map_rule *, const json_t *);
    } readers[] = {{"shard", read_shard},
                   {"blocks", read_blocks},
                   {"into", read_into},
                   {"shape", read_shape},
                   {"partial", read_partial}};
    const json_t *dim = json_object_get(object, "dim");
    int64_t along = INT_MAX;
    char location[3 * ARI_PRINTABLE];
    if (!json_is_object(object))
        return ari_map_bad(m, r, "expected an object");
    r->match = json_string_value(json_object_get(object, "match"));
    const char *problem =
        r->match ? pattern_problem(r->match, ARI_MAP_STARS, 0) : "is no string, expected a glob of names";
    if (problem)
        return ari_map_bad(m, r, "key 'match': %s", problem);
    AR_TRY(check_keys(m, r, object, keys, COUNT(keys)));
    for (size_t i = 0; i < COUNT(readers); i++)
        if (json_object_get(object, readers[i].key) != NULL)
            AR_TRY(readers[i].read(m, r, json_object_get(object, readers[i].key)));
    snprintf(location, sizeof location, "InvalidMapping: %s: rule %zu ('%s')", m->name, r->number, ARI_SHOW(r->match));
    const ari_json_at path = {object, location, AR_ERR_FORMAT};
    AR_TRY(ari_json_string_or(&path, "rename", &r->rename));
    AR_TRY(ari_json_size_or(&path, "groups", 1, ARI_MAP_BOXES, &r->groups));
    AR_TRY(ari_json_bool_or(&path, "leave", &r->leave));
    if (dim)
        AR_TRY(read_int(m, r, "dim", dim, -AR_ST_MAX_DIMS, AR_ST_MAX_DIMS - 1, &along));
    r->dim = (int)along;
    return check_rule(m, r);
}

/* --- the mesh, and which rank a file is --------------------------------------------------------------------------- */
static ar_status read_mesh(ari_map *m, const json_t *mesh)
{
    m->ranks = 1;
    if (mesh == NULL)
        return AR_OK;
    if (!json_is_array(mesh) || json_array_size(mesh) == 0 || json_array_size(mesh) > AR_MESH_DIMS)
        return ari_map_bad(m, NULL, "key 'mesh': expected 1 to %d dimensions, [[\"dp\", 2], [\"tp\", 4]]",
                           AR_MESH_DIMS);
    for (size_t i = 0; i < json_array_size(mesh); i++) {
        const json_t *dim = json_array_get(mesh, i), *size = json_array_get(dim, 1);
        const char *name = json_string_value(json_array_get(dim, 0));
        if (json_array_size(dim) != 2 || !name || name[0] == '\0' || name_length(name) != strlen(name) ||
            strcmp(name, "rank") == 0)
            return ari_map_bad(m, NULL,
                               "key 'mesh': dimension %zu: expected [\"name\", size], a name of at most %d letters, "
                               "digits and '_', and not 'rank'",
                               i + 1, ARI_MAP_NAME - 1);
        if (ari_mesh_find(&m->mesh, name) >= 0)
            return ari_map_bad(m, NULL, "key 'mesh': '%s' is there twice", name);
        if (!json_is_integer(size) || json_integer_value(size) < 1 ||
            json_integer_value(size) > ARI_MAP_RANKS / m->ranks)
            return ari_map_bad(m, NULL,
                               "key 'mesh': '%s': expected a size, at least 1 and no more than %d ranks in all", name,
                               ARI_MAP_RANKS);
        snprintf(m->mesh.dim[i].name, sizeof m->mesh.dim[i].name, "%s", name);
        m->mesh.dim[i].size = (int)json_integer_value(size);
        m->ranks *= m->mesh.dim[i].size;
        m->mesh.ndim = (int)i + 1;
    }
    return AR_OK;
}

/* Checks that the glob has either {rank} or every mesh dimension with more than one rank. */
static ar_status read_files(ari_map *m, const json_t *files)
{
    unsigned found = 0; /* bit set of the mesh dimensions found; bit AR_MESH_DIMS: {rank} */
    m->files = json_string_value(files);
    if (files == NULL)
        return AR_OK;
    const char *problem = m->files ? pattern_problem(m->files, ARI_MAP_STARS, m->mesh.ndim + 1)
                                   : "is no string, expected \"rank{rank}.safetensors\"";
    if (m->mesh.ndim == 0)
        problem = "needs the 'mesh' that its ranks make, [[\"tp\", 4]]";
    if (problem != NULL)
        return ari_map_bad(m, NULL, "key 'files': %s", problem);
    for (const char *cursor = m->files; *cursor != '\0';) {
        const token t = next_token(&cursor);
        const int d = strcmp(t.name, "rank") == 0 ? AR_MESH_DIMS : ari_mesh_find(&m->mesh, t.name);
        m->depth += t.kind == BYTE && t.byte == '/';
        if (t.kind == NUMBER && (d < 0 || (found >> d & 1u) != 0))
            return ari_map_bad(m, NULL, "key 'files': '{%s}' is %s", t.name,
                               d < 0 ? "neither {rank} nor a dimension of the mesh; '*' stands for anything"
                                     : "there twice");
        if (t.kind == NUMBER) {
            m->number[m->numbers++] = d;
            found |= 1u << d;
        }
    }
    for (int d = 0; d < m->mesh.ndim && found >> AR_MESH_DIMS == 0; d++)
        if (m->mesh.dim[d].size > 1 && (found >> d & 1u) == 0)
            return ari_map_bad(m, NULL, "key 'files': dimension '%s' of the mesh is missing, expected {%s} or {rank}",
                               m->mesh.dim[d].name, m->mesh.dim[d].name);
    return AR_OK;
}

ar_status ari_map_rank_of(const ari_map *m, const char *name, int *rank)
{
    ari_map_match match;
    int coords[AR_MESH_DIMS] = {0};
    *rank = -1;
    if (m->files == NULL || !ari_map_glob_match(m->files, name, &match))
        return AR_OK;
    for (int k = 0; k < m->numbers; k++) {
        const int d = m->number[k], n = d == AR_MESH_DIMS ? m->ranks : m->mesh.dim[d].size;
        if (match.number[k] >= (size_t)n)
            return ari_map_bad(m, NULL, "file '%s' has %s %zu, the mesh has %d of it", ARI_SHOW(name),
                               d == AR_MESH_DIMS ? "rank" : m->mesh.dim[d].name, match.number[k], n);
        if (d == AR_MESH_DIMS)
            *rank = (int)match.number[k];
        else
            coords[d] = (int)match.number[k];
    }
    for (int d = 0, found = 0; d < m->mesh.ndim && *rank < 0; d++) {
        found = found * m->mesh.dim[d].size + coords[d];
        *rank = d + 1 == m->mesh.ndim ? found : -1;
    }
    return AR_OK;
}

/* --- the whole file ----------------------------------------------------------------------------------------------- */
static ar_status read_map(ari_map *m)
{
    static const char *const keys[] = {"version", "mesh", "files", "tensors", "unmatched", "note"};
    if (!json_is_object(m->root))
        return ari_map_bad(m, NULL, "expected an object");
    AR_TRY(check_keys(m, NULL, m->root, keys, COUNT(keys)));
    const json_t *version = json_object_get(m->root, "version"), *rules = json_object_get(m->root, "tensors");
    if (!json_is_integer(version) || json_integer_value(version) != 1)
        return ari_map_bad(m, NULL, "key 'version': expected 1");
    AR_TRY(read_mesh(m, json_object_get(m->root, "mesh")));
    AR_TRY(read_files(m, json_object_get(m->root, "files")));
    const size_t n = json_array_size(rules);
    if (rules && (!json_is_array(rules) || n > MAX_RULES))
        return ari_map_bad(m, NULL, "key 'tensors': expected a list of at most %d rules", MAX_RULES);
    AR_TRY(ARI_TAKE(&m->rule, &m->arena, n, "the rules of a mapping"));
    for (; m->rules < n; m->rules++) {
        m->rule[m->rules] = (ari_map_rule){.number = m->rules + 1};
        AR_TRY(read_rule(m, &m->rule[m->rules], json_array_get(rules, m->rules)));
    }
    const json_t *unmatched = json_object_get(m->root, "unmatched");
    const char *policy = json_is_string(unmatched) ? json_string_value(unmatched) : "";
    m->all_ruled = strcmp(policy, "error") == 0;
    return !unmatched || m->all_ruled || strcmp(policy, "whole") == 0
               ? AR_OK
               : ari_map_bad(m, NULL, "key 'unmatched': expected \"error\" or \"whole\"");
}

ar_status ari_map_parse(ari_map **out, const char *text, size_t length, const char *name)
{
    char called[2 * ARI_PRINTABLE];
    ARI_OWNED_BY(ari_map_free) ari_map *m = NULL;
    if (length > MAX_BYTES)
        return ar_error_set(AR_ERR_OVERFLOW, "%s: has %zu bytes, a mapping has at most %zu", ARI_SHOW(name), length,
                            MAX_BYTES);
    AR_TRY(ARI_ALLOC_ZERO(&m, 1, "a mapping"));
    snprintf(called, sizeof called, "InvalidMapping: %s", name);
    AR_TRY(ari_arena_text(&m->arena, &m->name, name, "a mapping"));
    AR_TRY(ari_json_parse(&m->root, text, length, called));
    AR_TRY(read_map(m));
    ARI_GIVE(out, m);
    return AR_OK;
}

ar_status ari_map_load(ari_map **out, const char *path)
{
    ARI_OWNED unsigned char *text = NULL;
    size_t length = 0;
    AR_TRY(ari_file_read_text(&text, &length, path, MAX_BYTES));
    return ari_map_parse(out, (const char *)text, length, path);
}

void ari_map_free(ari_map *m)
{
    if (m == NULL)
        return;
    json_decref(m->root);
    ari_arena_end(&m->arena, NULL);
    free(m);
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/dump/map.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/io/file.h"
#include "ref/io/json.h"

/* A mapping has some hundred bytes a rule. */
#define MAX_BYTES ((size_t)4 << 20)

/* --- the mesh ----------------------------------------------------------------------------------------------------- */
static bool is_dim_name(const char *name)
{
    const size_t n = name == NULL ? 0 : strlen(name);
    return n > 0 && n < ARI_MAP_NAME && ari_map_name_length(name) == n && strcmp(name, "rank") != 0 &&
           strcmp(name, "index") != 0;
}

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
        if (json_array_size(dim) != 2 || !is_dim_name(name))
            return ari_map_bad(
                m, NULL,
                "key 'mesh': dimension %zu: expected [\"name\", size], a name of at most %d letters, digits and "
                "'_', and not 'rank' or 'index'",
                i + 1, ARI_MAP_NAME - 1);
        if (ar_mesh_find(&m->mesh, name) >= 0)
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

/* --- which rank a file is ----------------------------------------------------------------------------------------- */
/* Either {rank}, or every dimension of the mesh that has more than one rank. */
static ar_status check_files(const ari_map *m)
{
    const bool by_rank = ari_map_number(&m->files, "rank") >= 0;
    if (m->mesh.ndim == 0)
        return ari_map_bad(m, NULL, "key 'files' needs the 'mesh' that its ranks make, [[\"tp\", 4]]");
    for (int i = 0; i < m->files.numbers; i++)
        if (ar_mesh_find(&m->mesh, m->files.name[i]) < 0 && strcmp(m->files.name[i], "rank") != 0)
            return ari_map_bad(
                m, NULL, "key 'files': '{%s}' is neither {rank} nor a dimension of the mesh; '*' stands for anything",
                m->files.name[i]);
    for (int d = 0; d < m->mesh.ndim && !by_rank; d++)
        if (m->mesh.dim[d].size > 1 && ari_map_number(&m->files, m->mesh.dim[d].name) < 0)
            return ari_map_bad(m, NULL, "key 'files': dimension '%s' of the mesh is missing, expected {%s} or {rank}",
                               m->mesh.dim[d].name, m->mesh.dim[d].name);
    return AR_OK;
}

static ar_status read_files(ari_map *m, const json_t *files)
{
    const char *text = json_string_value(files), *problem = NULL;
    if (files == NULL)
        return AR_OK;
    if (text == NULL)
        return ari_map_bad(m, NULL, "key 'files': expected a string, \"rank{rank}.safetensors\"");
    const ar_status st = ari_map_glob_compile(&m->files, &m->arena, text, &problem);
    if (problem != NULL)
        return ari_map_bad(m, NULL, "key 'files': %s", problem);
    AR_TRY(st);
    m->has_files = true;
    for (const char *c = text; *c != '\0'; c++)
        m->depth += *c == '/';
    return check_files(m);
}

ar_status ari_map_rank_of(const ari_map *m, const char *name, int *rank)
{
    ari_map_match match;
    *rank = -1;
    if (!m->has_files || !ari_map_glob_match(&m->files, name, &match))
        return AR_OK;
    const int by_rank = ari_map_number(&m->files, "rank");
    size_t found = 0;
    for (int d = 0; d < m->mesh.ndim; d++) {
        const int k = ari_map_number(&m->files, m->mesh.dim[d].name);
        const size_t at = k < 0 ? 0 : match.number[k];
        if (at >= (size_t)m->mesh.dim[d].size)
            return ari_map_bad(m, NULL, "file '%s' has %s %zu, the mesh has %d of it", ARI_SHOW(name),
                               m->mesh.dim[d].name, at, m->mesh.dim[d].size);
        found = found * (size_t)m->mesh.dim[d].size + at;
    }
    if (by_rank >= 0) {
        const bool alone = m->files.numbers == 1;
        if (match.number[by_rank] >= (size_t)m->ranks || (!alone && match.number[by_rank] != found))
            return ari_map_bad(m, NULL, "file '%s' has rank %zu, the mesh has %d ranks, row-major, outermost first",
                               ARI_SHOW(name), match.number[by_rank], m->ranks);
        found = match.number[by_rank];
    }
    *rank = (int)found;
    return AR_OK;
}

/* --- the whole file ----------------------------------------------------------------------------------------------- */
static ar_status read_rules(ari_map *m, const json_t *rules)
{
    if (rules == NULL)
        return AR_OK;
    const size_t n = json_array_size(rules);
    if (!json_is_array(rules) || n > ARI_MAP_RULES)
        return ari_map_bad(m, NULL, "key 'tensors': expected a list of at most %d rules", ARI_MAP_RULES);
    AR_TRY(ARI_TAKE(&m->rule, &m->arena, n, "the rules of a mapping"));
    for (size_t i = 0; i < n; i++) {
        m->rules = i + 1;
        AR_TRY(ari_map_rule_parse(m, &m->rule[i], i + 1, json_array_get(rules, i)));
    }
    return AR_OK;
}

static ar_status read_unmatched(ari_map *m, const json_t *unmatched)
{
    const char *text = json_string_value(unmatched);
    if (unmatched == NULL)
        return AR_OK;
    if (text == NULL || (strcmp(text, "error") != 0 && strcmp(text, "whole") != 0))
        return ari_map_bad(m, NULL, "key 'unmatched': expected \"error\" or \"whole\"");
    m->all_ruled = strcmp(text, "error") == 0;
    return AR_OK;
}

static ar_status read_map(ari_map *m)
{
    static const char *const keys[] = {"version", "mesh", "files", "tensors", "unmatched", "note"};
    if (!json_is_object(m->root))
        return ari_map_bad(m, NULL, "expected an object");
    AR_TRY(ari_map_check_keys(m, NULL, m->root, keys, sizeof keys / sizeof keys[0]));
    const json_t *version = json_object_get(m->root, "version");
    if (!json_is_integer(version) || json_integer_value(version) != 1)
        return ari_map_bad(m, NULL, "key 'version': expected 1");
    AR_TRY(read_mesh(m, json_object_get(m->root, "mesh")));
    AR_TRY(read_files(m, json_object_get(m->root, "files")));
    AR_TRY(read_rules(m, json_object_get(m->root, "tensors")));
    return read_unmatched(m, json_object_get(m->root, "unmatched"));
}

ar_status ari_map_parse(ari_map **gives, const char *text, size_t length, const char *name)
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
    ARI_GIVE(gives, m);
    return AR_OK;
}

ar_status ari_map_load(ari_map **gives, const char *path)
{
    ARI_OWNED unsigned char *text = NULL;
    size_t length = 0;
    AR_TRY(ari_file_read_text(&text, &length, path, MAX_BYTES));
    return ari_map_parse(gives, (const char *)text, length, path);
}

void ari_map_free(ari_map *m)
{
    if (m == NULL)
        return;
    json_decref(m->root);
    ari_arena_end(&m->arena, NULL);
    free(m);
}

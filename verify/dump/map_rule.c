/* SPDX-License-Identifier: Apache-2.0 */
#include <limits.h>
#include <string.h>

#include "ref/core/text.h"
#include "ref/io/json.h"
#include "verify/dump/map.h"

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

ar_status ari_map_check_keys(const ari_map *m, const ari_map_rule *r, const json_t *object, const char *const *keys,
                             size_t n)
{
    const char *key = ari_json_unknown_key(object, keys, n);
    if (!key)
        return AR_OK;
    const char *nearest = ari_nearest(key, keys, n);
    char known[200] = "";
    ari_text list = ari_text_in(known, sizeof known);
    for (size_t i = 0; i < n; i++)
        ari_say(&list, "%s%s", i > 0 ? ", " : "", keys[i]);
    return nearest ? ari_map_bad(m, r, "unknown key '%s', did you mean '%s'?", ARI_SHOW(key), nearest)
                   : ari_map_bad(m, r, "unknown key '%s'; known are %s", ARI_SHOW(key), known);
}

/* --- values ------------------------------------------------------------------------------------------------------- */
static ar_status read_int(const ari_map *m, const ari_map_rule *r, const char *key, const json_t *value, int64_t min,
                          int64_t max, int64_t *out)
{
    if (!json_is_integer(value) || json_integer_value(value) < min || json_integer_value(value) > max)
        return ari_map_bad(m, r, "key '%s': expected an integer from %lld to %lld", key, (long long)min,
                           (long long)max);
    *out = json_integer_value(value);
    return AR_OK;
}

static ar_status read_bool(const ari_map *m, const ari_map_rule *r, const char *key, const json_t *value, bool *out)
{
    if (!json_is_boolean(value))
        return ari_map_bad(m, r, "key '%s': expected true or false", key);
    *out = json_is_true(value);
    return AR_OK;
}

static ar_status read_dim(const ari_map *m, const ari_map_rule *r, const char *key, const json_t *value, int *out)
{
    int64_t dim = 0;
    AR_TRY(read_int(m, r, key, value, -AR_ST_MAX_DIMS, AR_ST_MAX_DIMS - 1, &dim));
    *out = (int)dim;
    return AR_OK;
}

static ar_status read_mesh_dim(const ari_map *m, const ari_map_rule *r, const char *key, const char *name, int *out)
{
    *out = name == NULL ? -1 : ar_mesh_find(&m->mesh, name);
    if (*out < 0)
        return ari_map_bad(m, r, "key '%s': '%s' is no dimension of the mesh", key,
                           name == NULL ? "(no string)" : ARI_SHOW(name));
    return AR_OK;
}

/* --- which ranks -------------------------------------------------------------------------------------------------- */
static ar_status read_at(const ari_map *m, ari_map_rule *r, const json_t *value)
{
    const char *name;
    json_t *list;
    if (!json_is_object(value))
        return ari_map_bad(m, r, "key 'at': expected an object, {\"pp\": 0} or {\"pp\": [0, 1]}");
    json_object_foreach((json_t *)(uintptr_t)value, name, list)
    {
        int d = 0;
        int64_t ignored = 0;
        AR_TRY(read_mesh_dim(m, r, "at", name, &d));
        const int64_t last = m->mesh.dim[d].size - 1;
        if (!json_is_array(list))
            AR_TRY(read_int(m, r, "at", list, 0, last, &ignored));
        for (size_t i = 0; i < json_array_size(list); i++)
            AR_TRY(read_int(m, r, "at", json_array_get(list, i), 0, last, &ignored));
        r->at[d] = true;
        r->at_list[d] = list;
    }
    return AR_OK;
}

static ar_status read_partial(const ari_map *m, ari_map_rule *r, const json_t *value)
{
    const bool one = json_is_string(value);
    if (!one && !json_is_array(value))
        return ari_map_bad(m, r, "key 'partial': expected a dimension of the mesh, or a list of them");
    for (size_t i = 0; i < (one ? 1 : json_array_size(value)); i++) {
        int d = 0;
        AR_TRY(read_mesh_dim(m, r, "partial", json_string_value(one ? value : json_array_get(value, i)), &d));
        r->partial |= 1u << d;
    }
    return AR_OK;
}

/* --- splits ------------------------------------------------------------------------------------------------------- */
static ar_status add_split(const ari_map *m, ari_map_rule *r, const char *name, const json_t *how)
{
    static const char *const keys[] = {"dim", "zigzag"};
    ari_map_split s = {0};
    AR_TRY(read_mesh_dim(m, r, "shard", name, &s.mesh));
    for (size_t i = 0; i < r->splits; i++)
        if (r->split[i].mesh == s.mesh)
            return ari_map_bad(m, r, "key 'shard': '%s' is there twice", m->mesh.dim[s.mesh].name);
    if (json_is_object(how)) {
        AR_TRY(ari_map_check_keys(m, r, how, keys, COUNT(keys)));
        AR_TRY(read_dim(m, r, "shard", json_object_get(how, "dim"), &s.dim));
        if (json_object_get(how, "zigzag") != NULL)
            AR_TRY(read_bool(m, r, "shard", json_object_get(how, "zigzag"), &s.zigzag));
    } else {
        AR_TRY(read_dim(m, r, "shard", how, &s.dim));
    }
    r->split[r->splits++] = s; /* as many at most as the mesh has dimensions: none is there twice */
    return AR_OK;
}

/* {"tp": 0, "dp": 1}, the mesh's outermost dimension dividing first; or [["tp", 0], ["dp", 0]], in this order. */
static ar_status read_shard(const ari_map *m, ari_map_rule *r, const json_t *value)
{
    const char *name;
    json_t *how;
    if (json_is_array(value)) {
        for (size_t i = 0; i < json_array_size(value); i++) {
            const json_t *pair = json_array_get(value, i);
            if (!json_is_array(pair) || json_array_size(pair) != 2)
                return ari_map_bad(m, r, "key 'shard': expected pairs, [[\"tp\", 0], [\"dp\", 0]]");
            AR_TRY(add_split(m, r, json_string_value(json_array_get(pair, 0)), json_array_get(pair, 1)));
        }
        return AR_OK;
    }
    if (!json_is_object(value))
        return ari_map_bad(m, r, "key 'shard': expected an object, {\"tp\": 0}, or a list of pairs");
    json_object_foreach((json_t *)(uintptr_t)value, name, how)
    {
        int d = 0;
        AR_TRY(read_mesh_dim(m, r, "shard", name, &d));
    }
    for (int d = 0; d < m->mesh.ndim; d++)
        if ((how = json_object_get(value, m->mesh.dim[d].name)) != NULL)
            AR_TRY(add_split(m, r, m->mesh.dim[d].name, how));
    return AR_OK;
}

/* --- packed tensors ----------------------------------------------------------------------------------------------- */
static ar_status read_blocks(const ari_map *m, ari_map_rule *r, const json_t *value)
{
    const size_t n = json_array_size(value);
    r->straight = json_is_null(value);
    if (r->straight)
        return AR_OK;
    if (!json_is_array(value) || n == 0 || n > ARI_MAP_BLOCKS)
        return ari_map_bad(m, r, "key 'blocks': expected a list of 1 to %d sizes, [8, 2, 2], or null", ARI_MAP_BLOCKS);
    for (size_t i = 0; i < n; i++) {
        int64_t size = 0;
        AR_TRY(read_int(m, r, "blocks", json_array_get(value, i), 1, (int64_t)1 << 40, &size));
        r->block[i] = (size_t)size;
    }
    r->blocks = n;
    return AR_OK;
}

static ar_status read_into(const ari_map *m, ari_map_rule *r, const json_t *value)
{
    const size_t n = json_array_size(value);
    if (!json_is_array(value) || n == 0 || n > ARI_MAP_BLOCKS)
        return ari_map_bad(m, r, "key 'into': expected a list of names, one for each of 'blocks'");
    for (size_t i = 0; i < n; i++) {
        const json_t *name = json_array_get(value, i);
        if (!json_is_string(name) && !json_is_null(name))
            return ari_map_bad(m, r, "key 'into': expected names, or null for a block that is left out");
        r->into[i] = json_string_value(name);
    }
    r->intos = n;
    return AR_OK;
}

static ar_status read_shape(const ari_map *m, ari_map_rule *r, const json_t *value)
{
    const size_t n = json_array_size(value);
    if (!json_is_array(value) || n == 0 || n > AR_ST_MAX_DIMS)
        return ari_map_bad(m, r, "key 'shape': expected a list of 1 to %d extents, null where any will do",
                           AR_ST_MAX_DIMS);
    for (size_t i = 0; i < n; i++) {
        const json_t *extent = json_array_get(value, i);
        int64_t x = 0;
        if (json_is_null(extent))
            continue;
        AR_TRY(read_int(m, r, "shape", extent, 0, (int64_t)1 << 60, &x));
        r->shape[i] = (size_t)x;
        r->shape_given[i] = true;
    }
    r->shape_dims = (int)n;
    return AR_OK;
}

static ar_status read_permute(const ari_map *m, ari_map_rule *r, const json_t *value)
{
    const size_t n = json_array_size(value);
    bool seen[AR_ST_MAX_DIMS] = {false};
    if (!json_is_array(value) || n == 0 || n > AR_ST_MAX_DIMS)
        return ari_map_bad(m, r, "key 'permute': expected a list of 1 to %d dimensions", AR_ST_MAX_DIMS);
    for (size_t i = 0; i < n; i++) {
        int64_t d = 0;
        AR_TRY(read_int(m, r, "permute", json_array_get(value, i), 0, (int64_t)n - 1, &d));
        if (seen[d])
            return ari_map_bad(m, r, "key 'permute': dimension %lld is there twice", (long long)d);
        seen[d] = true;
        r->permute[i] = (int)d;
    }
    r->permuted = (int)n;
    return AR_OK;
}

/* --- the rule ----------------------------------------------------------------------------------------------------- */
static ar_status check_pattern(const ari_map *m, const ari_map_rule *r, const char *key, const char *pattern)
{
    const ari_map_place none = {.m = m, .r = r};
    const char *problem = NULL;
    const ar_status st = ari_map_fill(NULL, pattern, &none, 0, &problem);
    return problem == NULL ? st : ari_map_bad(m, r, "key '%s': '%s' %s", key, ARI_SHOW(pattern), problem);
}

static ar_status check_patterns(const ari_map *m, const ari_map_rule *r)
{
    if (r->rename != NULL)
        AR_TRY(check_pattern(m, r, "rename", r->rename));
    if (r->unstack != NULL)
        AR_TRY(check_pattern(m, r, "unstack", r->unstack));
    for (size_t i = 0; i < r->intos; i++)
        if (r->into[i] != NULL)
            AR_TRY(check_pattern(m, r, "into", r->into[i]));
    return AR_OK;
}

/* Checks that involve more than one key. */
static ar_status check_rule(const ari_map *m, const ari_map_rule *r)
{
    if (r->intos > 0 && r->intos != r->blocks)
        return ari_map_bad(m, r, "key 'into' has %zu names, 'blocks' has %zu sizes", r->intos, r->blocks);
    if ((r->intos > 0) + (r->unstack != NULL) + (r->rename != NULL) > 1)
        return ari_map_bad(m, r, "keys 'rename', 'into' and 'unstack' each name the tensors: give one of them");
    if (r->unstack != NULL && r->blocks > 0)
        return ari_map_bad(m, r, "keys 'unstack' and 'blocks' take a tensor apart in two ways: give one of them");
    if (r->groups > 0 && r->intos == 0)
        return ari_map_bad(m, r, "key 'groups' tells how blocks alternate, for 'into' to take them apart");
    if (r->unit > 0 && r->blocks == 0)
        return ari_map_bad(m, r, "key 'unit' is what 'blocks' are counted in, which are missing");
    if (r->transpose && r->permuted > 0)
        return ari_map_bad(m, r, "keys 'transpose' and 'permute': give one of them");
    for (size_t i = 0; i < r->splits; i++)
        if ((r->partial >> r->split[i].mesh & 1u) != 0)
            return ari_map_bad(m, r, "'%s' cannot both divide the tensor and be summed over",
                               m->mesh.dim[r->split[i].mesh].name);
    return check_patterns(m, r);
}

static ar_status read_string(const ari_map *m, const ari_map_rule *r, const char *key, const json_t *value,
                             const char **out)
{
    if (value != NULL && !json_is_string(value))
        return ari_map_bad(m, r, "key '%s': expected a string", key);
    *out = json_string_value(value);
    return AR_OK;
}

static ar_status read_size(const ari_map *m, const ari_map_rule *r, const char *key, const json_t *object, int64_t max,
                           size_t *out)
{
    int64_t n = 0;
    if (json_object_get(object, key) != NULL)
        AR_TRY(read_int(m, r, key, json_object_get(object, key), 1, max, &n));
    *out = (size_t)n;
    return AR_OK;
}

static ar_status read_flag(const ari_map *m, const ari_map_rule *r, const char *key, const json_t *object, bool *out)
{
    const json_t *value = json_object_get(object, key);
    return value == NULL ? AR_OK : read_bool(m, r, key, value, out);
}

static ar_status read_match(ari_map *m, ari_map_rule *r, const json_t *object)
{
    const char *problem = NULL;
    AR_TRY(read_string(m, r, "match", json_object_get(object, "match"), &r->match));
    if (r->match == NULL)
        return ari_map_bad(m, r, "key 'match' is missing, expected a glob of names");
    const ar_status st = ari_map_glob_compile(&r->glob, &m->arena, r->match, &problem);
    return problem == NULL ? st : ari_map_bad(m, r, "key 'match': %s", problem);
}

ar_status ari_map_rule_parse(ari_map *m, ari_map_rule *r, size_t number, const json_t *object)
{
    static const char *const keys[] = {"match",   "at",      "leave", "rename",    "shard",  "blocks",
                                       "into",    "unit",    "dim",   "note",      "groups", "per_block",
                                       "unstack", "partial", "shape", "transpose", "permute"};
    static const struct {
        const char *key;
        ar_status (*read)(const ari_map *, ari_map_rule *, const json_t *);
    } readers[] = {{"at", read_at},       {"shard", read_shard},     {"blocks", read_blocks},  {"into", read_into},
                   {"shape", read_shape}, {"permute", read_permute}, {"partial", read_partial}};
    r->number = number;
    r->dim = INT_MAX;
    r->per_block = true;
    if (!json_is_object(object))
        return ari_map_bad(m, r, "expected an object");
    AR_TRY(read_match(m, r, object));
    AR_TRY(ari_map_check_keys(m, r, object, keys, COUNT(keys)));
    for (size_t i = 0; i < COUNT(readers); i++)
        if (json_object_get(object, readers[i].key) != NULL)
            AR_TRY(readers[i].read(m, r, json_object_get(object, readers[i].key)));
    AR_TRY(read_string(m, r, "rename", json_object_get(object, "rename"), &r->rename));
    AR_TRY(read_string(m, r, "unstack", json_object_get(object, "unstack"), &r->unstack));
    AR_TRY(read_size(m, r, "unit", object, (int64_t)1 << 40, &r->unit));
    AR_TRY(read_size(m, r, "groups", object, ARI_MAP_BOXES, &r->groups));
    AR_TRY(read_flag(m, r, "leave", object, &r->leave));
    AR_TRY(read_flag(m, r, "per_block", object, &r->per_block));
    AR_TRY(read_flag(m, r, "transpose", object, &r->transpose));
    if (json_object_get(object, "dim") != NULL)
        AR_TRY(read_dim(m, r, "dim", json_object_get(object, "dim"), &r->dim));
    return check_rule(m, r);
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Classes of a run's modules, as its capture recorded them in model.json (docs/guide/pytorch.md). */
#include <ctype.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "ref/io/file.h"
#include "ref/io/json.h"
#include "verify/read/modules.h"

/* Returns true if a path of n bytes is among the paths of a folded text: "layers.{0-31}.norm" stands for 32 paths. */
static bool is_folded_in(const char *text, const char *path, size_t n)
{
    const char *const end = path + n;
    while (*text) {
        char *rest = NULL;
        if (*text != '{') {
            if (path == end || *text++ != *path++)
                return false;
            continue;
        }
        const unsigned long long low = strtoull(text + 1, &rest, 10);
        const unsigned long long high = *rest == '-' ? strtoull(rest + 1, &rest, 10) : low;
        if (*rest != '}' || path == end || !isdigit((unsigned char)*path))
            return false;
        unsigned long long number = 0;
        for (; path < end && isdigit((unsigned char)*path) && number <= high; path++)
            number = 10 * number + (unsigned long long)(*path - '0');
        if (number < low || number > high)
            return false;
        text = rest + 1;
    }
    return path == end;
}

/* Loads the file; *out is NULL if it does not exist or has another format, since then no classes are recorded. */
static ar_status load(json_t **out, const char *path, ari_arena *arena)
{
    const char *slash = strrchr(path, '/');
    char *folder = NULL, *file = NULL;
    bool exists = false;
    AR_TRY(ari_arena_text(arena, &folder, path, "the path of a dump"));
    if (!ari_is_folder(path))
        folder[slash ? (size_t)(slash - path) : 0] = '\0';
    AR_TRY(ari_file_is_in(&exists, folder[0] ? folder : ".", "model.json"));
    if (!exists)
        return AR_OK;
    AR_TRY(ari_arena_path(arena, &file, folder, "model.json"));
    const ar_status st = ari_json_load(out, file);
    if (st != AR_OK && st != AR_ERR_MEMORY)
        ar_error_clear();
    return st == AR_ERR_MEMORY ? st : AR_OK;
}

ar_status ari_module_classes_read(ari_module_classes *classes, const ar_dump *dump, ari_arena *arena)
{
    json_t *recorded = NULL;
    ar_status st = load(&recorded, ar_dump_path(dump), arena);
    const json_t *modules = json_object_get(recorded, "modules"), *module, *path;
    size_t i, k, n = 0;
    json_array_foreach((json_t *)(uintptr_t)modules, i, module) n += json_array_size(json_object_get(module, "paths"));
    if (st == AR_OK)
        st = ARI_TAKE(&classes->list, arena, n, "classes of modules");
    json_array_foreach((json_t *)(uintptr_t)modules, i, module)
    {
        const char *name = json_string_value(json_object_get(module, "class"));
        json_array_foreach(json_object_get(module, "paths"), k, path)
        {
            ari_module_class *c = st == AR_OK ? &classes->list[classes->n] : NULL;
            if (!c || !name || !json_is_string(path))
                continue;
            st = ari_arena_text(arena, &c->path, json_string_value(path), "classes of modules");
            if (st == AR_OK)
                st = ari_arena_text(arena, &c->name, name, "classes of modules");
            classes->n += st == AR_OK;
        }
    }
    json_decref(recorded);
    return st;
}

const char *ari_module_class_of(const ari_module_classes *classes, const char *path, size_t n)
{
    for (size_t i = 0; i < classes->n; i++) {
        if (is_folded_in(classes->list[i].path, path, n))
            return classes->list[i].name;
    }
    return NULL;
}

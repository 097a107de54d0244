/* SPDX-License-Identifier: Apache-2.0 */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "anyrank/config.h"
#include "ref/core/os/os.h"
#include "ref/core/text.h"
#include "ref/io/config_private.h"
#include "ref/io/file.h"

/* Bundled models and text: their location and names. */

/* All five come from CMakeLists.txt: the source tree's data, the build tree, the installed data as an absolute path,
 * and, relative to the command's folder, the installed data and the data of a build tree's sources. */
#if !defined(ANYRANK_SOURCE_DATA) || !defined(ANYRANK_BUILD_TREE) || !defined(ANYRANK_INSTALLED_DATA) || \
    !defined(ANYRANK_DATA_FROM_COMMAND) || !defined(ANYRANK_DATA_FROM_BUILD)
#error "the folders of the bundled models are to be defined"
#endif
static const char *const from_command[] = {ANYRANK_DATA_FROM_COMMAND, ANYRANK_DATA_FROM_BUILD};
enum { BESIDE = sizeof from_command / sizeof *from_command };

/* the folder next to the running program; not a constant, because an installation may be moved */
static _Thread_local char bundled[PATH_MAX];

/* Returns true if the folder contains the text, which every data directory has. */
static bool has_data(const char *folder)
{
    char text[PATH_MAX];
    const int n = snprintf(text, sizeof text, "%s/text.txt", folder);
    return n > 0 && (size_t)n < sizeof text && access(text, R_OK) == 0;
}

static bool is_below(const char *path, const char *folder)
{
    const size_t n = strlen(folder);
    return strncmp(path, folder, n) == 0 && path[n] == '/';
}

/* Returns candidate folder `i` relative to `program`, the running program's folder. */
static const char *bundled_path(const char *program, size_t i)
{
    const int n = snprintf(bundled, sizeof bundled, "%s/%s", program, from_command[i]);
    return n > 0 && (size_t)n < sizeof bundled ? bundled : "";
}

/* Returns the data that came with this program or library. */
static const char *own_data_dir(void)
{
    char program[PATH_MAX];
    if (!ari_program_path(program, sizeof program))
        return has_data(ANYRANK_INSTALLED_DATA) ? ANYRANK_INSTALLED_DATA : ANYRANK_SOURCE_DATA;
    if (is_below(program, ANYRANK_BUILD_TREE) && has_data(ANYRANK_SOURCE_DATA))
        return ANYRANK_SOURCE_DATA;
    *strrchr(program, '/') = '\0';
    for (size_t i = 0; i < BESIDE; i++) {
        /* "/usr/share/anyrank" reads better than "/usr/bin/../share/anyrank". */
        if (has_data(bundled_path(program, i)))
            return realpath(bundled, program) != NULL ? memcpy(bundled, program, strlen(program) + 1) : bundled;
    }
    return ANYRANK_INSTALLED_DATA;
}

const char *ari_data_dir(void)
{
    const char *set = getenv("ANYRANK_DATA");
    return set != NULL && set[0] != '\0' ? set : own_data_dir();
}

bool ari_package_path(char *path, size_t cap, const char *file)
{
    /* relative paths in the sources, in an installation, and in a wheel */
    static const char *const from_data[] = {"../../python/anyrank", "python/anyrank", "../.."};
    char joined[PATH_MAX];
    for (size_t i = 0; i < sizeof from_data / sizeof *from_data; i++) {
        const int n = snprintf(joined, sizeof joined, "%s/%s/%s", own_data_dir(), from_data[i], file);
        char *real = n > 0 && (size_t)n < sizeof joined ? realpath(joined, NULL) : NULL;
        const bool found = real != NULL && (size_t)snprintf(path, cap, "%s", real) < cap;
        free(real);
        if (found)
            return true;
    }
    return false;
}

ar_status ari_data_dir_check(void)
{
    const char *folder = ari_data_dir(), *set = getenv("ANYRANK_DATA");
    char program[PATH_MAX], text[1024];
    ari_text tried = ari_text_in(text, sizeof text);
    if (has_data(folder))
        return AR_OK;
    const bool has_program = !(set != NULL && set[0] != '\0') && ari_program_path(program, sizeof program);
    if (has_program)
        *strrchr(program, '/') = '\0';
    ari_say(&tried, "'%s'", ARI_SHOW(folder));
    for (size_t i = 0; has_program && i < BESIDE; i++)
        ari_say(&tried, ", '%s'", ARI_SHOW(bundled_path(program, i)));
    return ar_error_set(AR_ERR_NOT_FOUND, "no data directory: there is no text.txt in %s (ANYRANK_DATA names another)",
                        text);
}

/* --- models and text ---------------------------------------------------------------------------------------------- */

const char *const ari_model_names[] = {
    "llama-demo",    "gpt2-demo",    "stack-demo", "mixtral-demo",  "qwen2-moe-demo",  "glm4-moe-demo",
    "deepseek-demo", "gpt-oss-demo", "mtp-demo",   "llama-3-8b",    "llama-3-70b",     "llama-3.1-405b",
    "qwen2.5-7b",    "qwen3-8b",     "gemma-2-9b", "phi-3-mini-4k", "gpt-22b",         "gpt3-175b",
    "gpt-530b",      "gpt-1t",       "stack-4.8b", "mixtral-8x22b", "qwen3-235b-a22b", "deepseek-v3",
    "gpt-oss-20b",   "gpt-oss-120b", NULL};
#define BUNDLED (sizeof ari_model_names / sizeof ari_model_names[0] - 1)

static ar_status put_path(char *out, size_t cap, const char *folder, const char *name)
{
    const int n = snprintf(out, cap, "%s%s%s", folder, folder[0] == '\0' ? "" : "/", name);
    if (n < 0 || (size_t)n >= cap)
        return ar_error_set(AR_ERR_ARG, "model '%s': its path does not fit in %zu bytes", ARI_SHOW(name), cap);
    return AR_OK;
}

ar_status ar_model_path(char *out, size_t cap, const char *model)
{
    struct stat info;
    if (out == NULL || cap == 0 || model == NULL || model[0] == '\0')
        return ar_error_set(AR_ERR_ARG, "the model's name is missing");
    if (stat(model, &info) == 0)
        return put_path(out, cap, "", model);
    for (size_t i = 0; i < BUNDLED; i++) {
        if (strcmp(model, ari_model_names[i]) != 0)
            continue;
        AR_TRY(put_path(out, cap, ari_data_dir(), model));
        if (stat(out, &info) == 0)
            return AR_OK;
        AR_TRY(ari_data_dir_check());
        return ar_error_set(AR_ERR_NOT_FOUND,
                            "model '%s' is bundled but not in the data directory '%s' (ANYRANK_DATA sets another)",
                            model, ARI_SHOW(ari_data_dir()));
    }
    const char *near = ari_nearest(model, ari_model_names, BUNDLED);
    char names[512];
    ari_text list = ari_plain_text_in(names, sizeof names);
    for (size_t i = 0; i < BUNDLED; i++)
        ari_say(&list, "%s%s", i ? ", " : "", ari_model_names[i]);
    return ar_error_set(AR_ERR_NOT_FOUND, "model '%s': no such folder or file; bundled models are %s%s%s%s",
                        ARI_SHOW(model), names, near == NULL ? "" : "; did you mean '", near == NULL ? "" : near,
                        near == NULL ? "" : "'?");
}

#define MAX_TEXT_BYTES ((size_t)1 << 32)

ar_status ari_text_load(unsigned char **out, size_t *length, const char *path)
{
    ARI_OWNED char *default_path = NULL;
    if (path == NULL)
        AR_TRY(ari_data_dir_check());
    if (path == NULL && asprintf(&default_path, "%s/text.txt", ari_data_dir()) < 0)
        return ar_error_set(AR_ERR_MEMORY, "text.txt: no memory for its path");
    const char *name = path == NULL ? default_path : path;
    ARI_OWNED unsigned char *text = NULL;
    size_t bytes = 0;
    AR_TRY(ari_file_read_text(&text, &bytes, name, MAX_TEXT_BYTES));
    if (bytes == 0)
        return ar_error_set(AR_ERR_DATA, "%s: is empty, expected text", ARI_SHOW(name));
    ARI_GIVE(out, text);
    *length = bytes;
    return AR_OK;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu/library.h"

#include <dlfcn.h>
#include <glob.h>
#include <limits.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ref/core/text.h"

/* Folders in which others install libraries; $NAME at the beginning is an environment variable. A toolkit has libraries
 * in one of `below_toolkit`; a Python has packages, NVIDIA's or PyTorch's with copies of them, in `below_python`. */
static const char *const toolkits[] = {"$CUDA_HOME",      "$CUDA_PATH",        "$NCCL_HOME",
                                       "/usr/local/cuda", "/usr/local/cuda-*", "/opt/cuda"};
static const char *const pythons[] = {"$VIRTUAL_ENV", "$CONDA_PREFIX", "$HOME/.local", "$HOME/.pyenv/versions/*",
                                      "/usr/local",   "/usr",          "/opt/conda"};
static const char below_toolkit[] = "{lib64,lib,targets/*/lib}";
static const char below_python[] = "{lib,local/lib}/python3*/{site,dist}-packages/{nvidia/*,torch}/lib";
#define COUNT(list) (sizeof(list) / sizeof *(list))

typedef struct search {
    const ari_library *which;
    void *library;     /* NULL until a library has been loaded */
    char why[300];     /* the loader's message about the last file, or otherwise the first name, that could not be
                          loaded */
    char places[2048]; /* the searched folders, each once, for the message */
    ari_text list;
} search;

/* True if a folder is in the comma-separated list. */
static bool is_listed(const search *s, const char *base)
{
    const size_t length = strlen(base);
    for (const char *match = strstr(s->places, base); match; match = strstr(match + 1, base)) {
        if ((match == s->places || match[-1] == ' ') && (match[length] == ',' || match[length] == '\0'))
            return true;
    }
    return false;
}

static void load(search *s, const char *file)
{
    if (s->library)
        return;
    s->library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    const char *why = s->library ? NULL : dlerror();
    if (why && (file[0] == '/' || !s->why[0]))
        snprintf(s->why, sizeof s->why, "%s", why);
}

/* Tries the library's names in the folders below `base`. */
static void look_below(search *s, const char *base, const char *below)
{
    for (size_t i = 0; i < COUNT(s->which->files) && s->which->files[i] && !s->library; i++) {
        char pattern[PATH_MAX];
        glob_t found;
        const int n = snprintf(pattern, sizeof pattern, "%s/%s/%s", base, below, s->which->files[i]);
        if (n < 0 || (size_t)n >= sizeof pattern || glob(pattern, GLOB_BRACE, NULL, &found) != 0)
            continue;
        for (size_t k = 0; k < found.gl_pathc; k++)
            load(s, found.gl_pathv[k]);
        globfree(&found);
    }
    if (!is_listed(s, base))
        ari_say(&s->list, "%s%s", s->list.used ? ", " : "", base);
}

/* Looks below a place that a variable names; an unset variable is not a place. */
static void look_in(search *s, const char *place, const char *below)
{
    char name[32], base[PATH_MAX];
    const size_t length = strcspn(place, "/");
    if (place[0] != '$') {
        look_below(s, place, below);
        return;
    }
    snprintf(name, sizeof name, "%.*s", (int)length - 1, place + 1);
    const char *value = getenv(name);
    if (!value || value[0] != '/')
        return;
    const int n = snprintf(base, sizeof base, "%s%s", value, place + length);
    if (n > 0 && (size_t)n < sizeof base)
        look_below(s, base, below);
}

/* Removes "/bin/python3" from the end. Returns false if nothing is left. */
static bool cut_to_prefix(char *path)
{
    for (int i = 0; i < 2; i++) {
        char *slash = strrchr(path, '/');
        if (!slash)
            return false;
        *slash = '\0';
    }
    return path[0] != '\0';
}

/* Looks in the packages of the python3 that the shell would start, and of the one that it links to. */
static void look_in_python(search *s)
{
    const char *path = getenv("PATH");
    char link_path[PATH_MAX], real[PATH_MAX];
    for (size_t n; path && path[0] && !s->library; path += n + (path[n] == ':')) {
        n = strcspn(path, ":");
        const int length = snprintf(link_path, sizeof link_path, "%.*s/python3", (int)n, path);
        if (length < 0 || (size_t)length >= sizeof link_path || link_path[0] != '/' || access(link_path, X_OK) != 0)
            continue;
        const bool resolved = realpath(link_path, real) != NULL;
        if (cut_to_prefix(link_path))
            look_below(s, link_path, below_python);
        if (resolved && cut_to_prefix(real) && strcmp(real, link_path) != 0)
            look_below(s, real, below_python);
        return;
    }
}

ar_status ari_library_open(void **out, const ari_library *which)
{
    const char *named = getenv(which->variable);
    search s = {.which = which};
    s.list = ari_text_in(s.places, sizeof s.places);
    *out = NULL;
    if (named && named[0]) {
        load(&s, named);
        *out = s.library;
        return s.library ? AR_OK
                         : ar_error_set(AR_ERR_UNSUPPORTED, "%s cannot be loaded: %s: %s names it", which->name, s.why,
                                        which->variable);
    }
    if (which->built_with && access(which->built_with, R_OK) == 0)
        load(&s, which->built_with);
    for (size_t i = 0; i < COUNT(which->files) && which->files[i]; i++)
        load(&s, which->files[i]);
    for (size_t i = 0; i < COUNT(toolkits); i++)
        look_in(&s, toolkits[i], below_toolkit);
    look_in_python(&s);
    for (size_t i = 0; i < COUNT(pythons); i++)
        look_in(&s, pythons[i], below_python);
    *out = s.library;
    if (s.library)
        return AR_OK;
    return ar_error_set(AR_ERR_UNSUPPORTED,
                        "%s cannot be loaded: %s; looked for %s where the loader does, and in the libraries and Python "
                        "packages of %s: install %s, or name the file by %s",
                        which->name, s.why, which->files[0], s.places, which->package, which->variable);
}

/* ISO C has no cast from an object pointer to a function pointer; POSIX specifies this form. */
bool ari_library_find(void *library, const char *name, void *slot)
{
    void *symbol = dlsym(library, name);
    memcpy(slot, &symbol, sizeof symbol);
    return symbol != NULL;
}

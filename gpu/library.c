/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu/library.h"

#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

void *ari_library_load(const char *const *names)
{
    void *library = NULL;
    for (; *names && !library; names++)
        library = dlopen(*names, RTLD_NOW | RTLD_LOCAL);
    return library;
}

/* ISO C has no cast from an object's pointer to a function's; POSIX says that this is how it is done. */
bool ari_library_find(void *library, const char *name, void *slot)
{
    void *symbol = dlsym(library, name);
    memcpy(slot, &symbol, sizeof symbol);
    return symbol != NULL;
}

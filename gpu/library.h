/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_GPU_LIBRARY_H
#define ARI_GPU_LIBRARY_H

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Shared libraries that are loaded when they are first needed, so that a command that needs none of them neither waits
 * for them nor asks that they are there. They stay loaded. */

/** The first of these that can be loaded: names to be searched for, or paths; NULL ends them. NULL: none can, and
 *  dlerror() says why the last one cannot. */
void *ari_library_load(const char *const *names);
/** *slot, a pointer to a function = the function of that name. False: there is none, and *slot is NULL. */
bool ari_library_find(void *library, const char *name, void *slot);

#ifdef __cplusplus
}
#endif
#endif

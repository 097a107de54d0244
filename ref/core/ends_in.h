/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CORE_ENDS_IN_H
#define ARI_CORE_ENDS_IN_H

#include <stdbool.h>
#include <string.h>

/** Whether a name ends in `end`, ".safetensors" or the like. */
static inline bool ari_ends_in(const char *name, const char *end)
{
    const size_t n = strlen(name), m = strlen(end);
    return n >= m && strcmp(name + (n - m), end) == 0;
}

#endif

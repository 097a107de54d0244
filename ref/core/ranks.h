/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CORE_RANKS_H
#define ARI_CORE_RANKS_H

#include <stddef.h>

/** "0-3, 8" of ascending or other ranks. */
void ari_ranks_describe(const int *ranks, int n, char *text, size_t size);

#endif

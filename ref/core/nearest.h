/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CORE_NEAREST_H
#define ARI_CORE_NEAREST_H

#include <stddef.h>

/** The candidate with the smallest edit distance to `word`, or NULL if none is within a third of its length (at least
 *  2): for "did you mean". Borrows. */
const char *ari_nearest(const char *word, const char *const *candidates, size_t n);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_REF_IO_NEAREST_H
#define ANYRANK_REF_IO_NEAREST_H

#include <stddef.h>

/** The name most like a mistyped `word`, for hints: the smallest optimal-string-alignment distance (insertions,
 *  deletions, substitutions, swaps of neighbours; Damerau 1964), the first of equals; NULL where nothing is near (more
 *  than a third of the word, at least 2). Borrowed from `names`. */
const char *ari_nearest(const char *word, const char *const *names, size_t n);

#endif

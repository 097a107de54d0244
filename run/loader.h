/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_RUN_LOADER_H
#define ARI_RUN_LOADER_H

#include <stddef.h>
#include <stdint.h>

/* The order of an epoch: the shuffle of Fisher and Yates (Durstenfeld 1964, Algorithm 235), for i = n-1 .. 1 place i
 * changes with the place that is drawn for it, uniform in 0 .. i. */

/** The key of a seed's shuffles. */
uint64_t ari_shuffle_key(uint64_t seed);
/** What is drawn for place i (below 2^32) in an epoch: w mod (i + 1) of the first word w = 0, 1, .. of the place's
 *  stream that lies below the largest multiple of i + 1, so that every place is equally likely. */
size_t ari_shuffle_draw(uint64_t key, uint32_t epoch, size_t i);
/** order[0 .. n) = a permutation of 0 .. n-1; n at most 2^32. */
void ari_shuffle(size_t *order, size_t n, uint64_t key, uint32_t epoch);

#endif

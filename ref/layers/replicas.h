/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_LAYERS_REPLICAS_H
#define ARI_LAYERS_REPLICAS_H

#include "anyrank/param.h"

/* Copies are compared by hashes that travel in their place. */

/** Which elements of the full tensor a rank holds: copies of the same ones have the same number. */
uint64_t ari_place_of(const ar_layout *o);
/** FNV-1a in 64 bits, word by word. */
uint64_t ari_hash_word(uint64_t hash, uint64_t word);
/** Goes on with n values; every NaN counts as the quiet one. */
uint64_t ari_hash_values(uint64_t hash, const float *v, size_t n);
/** all: [ranks of the group, words]; this rank's row has been filled in, the others' are put beside it. Collective. */
AR_NODISCARD ar_status ari_gather_words(ar_ctx *ctx, ar_comm *over, uint64_t *all, size_t words, const char *tag);

#endif

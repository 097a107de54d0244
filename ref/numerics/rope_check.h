/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/rope.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Checks that slot rope_tables supports these tables. Errors: AR_ERR_ARG (an odd number of rotated features, or more
 *  than a head has; a number outside the kind's range; or a last position whose angle is at least 2^20, for which sine
 *  and cosine are not defined). */
AR_NODISCARD ar_status ari_rope_check(size_t positions, size_t head_dim, const ar_rope *rope);

/** Returns the rotation for a sequence of `length` positions, with frequencies that depend only on the pair: dynamic
 *  gets the theta of that length, longrope the list for that length as its short one. Other kinds are returned
 *  unchanged. */
ar_rope ari_rope_at(const ar_rope *rope, size_t length, size_t head_dim);
/** A number that two lengths share if and only if their frequencies are the same. */
size_t ari_rope_length(const ar_rope *rope, size_t length);

#ifdef __cplusplus
}
#endif

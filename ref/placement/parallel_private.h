/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/parallel.h"

/* Private functions of anyrank/parallel.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** Checks the division of positions, as part of ari_parallel_check: among the chunks of cp's ring and, with sp, among
 *  tp ranks. */
AR_NODISCARD ar_status ari_parallel_check_sequence(const ar_parallel *p, size_t seq);
/** The lengths of sequences that a layout can share out are the multiples of this. At least 1, of any layout. */
size_t ari_parallel_sequence_unit(const ar_parallel *p);
/** Returns all positions [0, seq). */
ar_positions ari_positions_full(size_t seq);
/** Returns part `part` of `parts` equal, consecutive parts; parts divides the number of positions. */
ar_positions ari_positions_part(const ar_positions *p, size_t part, size_t parts);
/** Number of positions. */
size_t ari_positions_count(const ar_positions *p);
/** The i-th position. */
size_t ari_positions_at(const ar_positions *p, size_t i);
/** Returns the positions of rank `place` in a ring of `places` ranks, which divides seq: a consecutive run, or with
 *  zigzag the chunks place and 2*places - 1 - place of 2*places. */
ar_positions ari_positions_ring(size_t places, bool zigzag, size_t seq, size_t place);
/** Returns the positions that context-parallel rank cp_rank holds of a sequence that ari_parallel_check accepts. Ring
 *  rank cp_rank / cp_inner has the chunks, and the cp_inner ranks that share them hold equal parts. */
ar_positions ari_parallel_positions(const ar_parallel *p, size_t seq, int cp_rank);
/** Returns the number of equal parts into which a sample of seq positions is split. Exact numerics round a matrix's
 *  gradient for each part (numerics.md, section 3): halves of halves, of at least 512 positions. */
size_t ari_gradient_parts(size_t seq);
/** Returns the number of positions in a part that context-parallel rank `cp_rank` holds. */
size_t ari_gradient_part_rows(const ar_parallel *p, size_t seq, size_t part, int cp_rank);
/** Returns the rank that computes the gradient of a part of sample `sample` among the parts that ranks share: one of
 *  those that hold most of it, in turn. The other ranks' rows are sent to it. */
int ari_gradient_part_owner(const ar_parallel *p, size_t seq, size_t sample, size_t part);
/** Returns how many rows of a sample's parts are sent to other ranks. parts: the largest number of parts per sample
 *  that a rank computes. */
size_t ari_gradient_moves(const ar_parallel *p, size_t seq, size_t *parts);

AR_END_DECLS

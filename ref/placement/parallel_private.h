/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/parallel.h"

/* Functions of anyrank/parallel.h for the library, the command and the tests alone. */

AR_BEGIN_DECLS

/** The part of that check that is about the positions alone: over cp, its ring's chunks, and (sp) tp. */
AR_NODISCARD ar_status ari_parallel_check_sequence(const ar_parallel *p, size_t seq);
/** The lengths of sequences that a layout can share out are the multiples of this. At least 1, of any layout. */
size_t ari_parallel_sequence_unit(const ar_parallel *p);
/** All of [0, seq). */
ar_positions ari_positions_whole(size_t seq);
/** Part `part` of `parts` equal ones, in their order; parts divides their number. */
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
/** Into how many equal parts a sample of seq positions is cut, of each of which exact numerics round a matrix's gradient
 *  (numerics.md, section 3): halves of halves, of 512 positions or more. */
size_t ari_gradient_parts(size_t seq);
/** Positions of a part that context-parallel rank `cp_rank` holds. */
size_t ari_gradient_part_rows(const ar_parallel *p, size_t seq, size_t part, int cp_rank);
/** The rank that computes the gradient of a part of sample `sample` of those that the ranks share: one of those that
 *  hold most of it, in turn. The others' rows go to it. */
int ari_gradient_part_owner(const ar_parallel *p, size_t seq, size_t sample, size_t part);
/** So many rows of a sample's parts go to other ranks. parts: at most so many a sample does a rank compute. */
size_t ari_gradient_moves(const ar_parallel *p, size_t seq, size_t *parts);

AR_END_DECLS

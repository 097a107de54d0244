/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/comm.h"

/* Private functions of anyrank/comm.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** Splits a communicator if the ranks know the result in advance: `size` ranks give this color, and this one becomes
 *  number `rank`. Errors: also AR_ERR_MISMATCH (the result differs). */
AR_NODISCARD ar_status ari_comm_join(ar_comm **out, ar_comm *c, int color, int rank, int size);
/** Records which of a context's groups the communicator is (ref/core/axis.h). Accepts NULL. */
void ari_comm_name_group(ar_comm *c, int group_kind);
/** Ends the world with `st` and this reason (copied): wakes every other rank of all its groups with AR_ERR_ABORTED. The
 *  first call is effective. Callable from any thread. Accepts NULL. */
void ari_comm_abort(ar_comm *c, ar_status st, const char *why);
/** Returns the first error of any rank of this world with the table of ranks; "" if none. Valid while the world
 *  lives. */
const char *ari_comm_error(const ar_comm *c);
/** Returns the number of calls of one kind that this rank has made since creation. Kinds: "all_reduce",
 *  "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send", "recv", "exchange", "barrier", "split". 0 for any
 *  other name. */
uint64_t ari_comm_calls(const ar_comm *c, const char *kind);
/** Computes slice c of N of `count` elements in reductions: the first count mod N slices have one more element. */
void ari_comm_slice(size_t count, int n, int c, size_t *start, size_t *size);
/** Creates a group of one rank, whose collectives copy. Release it with ar_comm_destroy. */
AR_NODISCARD ar_status ari_comm_self(ar_comm **out);

AR_END_DECLS

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/comm.h"

/* Functions of anyrank/comm.h for the library, the command and the tests alone. */

AR_BEGIN_DECLS

/** Batched sends and receives; the k-th send to p meets p's k-th receive from r, counts equal. Collective: every rank
 *  of the group calls it, with n = 0 where it has nothing to move. */
AR_NODISCARD ar_status ari_comm_exchange(ar_comm *c, ar_queue *q, const ar_p2p *ops, size_t n, ar_dtype t,
                                         const char *tag);
/** Collective. Ranks of one color form a group, ordered by (key, rank); color < 0: *gives = NULL. Destroy with
 *  ari_comm_destroy, before the rank's function returns. Runs in the calling thread: wait first for what is enqueued of
 *  this communicator. Errors: also AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_comm_split(ar_comm **gives, ar_comm *c, int color, int key);
/** The same of ranks that know what comes of it: `size` of them give this color, and this one becomes number `rank`.
 *  Errors: also AR_ERR_MISMATCH (it does not). */
AR_NODISCARD ar_status ari_comm_join(ar_comm **gives, ar_comm *c, int color, int rank, int size);
/** Says which of a context's groups it is (ref/core/axis.h), for a record. Accepts NULL. */
void ari_comm_name_group(ar_comm *c, int over);
/** Ends the world, with `st` and this reason (copied): wakes every other rank of every group of it with
 *  AR_ERR_ABORTED. First call wins. From any thread. Accepts NULL. */
void ari_comm_abort(ar_comm *c, ar_status st, const char *why);
/** No call of it may be enqueued or running. Accepts NULL. The communicator that ar_sim_run passes lives on. */
void ari_comm_destroy(ar_comm *c);
/** The first error of any rank of this world, with the table of ranks; "" if none. Valid while the world lives. */
const char *ari_comm_error(const ar_comm *c);
/** Number of calls made of one kind since creation, by this rank. Kinds: "all_reduce", "reduce_scatter",
 *  "all_gather", "all_to_all", "broadcast", "send", "recv", "exchange", "barrier", "split". 0 for another name. */
uint64_t ari_comm_calls(const ar_comm *c, const char *kind);
/** Slice c of N of `count` elements in reductions: the first count mod N slices hold one element more. */
void ari_comm_slice(size_t count, int n, int c, size_t *start, size_t *size);
/** A group of one: collectives copy. Gives; destroy with ari_comm_destroy. */
AR_NODISCARD ar_status ari_comm_self(ar_comm **gives);

AR_END_DECLS

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/ddp.h"

/* Functions of anyrank/ddp.h for the library, the command and the tests alone. */

AR_BEGIN_DECLS

/** ZeRO-3: all values become whole, until the next ar_ddp_start. Collective. */
AR_NODISCARD ar_status ari_ddp_gather_parameters(ar_ddp *d);
/** The module's name, or the list's. Borrowed. */
const char *ari_ddp_name(const ar_ddp *d);
/** The options it was made with. */
ar_ddp_options ari_ddp_options_of(const ar_ddp *d);
/** Broadcasts all parameters' values from rank 0 of the group (done once by create). */
AR_NODISCARD ar_status ari_ddp_broadcast_parameters(ar_ddp *d);
/** By hand, after backward passes without synchronisation: reduces all gradients, to their sum or mean, and waits. */
AR_NODISCARD ar_status ari_ddp_reduce_gradients(ar_ddp *d, bool mean);
/** The names of the parameters that got no gradient on any rank between the last ar_ddp_start and ar_ddp_wait; always
 *  none without find_unused. Writes at most cap, returns how many. Borrowed. */
size_t ari_ddp_unused(const ar_ddp *d, const char **out, size_t cap);
size_t ari_ddp_buckets(const ar_ddp *d);
/** i < ari_ddp_buckets. */
ar_bucket_info ari_ddp_bucket(const ar_ddp *d, size_t i);
/** Checks that every parameter of a bucket got a gradient here, or none did, unless find_unused is on. Ranks to which
 *  nothing is missing learn of it: they are about to wait for this one. Errors: AR_ERR_DATA. */
AR_NODISCARD ar_status ari_ddp_check_used(const ar_ddp *d);
/** Enqueues the reduction of all buckets that are still filling, ready or not, in order. Errors: AR_ERR_ARG (with ZeRO-2
 *  and -3). */
AR_NODISCARD ar_status ari_ddp_reduce_all(ar_ddp *d);
/** Bytes of the storage that all buckets share, one after the other, which with ZeRO-2 and -3 exists during reductions
 *  alone, of slices kept apart, and of the room of their sums over ranks. */
size_t ari_ddp_bytes(const ar_ddp *d);
/** Bytes that gradients have in a step besides those that they keep: of two buckets that are being filled and reduced, or
 *  of all where several backward passes add to them or ranks differ in samples. */
size_t ari_ddp_open_bytes(const ar_ddp *d);

AR_END_DECLS

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "gpu/cluster/process/store.h"
#include "ref/comm/rendezvous_impl.h"

/* Calls as bytes: what the members of a group, in different processes, send each other to compare what they call. All
 * of it is multiples of 8 bytes. n: members of the group. */

/** Errors: AR_ERR_OVERFLOW. */
AR_NODISCARD ar_status ari_call_encoded_bytes(size_t *bytes, const ari_call *call, int n);
/** to: as many bytes. */
void ari_call_encode(void *to, const ari_call *call, int n);
/** The call borrows `bytes`, which are aligned for uint64_t. *p2p: its operations, NULL if there are none; free().
 *  Errors: AR_ERR_INTERNAL (the bytes are no call of a member of n), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_call_decode(ari_call *call, ar_p2p **p2p, const void *bytes, size_t size, int n);

/* The calls of a group's members, as a group whose members have all entered: for ari_calls_compare and
 * ari_group_members_of. */
typedef struct ari_calls {
    ari_group group;
    ar_p2p **p2p; /* [n] */
    void *bytes;  /* NULL: the callee's of ari_calls_take */
} ari_calls;
/** rank [n], of the world, is borrowed as long. Gives; ari_calls_fini. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_calls_init(ari_calls *gives, int *rank, int n);
/** Sets call number `seq` of member i, replacing its former one; borrows `bytes`. Errors: ari_call_decode's. */
AR_NODISCARD ar_status ari_calls_take(ari_calls *k, int i, uint64_t seq, const void *bytes, size_t size);
/** The members exchange their calls; arguments of ari_store_exchange. rank [n], of the world, is borrowed as long.
 *  Gives; ari_calls_fini. Errors: those of ari_store_exchange, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_calls_exchange(ari_calls *gives, ari_store *c, uint64_t group, uint64_t seq, int *rank,
                                          int n, const ari_call *call);
void ari_calls_fini(ari_calls *k);

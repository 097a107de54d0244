/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "sim/sim_impl.h"

/* --- past the cache ----------------------------------------------------------------------------------------------- */

/** Returns true if the outputs together are too large to stay in the cache. Then they are written past it, because a
 *  plain store first reads the line that it overwrites. Measured with 32 MiB of last-level cache, time of plain over
 *  streaming stores: 0.8 at 24 MiB of outputs and 1.15 at 32 MiB with 2 ranks, 1.0 at both with 4, 0.9 at 16 MiB and
 *  1.3 at 24 MiB with 8. */
static inline bool ari_stream_pays(size_t bytes, int outputs)
{
    const size_t threshold = (size_t)24 << 20;
    return bytes >= threshold / (size_t)outputs;
}
/** Copies like memcpy without leaving the destination in the cache, if the machine supports that. */
void ari_stream_bytes(void *dst, const void *src, size_t bytes);
/** Makes streamed data visible before anything that the caller publishes next. */
void ari_stream_end(void);

/* --- transfers ---------------------------------------------------------------------------------------------------- */

/* Single path for all bytes that a rank's thread reads or writes in another rank's memory. Bytes are counted here, a
 * transport's faults strike here, and transfers are verified here. A plain wire costs one addition. */

enum {
    ARI_WIRE_PULSE_BYTES = 1 << 20,
    ARI_WIRE_PLACES = 4,           /* number of inputs that a kernel reads at once */
    ARI_WIRE_PIECE_BYTES = 1 << 13 /* longest read; four of them fit in the L1 cache */
};

/* One thread's transfers in one collective after all members have agreed on it. */
typedef struct ari_wire {
    ari_sim_comm *mover;
    const ari_group *group;
    const ari_call *call;   /* the mover's call */
    int n, self;            /* number of members, and the mover's index among them */
    size_t element;         /* bytes */
    bool plain;             /* neither faults nor verification: memory is read in place */
    uint64_t transfers;     /* transfers so far in this collective; not counted on a plain wire */
    uint64_t read, written; /* bytes */
    uint64_t since_pulse;   /* bytes since the other members were last informed that the mover is working */
} ari_wire;

/** Returns true if transfers of this communicator cannot fail. Otherwise a collective has a second barrier, which
 *  reports a failure to every rank. */
bool ari_wire_is_plain(const ari_sim_comm *mover);
/** Begins the transfers of a collective, after entering it. */
ari_wire ari_wire_open(ari_sim_comm *mover);
/** Ends the transfers before leaving the collective, and adds their bytes to the mover's counters. */
void ari_wire_close(const ari_wire *w);

/* A saved transfer that is to arrive a second time. */
typedef struct ari_saved_transfer {
    bool is_pending;
    uint64_t number, checksum;
    void *bytes; /* [length] the transferred bytes; capacity: allocated bytes */
    size_t length, capacity;
} ari_saved_transfer;

/* State of a communicator with faults or verified transfers. Only one thread at a time uses it. */
typedef struct ari_fault_watch {
    uint64_t number; /* number of the current or next collective, over all of the rank's communicators */
    ari_saved_transfer saved_transfer;
    _Alignas(64) char place[ARI_WIRE_PLACES][ARI_WIRE_PIECE_BYTES]; /* buffers for reads */
} ari_fault_watch;

/** Copies `bytes` from member `sender` to member `receiver`, one of whom is the mover, with faults or verification.
 *  Returns false if they do not arrive; then the collective is aborted and the member leaves. */
bool ari_wire_carry(ari_wire *w, int sender, const void *src, int receiver, void *dst, size_t bytes);

/* A long piece of work is no standstill. */
static inline void ari_wire_pulse(ari_wire *w, size_t bytes)
{
    w->since_pulse += bytes;
    if (w->since_pulse < ARI_WIRE_PULSE_BYTES)
        return;
    ari_member_pulse(&w->mover->member);
    w->since_pulse = 0;
}

/** Accounts for bytes that the mover has read and written in place, instead of a read and a put, on a plain wire. */
static inline void ari_wire_account(ari_wire *w, size_t read, size_t written)
{
    w->read += read;
    w->written += written;
    ari_wire_pulse(w, read + written);
}

/** Returns `bytes` (at most ARI_WIRE_PIECE_BYTES) from `src` in the memory of member `sender` as they arrive here:
 *  `src` itself, or a copy that is valid until the next read with the same `place`. NULL: the transfer failed; the
 *  collective is aborted, and the member leaves. */
static inline const void *ari_wire_read(ari_wire *w, int sender, const void *src, size_t bytes, int place)
{
    w->read += bytes;
    ari_wire_pulse(w, bytes);
    if (w->plain)
        return src;
    char *dst = w->mover->watch->place[place];
    return ari_wire_carry(w, sender, src, w->self, dst, bytes) ? dst : NULL;
}

/** Copies any number of bytes; past_cache: with streaming stores, until ari_stream_end. Returns false as ari_wire_carry
 *  does. */
static inline bool ari_wire_take(ari_wire *w, void *dst, int sender, const void *src, size_t bytes, bool past_cache)
{
    w->read += bytes;
    ari_wire_pulse(w, bytes);
    if (!w->plain)
        return ari_wire_carry(w, sender, src, w->self, dst, bytes);
    (past_cache ? ari_stream_bytes : ari_copy_bytes)(dst, src, bytes);
    return true;
}

/** Copies local bytes into the memory of member `receiver`. Returns false if the transfer failed, as above. */
static inline bool ari_wire_put(ari_wire *w, int receiver, void *dst, const void *src, size_t bytes, bool past_cache)
{
    w->written += bytes;
    ari_wire_pulse(w, bytes);
    if (!w->plain)
        return ari_wire_carry(w, w->self, src, receiver, dst, bytes);
    (past_cache ? ari_stream_bytes : ari_copy_bytes)(dst, src, bytes);
    return true;
}

/* --- faults ------------------------------------------------------------------------------------------------------- */

/** Checks the faults' fields. Errors: AR_ERR_ARG. */
AR_NODISCARD ar_status ari_fault_check(const ar_sim_fault *faults, size_t count, int ranks);

/** Called before the communicator's member enters a collective: counts the collective, and applies a fault scheduled
 *  before it. After a fault that ends the world, entering is an error. */
void ari_fault_before(ari_sim_comm *c, const ari_call *call);
/** Returns the next fault of this kind that strikes the communicator's rank in this collective up to this transfer,
 *  after `after` (NULL: the first); NULL: none. */
const ar_sim_fault *ari_fault_next(const ari_sim_comm *c, ar_sim_fault_kind kind, uint64_t transfer,
                                   const ar_sim_fault *after);
/** Ends the rank, or stalls it until the world has failed; `location`: "before", "in the middle of". Afterwards the
 *  world has failed. */
void ari_fault_kill(ari_sim_comm *c, const ari_call *call, const char *location);
void ari_fault_stall(ari_sim_comm *c, const ari_call *call, const char *location);

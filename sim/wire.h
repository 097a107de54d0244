/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_SIM_WIRE_H
#define ARI_SIM_WIRE_H

#include "sim/sim_impl.h"
#include "sim/stream.h"

/* Every byte of another rank's memory that a rank's thread reads or writes passes here: the one place where bytes are
 * counted, where a transport's faults strike, and where transfers are verified. A plain wire costs an addition. */

enum {
    ARI_WIRE_PULSE_BYTES = 1 << 20,
    ARI_WIRE_PLACES = 4,           /* inputs that a kernel reads at once */
    ARI_WIRE_PIECE_BYTES = 1 << 13 /* the longest read: four of them stay in the first-level cache */
};

/* The moving of one thread in one collective. */
typedef struct ari_wire {
    ari_sim_comm *mover;
    bool plain;             /* neither faults nor verification: memory is read where it lies */
    uint64_t transfers;     /* so far in this collective; not counted where plain */
    uint64_t read, written; /* bytes */
    uint64_t since_pulse;   /* the same, since the others were last told that the mover is at work */
} ari_wire;

/** Whether transfers of this communicator can fail: then a collective takes a second meeting, in which every rank hears
 *  of it. */
bool ari_wire_is_plain(const ari_sim_comm *mover);
/** After entering the collective. */
ari_wire ari_wire_open(ari_sim_comm *mover);
/** Before leaving it: what was moved joins the mover's counts. */
void ari_wire_close(const ari_wire *w);

/* The same three where faults may strike or transfers are verified. */
const void *ari_wire_read_watched(ari_wire *w, int from, const void *at, size_t bytes, int place);
bool ari_wire_take_watched(ari_wire *w, void *to, int from, const void *at, size_t bytes, bool past_cache);
bool ari_wire_put_watched(ari_wire *w, int to, void *at, const void *from, size_t bytes, bool past_cache);

/* A long piece of work is no standstill. */
static inline void ari_wire_pulse(ari_wire *w, size_t bytes)
{
    w->since_pulse += bytes;
    if (w->since_pulse < ARI_WIRE_PULSE_BYTES)
        return;
    ari_member_pulse(&w->mover->member);
    w->since_pulse = 0;
}

/** `bytes`, at most ARI_WIRE_PIECE_BYTES, that lie at `at` in the memory of group member `from`, as they arrive here:
 *  `at` itself, or a copy that stays until the next read into the same place. NULL: they do not; the collective is
 *  broken off, and the member leaves. */
static inline const void *ari_wire_read(ari_wire *w, int from, const void *at, size_t bytes, int place)
{
    w->read += bytes;
    ari_wire_pulse(w, bytes);
    return w->plain ? at : ari_wire_read_watched(w, from, at, bytes, place);
}

/** Where the wire is plain, instead of a read and a put: the mover has read and written so many bytes where they
 *  lie. */
static inline void ari_wire_account(ari_wire *w, size_t read, size_t written)
{
    w->read += read;
    w->written += written;
    ari_wire_pulse(w, read + written);
}

/** Copies any number of them; past_cache: with stores that leave the cache alone, until ari_stream_end. False: as
 *  above. */
static inline bool ari_wire_take(ari_wire *w, void *to, int from, const void *at, size_t bytes, bool past_cache)
{
    w->read += bytes;
    ari_wire_pulse(w, bytes);
    if (!w->plain)
        return ari_wire_take_watched(w, to, from, at, bytes, past_cache);
    (past_cache ? ari_stream_bytes : ari_copy_bytes)(to, at, bytes);
    return true;
}

/** Copies own bytes into the memory of member `to`. False: as above. */
static inline bool ari_wire_put(ari_wire *w, int to, void *at, const void *from, size_t bytes, bool past_cache)
{
    w->written += bytes;
    ari_wire_pulse(w, bytes);
    if (!w->plain)
        return ari_wire_put_watched(w, to, at, from, bytes, past_cache);
    (past_cache ? ari_stream_bytes : ari_copy_bytes)(at, from, bytes);
    return true;
}

#endif

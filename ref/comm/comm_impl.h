/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdatomic.h>

#include "ref/comm/call.h"

/* Bytes of other ranks' memory read and written for one rank by any of its threads. */
typedef struct ari_moved {
    _Atomic uint64_t read, written;
} ari_moved;

static inline void ari_moved_add(ari_moved *m, uint64_t read, uint64_t written)
{
    if (read > 0)
        atomic_fetch_add_explicit(&m->read, read, memory_order_relaxed);
    if (written > 0)
        atomic_fetch_add_explicit(&m->written, written, memory_order_relaxed);
}

/* Does one call in the calling thread, from start to end. */
typedef ar_status (*ari_run_fn)(ar_comm *c, const ari_call *call);

/* Operations of a communicator. All slots except join are required; the public functions have checked the arguments. */
typedef struct ari_comm_ops {
    ari_run_fn run;                                                    /* every collective, but no split */
    ar_status (*split)(ar_comm **out, ar_comm *c, int color, int key); /* *out is NULL on entry */
    ar_status (*join)(ar_comm **out, ar_comm *c, int rank, int size);  /* NULL: by a split */
    /* Returns the first error of any rank of the communicator's world, with its message; AR_OK and "" if none. */
    ar_status (*error)(const ar_comm *c, const char **message);
    void (*abort)(ar_comm *c, ar_status st, const char *why); /* called by any thread; the first call is effective */
    void (*destroy)(ar_comm *c);                              /* accepts a failed communicator */
} ari_comm_ops;

/* Base of every communicator. */
struct ar_comm {
    const ari_comm_ops *ops;
    int rank, size;
    int group_kind; /* for a context's group: its ari_over (ref/core/axis.h), inherited by groups split from it; else
                       -1 */
    ari_moved moved;
    _Atomic uint64_t calls[ARI_KIND_COUNT];
};

void ari_comm_init(ar_comm *c, const ari_comm_ops *ops, int rank, int size);

/** Calls `run` with the call's buffers copied to host memory if they are a device's. outputs: also copies the output
 *  buffer to the host first, because the call may not write all of it. Errors: AR_ERR_MEMORY, those of the device and
 *  of run. */
AR_NODISCARD ar_status ari_staged_run(ar_comm *c, const ari_call *call, bool outputs, ari_run_fn run);

/** Does what memcpy does, and also accepts 0 bytes with NULL, and equal source and destination. */
void ari_copy_bytes(void *dst, const void *src, size_t bytes);

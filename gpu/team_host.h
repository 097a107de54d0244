/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_GPU_TEAM_HOST_H
#define ARI_GPU_TEAM_HOST_H

/* The threads of a block as a GPU has them, each with its own copy of every variable, in turn on one thread of the
 * host: one runs until it comes to a barrier, then the next. So what a kernel leaves to luck comes to light: a variable
 * that one thread sets and another reads, threads that part at a branch and wait at different barriers, an element read
 * before another thread has written it. */
#include <stddef.h>
#include <stdint.h>

#include "anyrank/status.h"

namespace ari_emulated
{

/* A barrier in a kernel: where it stands is which it is. */
struct barrier {
    const char *name;
};

struct team {
    static const unsigned most = 16;
    unsigned count, self; /* threads, and the number of the one that runs */
    uint64_t part[most];  /* one word of each, for what they make together */

    /* The calling thread goes on when all have come here, each with the same n. From one barrier to the next the
     * threads take turns upwards, then downwards. */
    void meet(const barrier *here, size_t n);
};

/* body(arg, team) by each of `count` threads, at most team::most. Errors: AR_ERR_DEVICE, they met at different
 * barriers, or not all of them ended; AR_ERR_MEMORY. */
ar_status team_run(unsigned count, void (*body)(const void *arg, team *t), const void *arg);

} // namespace ari_emulated

#endif

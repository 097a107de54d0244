/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "anyrank/status.h"

/* A message from one process to others, in order from each; `bytes` of text or data and a NUL follow the header, whose
 * size is a multiple of 8. */
typedef struct ari_message {
    struct ari_message *next;
    uint64_t group, seq, bytes;
    int32_t kind, from_rank;
    char data[];
} ari_message;

/* How messages travel between the processes of a job: by MPI, or by a file that all of them see. */
typedef struct ari_link ari_link;
typedef struct ari_link_ops {
    /* Sends to the ranks to [n]; this process is none of them. Does not wait for them. Any thread. False: it cannot. */
    bool (*send)(ari_link *l, const int *to, int n, const ari_message *m);
    /* The next message for this process; NULL: there is none. free(). One thread at a time. */
    ari_message *(*receive)(ari_link *l);
    /* A rank from `rank` on whose process has ended, with a text of how; -1: none that is known of. */
    int (*find_ended)(ari_link *l, int rank, char *text, size_t size);
    void (*destroy)(ari_link *l);
} ari_link_ops;

/* Every link begins with this. */
struct ari_link {
    const ari_link_ops *ops;
    int rank, size;
};
/** Memory for a message with room for its data; free(). NULL: no memory. */
ari_message *ari_message_create(int kind, int from_rank, uint64_t bytes);
/** The same message, in no list; free(). NULL: no memory. */
ari_message *ari_message_copy(const ari_message *m);

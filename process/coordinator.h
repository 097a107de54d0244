/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_PROCESS_COORDINATOR_H
#define ARI_PROCESS_COORDINATOR_H

#include "process/control.h"
#include "process/net.h"

/* A message between the coordinator and its clients: a head, then head.bytes of what the kind says. */
typedef enum ari_message {
    ARI_MESSAGE_FAIL = 1,  /* to the coordinator: ari_control_verdict, text */
    ARI_MESSAGE_FAILED,    /* to a client: ari_control_verdict, text */
    ARI_MESSAGE_LATE,      /* to the coordinator */
    ARI_MESSAGE_SHOW,      /* to a client: give your view */
    ARI_MESSAGE_VIEW,      /* to the coordinator: the view */
    ARI_MESSAGE_EXCHANGE,  /* to the coordinator: ari_exchange_id, bytes */
    ARI_MESSAGE_EXCHANGED, /* to a client: ari_exchange_id, size_t start[n + 1], bytes */
    ARI_MESSAGE_BYE,       /* to the coordinator: this client needs no other any more */
    ARI_MESSAGE_ALL_BYE    /* to a client: no client does */
} ari_message;

typedef struct ari_message_head {
    uint32_t kind, unused;
    uint64_t bytes;
} ari_message_head;

typedef struct ari_control_verdict {
    int32_t status; /* of the one whom it is about; of the others AR_ERR_ABORTED */
    int32_t own;    /* to a client: it is about you */
} ari_control_verdict;

typedef struct ari_exchange_id {
    uint64_t group, seq;
    int32_t index, n;
} ari_exchange_id;

/** Two parts in one message. */
ari_net_end ari_message_write(int fd, ari_message kind, const void *a, size_t a_bytes, const void *b, size_t b_bytes,
                              const ari_net_limit *l);
/** *gives: head.bytes and a NUL behind them; free(). ARI_NET_GONE with errno EBADMSG or ENOMEM too. */
ari_net_end ari_message_read(int fd, ari_message_head *head, char **gives, const ari_net_limit *l);

/* The coordinator, in its own thread of process 0, which uses it like the others, over *own_fd. */
typedef struct ari_coordinator ari_coordinator;
/** fds [size], from [1] on, are owned from then on, also on failure; names are copied. Gives the coordinator, and
 *  *own_fd; close(), also on failure unless it is -1 as before. Errors: AR_ERR_MEMORY, AR_ERR_IO. */
AR_NODISCARD ar_status ari_coordinator_create(ari_coordinator **gives, int *own_fd, int size, const int *fds,
                                              char (*names)[ARI_NAME_BYTES]);
/** Accepts NULL. */
void ari_coordinator_destroy(ari_coordinator *c);

#endif

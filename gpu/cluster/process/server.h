/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "gpu/cluster/process/net.h"
#include "gpu/cluster/process/store.h"

/** That of this process. */
ari_hello ari_hello_of(const ari_store_options *o);

/* A message between the server and its clients after the handshake: a head, then head.bytes of what the kind says. */
typedef enum ari_message {
    ARI_MESSAGE_WELCOME = 1, /* to a client: all have come */
    ARI_MESSAGE_FAIL,        /* to the server: ari_store_verdict, text */
    ARI_MESSAGE_REPORT,      /* to the server: ari_store_verdict, int32_t rank[own], text: with all views */
    ARI_MESSAGE_FAILED,      /* to a client: ari_store_verdict, text */
    ARI_MESSAGE_SET,         /* to the server: ari_store_value, the part */
    ARI_MESSAGE_GET,         /* to the server: ari_store_value */
    ARI_MESSAGE_VALUE,       /* to a client: ari_store_value, size_t start[n + 1], the parts */
    ARI_MESSAGE_LATE,        /* to the server: ari_store_value that does not come, text; or nothing */
    ARI_MESSAGE_SHOW,        /* to a client: give your view */
    ARI_MESSAGE_VIEW,        /* to the server: the view */
    ARI_MESSAGE_BYE,         /* to the server: this client needs no other any more */
    ARI_MESSAGE_LEFT,        /* to a client: int32_t, who has said that */
    ARI_MESSAGE_ALL_BYE      /* to a client: no client does */
} ari_message;

typedef struct ari_message_head {
    uint32_t magic, kind;
    uint64_t bytes;
} ari_message_head;

typedef struct ari_store_verdict {
    int32_t status; /* of those whom it is about; of the others AR_ERR_ABORTED */
    int32_t own;    /* to a client: it is about you; to the server: the number of those that it names */
} ari_store_verdict;

ari_message_head ari_message_head_of(ari_message kind, size_t bytes);
/** Two parts in one message. */
ari_net_end ari_message_write(int fd, ari_message kind, const void *a, size_t a_bytes, const void *b, size_t b_bytes,
                              const ari_net_limit *l);
/** *gives: head.bytes and a NUL behind them; free(). ARI_NET_GONE with errno EBADMSG (no message) or ENOMEM too. */
ari_net_end ari_message_read(int fd, ari_message_head *head, char **gives, const ari_net_limit *l);

/* The server, in its own thread of process 0, which uses it like the others, over *own_fd. */
typedef struct ari_server ari_server;
/** o->listener is owned from then on, also on failure. Gives the server, and *own_fd; close(). Errors: AR_ERR_MEMORY,
 *  AR_ERR_IO; then *own_fd is -1. */
AR_NODISCARD ar_status ari_server_create(ari_server **gives, int *own_fd, const ari_store_options *o);
/** Accepts NULL. */
void ari_server_destroy(ari_server *s);

/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_NCCL_CONTROL_IMPL_H
#define ARI_NCCL_CONTROL_IMPL_H

#include "gpu/nccl/control.h"
#include "gpu/nccl/net.h"

/* Between the hub and its clients: a head, then head.bytes of what the kind says. */
typedef enum ari_word {
    ARI_WORD_FAIL = 1,  /* to the hub: ari_control_verdict, text */
    ARI_WORD_FAILED,    /* to a client: ari_control_verdict, text */
    ARI_WORD_LATE,      /* to the hub */
    ARI_WORD_SHOW,      /* to a client: give your view */
    ARI_WORD_VIEW,      /* to the hub: the view */
    ARI_WORD_EXCHANGE,  /* to the hub: ari_control_meeting, bytes */
    ARI_WORD_EXCHANGED, /* to a client: ari_control_meeting, size_t start[n + 1], bytes */
    ARI_WORD_BYE,       /* to the hub: I need nobody any more */
    ARI_WORD_ALL_SAID   /* to a client: nobody does */
} ari_word;

typedef struct ari_word_head {
    uint32_t word, unused;
    uint64_t bytes;
} ari_word_head;

typedef struct ari_control_verdict {
    int32_t status; /* of the one whom it is about; of the others AR_ERR_ABORTED */
    int32_t own;    /* to a client: it is about you */
} ari_control_verdict;

typedef struct ari_control_meeting {
    uint64_t group, seq;
    int32_t index, n;
} ari_control_meeting;

/* No word is longer: what claims to be is no word of ours. */
#define ARI_WORD_MOST ((uint64_t)1 << 30)

/** Two parts in one word. */
ari_net_end ari_word_write(int fd, ari_word word, const void *a, size_t a_bytes, const void *b, size_t b_bytes,
                           const ari_net_limit *l);
/** *gives: head.bytes and a NUL behind them; free(). ARI_NET_GONE with errno EBADMSG or ENOMEM too. */
ari_net_end ari_word_read(int fd, ari_word_head *head, char **gives, const ari_net_limit *l);

/* The hub, in a thread of its own. */
typedef struct ari_hub ari_hub;
/** fds [size] are owned from then on, also on failure. */
AR_NODISCARD ar_status ari_hub_create(ari_hub **gives, int size, const int *fds, char (*names)[ARI_NAME_BYTES]);
/** Accepts NULL. */
void ari_hub_destroy(ari_hub *h);

#endif

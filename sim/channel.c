/* SPDX-License-Identifier: Apache-2.0 */
#include <pthread.h>
#include <stdlib.h>

#include "ref/core/queue_impl.h"
#include "ref/core/size.h"
#include "sim/wire.h"

/* Communication between two ranks. A channel carries data from rank a to rank b. It is a group of the two with the
 * sender as member 0 and the receiver as member 1, so that the k-th send matches the k-th recv and no other rank takes
 * part. The rank that comes first creates the channel, and the other one finds it.
 *
 * A rank that destroys its communicator leaves all channels from and to it, including channels that it never used and
 * channels created later. A rank that waits there gets an error, as in any other group. */
typedef struct channel {
    int rank[2]; /* sender and receiver, as members of the communicator's group */
    ari_group *group;
    bool used[2]; /* true if a member that will be dropped with its communicator uses the end */
    struct channel *next;
} channel;

struct ari_channels {
    pthread_mutex_t lock;
    const ari_group *group; /* the group is used for comparisons and queries while it has members */
    int remaining;
    channel *head;
    bool departed[]; /* [members of group] whether each member has left */
};

/* One rank's end of a channel. */
struct ari_channel_end {
    ari_sim_comm comm;
    const channel *parent;
    struct ari_channel_end *next;
};

ar_status ari_channels_create(ari_channels **out, const ari_group *g)
{
    const int n = ari_group_size(g);
    ARI_OWNED ari_channels *s = calloc(1, sizeof *s + (size_t)n * sizeof *s->departed);
    if (!s || pthread_mutex_init(&s->lock, NULL) != 0)
        return ar_error_set(AR_ERR_MEMORY, "no memory for the channels of %d ranks", n);
    s->group = g;
    s->remaining = n;
    ARI_GIVE(out, s);
    return AR_OK;
}

/* Marks an end that no member will ever use. */
static void leave_place(channel *h, int index)
{
    ari_sim_member_drop(h->group, index);
    h->used[index] = true;
}

void ari_channels_leave(ari_channels *s, int index)
{
    if (!s)
        return;
    pthread_mutex_lock(&s->lock);
    s->departed[index] = true;
    for (channel *h = s->head; h; h = h->next) {
        for (int i = 0; i < 2; i++) {
            if (h->rank[i] == index && !h->used[i])
                leave_place(h, i);
        }
    }
    const bool is_last = --s->remaining == 0;
    pthread_mutex_unlock(&s->lock);
    if (!is_last)
        return;
    for (channel *h = s->head, *next_channel; h; h = next_channel) {
        next_channel = h->next;
        free(h);
    }
    pthread_mutex_destroy(&s->lock);
    free(s);
}

/* The channels' lock held. */
static ar_status make_channel(channel **out, ari_channels *s, int sender, int receiver)
{
    ARI_OWNED channel *h = calloc(1, sizeof *h);
    if (!h)
        return ar_error_set(AR_ERR_MEMORY, "no memory for a channel between two ranks");
    const int ranks[2] = {ari_group_rank(s->group, sender), ari_group_rank(s->group, receiver)};
    AR_TRY(ari_group_create(&h->group, ari_group_world(s->group), ranks, 2));
    h->rank[0] = sender;
    h->rank[1] = receiver;
    h->next = s->head;
    s->head = h;
    for (int i = 0; i < 2; i++) {
        if (s->departed[h->rank[i]])
            leave_place(h, i);
    }
    *out = h;
    h = NULL;
    return AR_OK;
}

/* The channels' lock held. */
static ar_status find_channel(channel **out, ari_channels *s, int sender, int receiver)
{
    for (channel *h = s->head; h; h = h->next) {
        if (h->rank[0] == sender && h->rank[1] == receiver) {
            *out = h;
            return AR_OK;
        }
    }
    return make_channel(out, s, sender, receiver);
}

/* The channels' lock held. */
static ar_status make_end(struct ari_channel_end **out, ari_sim_comm *c, channel *h, int index)
{
    ARI_OWNED struct ari_channel_end *e = calloc(1, sizeof *e);
    if (!e)
        return ar_error_set(AR_ERR_MEMORY, "no memory for a channel between two ranks");
    AR_TRY(ari_sim_comm_init(&e->comm, c->base.ops, h->group, index, c->options));
    e->comm.counted_by = c;
    e->parent = h;
    e->next = c->channel_ends;
    c->channel_ends = e;
    h->used[index] = true;
    *out = e;
    e = NULL;
    return AR_OK;
}

/* Finds this rank's end of the call's channel. Several queues of a rank may call this concurrently. */
static ar_status end_of(struct ari_channel_end **out, ari_sim_comm *c, const ari_call *call)
{
    const bool sends = call->kind == ARI_SEND;
    const int sender = sends ? c->base.rank : call->peer, receiver = sends ? call->peer : c->base.rank;
    ar_status st = AR_OK;
    pthread_mutex_lock(&c->channels->lock);
    struct ari_channel_end *e = c->channel_ends;
    while (e && !(e->parent->rank[0] == sender && e->parent->rank[1] == receiver))
        e = e->next;
    channel *h = NULL;
    if (!e)
        st = find_channel(&h, c->channels, sender, receiver);
    if (!e && st == AR_OK)
        st = make_end(&e, c, h, sends ? 0 : 1);
    pthread_mutex_unlock(&c->channels->lock);
    *out = e;
    return st;
}

ar_status ari_channel_run(ar_comm *base, const ari_call *call)
{
    ari_sim_comm *c = (ari_sim_comm *)base;
    struct ari_channel_end *e = NULL;
    AR_TRY(end_of(&e, c, call));
    ari_fault_before(&e->comm, call);
    return ari_direct_run(&e->comm.base, call);
}

void ari_channel_ends_free(ari_sim_comm *c)
{
    for (struct ari_channel_end *e = c->channel_ends, *next_end; e; e = next_end) {
        next_end = e->next;
        ari_sim_comm_fini(&e->comm);
        free(e);
    }
}

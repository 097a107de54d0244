/* SPDX-License-Identifier: Apache-2.0 */
/* The parts of a data-parallel object (anyrank/ddp.h). */
#ifndef ARI_TRAIN_DDP_H
#define ARI_TRAIN_DDP_H

#include "anyrank/ddp.h"
#include "ref/core/context.h"

/* One parameter of a bucket. */
typedef struct ari_ddp_slot {
    ar_ddp *ddp;
    ar_param *param;
    size_t bucket;
    bool ready;  /* its hook was called in the backward pass that synchronises */
    bool packed; /* its gradient lies in the bucket already: only mistakes do that */
} ari_ddp_slot;

typedef struct ari_bucket {
    ar_bucket_info info;
    ar_ddp *ddp;
    ari_ddp_slot *slot; /* [info.params], of ar_ddp.slots */
    bool moves;         /* there are peers: its storage exists */
    ar_buf storage;
    size_t *counts;     /* [data-parallel ranks]: ZeRO, with peers; else NULL */
    ar_event *produced; /* all its gradients are written */
    char tag[160];
} ari_bucket;

struct ar_ddp {
    ar_ctx *ctx;       /* borrowed */
    ar_module *module; /* borrowed; NULL: a list was wrapped */
    char name[96];
    ar_ddp_options options;
    ar_param **params; /* [n]: all, in the order of registration */
    size_t n;
    /* Those that require a gradient, bucket after bucket: */
    ari_ddp_slot *slots; /* [trained] */
    ar_param **bucketed; /* [trained] */
    size_t *offsets;     /* [trained] */
    size_t *all_counts;  /* [count, data-parallel ranks]; NULL without ZeRO */
    size_t trained;
    ari_bucket *buckets; /* [count] */
    size_t count;
    const ari_communication *communication; /* borrowed; NULL: buckets go through the main queue */
    bool sync;                              /* hooks make gradients ready */
    size_t next;                            /* the first bucket that is not under way */
    bool waited;                            /* for all, since the last start */
    uint8_t *used;                          /* [trained]: got a gradient; then, with find_unused, on any rank */
    ar_buf used_device;                     /* [trained]; ptr NULL: nobody asks, or no peers */
    const char **unused;                    /* [unused_count] of room for trained */
    size_t unused_count;
};

/** Fills slots, bucketed, offsets and buckets from params and options, without storage. Errors: AR_ERR_MEMORY,
 *  AR_ERR_OVERFLOW. */
AR_NODISCARD ar_status ari_buckets_plan(ar_ddp *d);
/** Storage of the buckets and of the gradients in them: all memory that reductions will take. */
AR_NODISCARD ar_status ari_buckets_alloc(ar_ddp *d);
void ari_buckets_free(ar_ddp *d);
/** All filling: what ar_ddp_start does to them. */
void ari_buckets_reset(ar_ddp *d);
/** Enqueues the next bucket: pack, reduce, copy back. */
AR_NODISCARD ar_status ari_bucket_launch(ar_ddp *d);
/** Packs one parameter's gradient where it stands now, so that launching does not: the beginning of many mistakes. */
AR_NODISCARD ar_status ari_bucket_pack_early(ari_ddp_slot *s);

/** Whether the data-parallel ranks wrap the same parameters with the same options. Collective over them. Errors:
 *  AR_ERR_MISMATCH, with the same message on all. */
AR_NODISCARD ar_status ari_ddp_agree(ar_ddp *d);

/** Whether every parameter of a bucket got a gradient here, or none did. Errors: AR_ERR_DATA, naming those without. */
AR_NODISCARD ar_status ari_ddp_check_all_used(const ar_ddp *d);
/** Marks what got a gradient here, and with find_unused and peers enqueues the agreement. */
AR_NODISCARD ar_status ari_ddp_agree_used(ar_ddp *d);
/** Whether a step in ctx that trains these parameters can leave their sums to d and to nobody else; d NULL: to no
 *  object. Errors: AR_ERR_ARG. */
AR_NODISCARD ar_status ari_ddp_check_step(const ar_ddp *d, const ar_ctx *ctx, ar_param *const *params, size_t n);

/** After the queue: has_grad and the scale of every parameter, and the list of the unused ones. */
void ari_ddp_complete(ar_ddp *d, ar_op op);

/** Ends the world where reductions that peers take part in are under way, so that none of them waits for what will not
 *  come. Returns st. */
ar_status ari_ddp_fail(ar_ddp *d, ar_status st);
/** The same within a reduction, on whichever queue carries it: that one is under way. */
ar_status ari_ddp_fail_in_flight(const ar_ddp *d, ar_status st);

/** The group of a reduction on the queue of d's buckets. */
static inline ar_comm *ari_ddp_dp(const ar_ddp *d)
{
    return d->communication ? d->communication->dp : d->ctx->dp;
}
static inline ar_comm *ari_ddp_tp(const ar_ddp *d)
{
    return d->communication ? d->communication->tp : d->ctx->tp;
}
/** Whether the data-parallel group has peers. */
static inline bool ari_ddp_has_peers(const ar_ddp *d)
{
    return ar_comm_size(d->ctx->dp) > 1;
}

#endif

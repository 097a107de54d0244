/* SPDX-License-Identifier: Apache-2.0 */
/* Parts of a data-parallel object (anyrank/ddp.h). Operations on them: below, units.h, and on top of both ddp.c. */
#pragma once

#include "anyrank/ddp.h"
#include "ref/comm/comm_private.h"
#include "ref/context/context.h"
#include "ref/core/size.h"

/* One parameter of a bucket. */
typedef struct ari_ddp_slot {
    ar_ddp *ddp;
    ar_param *param;
    size_t bucket;
    bool ready;           /* its hook was called in the backward pass that synchronises */
    bool packed;          /* its gradient is in the bucket already, which only faults do */
    ar_param_share share; /* ZeRO-2, ZeRO-3 */
    float *state;         /* of a hook: of every element of the parameter's part here; NULL: none */
} ari_ddp_slot;

typedef struct ari_bucket {
    ar_bucket_info info;
    ar_ddp *ddp;
    ari_ddp_slot *slot; /* [info.params], of ar_ddp.slots */
    bool expert;        /* of parameters that the expert-parallel ranks do not share */
    bool moves;         /* there are peers, or gradients are kept as shares: its storage exists */
    ar_buf storage;
    ar_buf shard;       /* the own slice, as a bucket of so many elements; ptr NULL: it is nowhere apart */
    ar_buf weights;     /* of the own slice: ZeRO-3 */
    size_t *shares;     /* [ranks that shard it]: ZeRO; else NULL */
    size_t *counts;     /* the same, with peers; else NULL */
    ar_event *produced; /* all its gradients are written */
    char tag[160];
} ari_bucket;

typedef enum ari_unit_weights {
    ARI_WEIGHTS_SHARED,    /* a rank has its share */
    ARI_WEIGHTS_GATHERING, /* they are gathered into `room` */
    ARI_WEIGHTS_FULL       /* the parameters' values have memory */
} ari_unit_weights;

/* Unit of parameters: those whose gradients are reduced together and whose weights are gathered together, usually those
 * of one module. The root unit has all parameters that belong to no module's unit. Below ZeRO-2 only the root unit
 * exists, and it does nothing. */
typedef struct ari_unit {
    ar_ddp *ddp;
    ar_module *module; /* borrowed; NULL: the root unit */
    int stage;         /* of this rank's in a pipeline */
    ar_module_hook hook;
    ari_bucket *bucket; /* [buckets], of ar_ddp.buckets; of all of them the parameters follow each other too */
    size_t buckets, slots;
    /* Gradients: ZeRO-2 */
    bool due;           /* they wait for their reduction */
    bool holds;         /* the shares have what was reduced since the start */
    size_t grad_bytes;  /* of those that are whole, in the step's memory */
    ar_event *produced; /* they are written */
    ar_event *reduced;
    /* Weights: ZeRO-3 */
    ari_unit_weights weights;
    ar_buf room; /* where they are gathered, bucket after bucket */
    size_t room_bytes, value_bytes;
    ar_event *shared; /* the shares are written */
    ar_event *gathered;
} ari_unit;

/* Number of samples that a step adds to gradients on the rank with the most samples: in the whole step, and at most in
 * one reduction of ZeRO-2, which is one micro-batch, or all of them in a pipeline. 0: unknown. */
typedef struct ari_ddp_step {
    size_t samples, pass_samples, passes;
    size_t tokens, depths; /* of a sample; of predictions: 1, and further tokens */
    bool repeats;          /* samples may have a position several times */
    bool even; /* all ranks launch their buckets between the same collectives: a bucket waits for the one before */
} ari_ddp_step;

struct ar_ddp {
    ar_module base;    /* where it wraps a module */
    ar_ctx *ctx;       /* borrowed */
    ar_module *module; /* borrowed; NULL: a list was wrapped */
    char name[96];
    ar_ddp_options options;
    int stage;         /* options.zero, or 1 where one rank alone has all shares */
    ari_arena lists;   /* all but params */
    ar_param **params; /* [n]: all, in the order of registration */
    size_t n;
    /* slots of the parameters that require a gradient, ordered by bucket: */
    ari_ddp_slot *slots; /* [trained] */
    ar_param **bucketed; /* [trained] */
    size_t *offsets;     /* [trained] */
    size_t *all_counts;  /* [count, ranks that share most]; NULL without ZeRO */
    size_t trained;
    ari_bucket *buckets; /* [count] */
    size_t count;
    ari_unit *unit; /* [units + 1], the root unit last */
    int units;
    int *unit_of;        /* [n]: of params */
    ari_unit *in_flight; /* whose gradients are being reduced; NULL: none */
    ar_buf room;         /* where; ptr NULL: none are */
    size_t room_bytes;
    ar_buf storage; /* of the bucket that is carried, below ZeRO-2 */
    size_t storage_bytes, shard_bytes;
    ar_buf exchange; /* of the sums over ranks, one after the other, which take it as their room */
    size_t exchange_bytes;
    const ari_communication *gathers;       /* borrowed; NULL: weights are gathered on the main queue */
    const ari_communication *communication; /* borrowed; NULL: buckets go through the main queue */
    ari_ddp_step step;
    bool sync;           /* hooks make gradients ready */
    size_t next_bucket;  /* the first bucket that is not under way */
    bool waited;         /* for all, since the last start */
    uint8_t *used;       /* [trained]: got a gradient; then, with find_unused, on any rank */
    ar_buf used_device;  /* [trained]; ptr NULL: nobody asks, or no peers */
    const char **unused; /* [unused_count] of room for trained */
    size_t unused_count;
};

/** A group of the context on the queue of d's buckets. */
static inline ar_comm *ari_ddp_group(const ar_ddp *d, ari_over group)
{
    return d->communication ? d->communication->groups[group] : d->ctx->groups[group];
}
/** True if the data-parallel group has peers. */
static inline bool ari_ddp_has_peers(const ar_ddp *d)
{
    return ar_comm_size(d->ctx->dp) > 1;
}

/** Ends the world within a reduction, on whichever queue carries it: that one is under way. Returns st. */
static inline ar_status ari_ddp_fail_in_flight(const ar_ddp *d, ar_status st)
{
    if (st != AR_OK)
        ari_comm_abort(d->ctx->world, st, ar_error_message());
    return st;
}
/** Fails in a way that reaches the peers of reductions in progress, so that none of them waits forever. */
static inline ar_status ari_ddp_fail(const ar_ddp *d, ar_status st)
{
    return (d->next_bucket > 0 || d->stage >= 2) && !d->waited ? ari_ddp_fail_in_flight(d, st) : st;
}

/* --- the buckets (bucket.c) --------------------------------------------------------------------------------------- */

/** Storage of the buckets and of the gradients in them: all memory that reductions will take. */
AR_NODISCARD ar_status ari_buckets_alloc(ar_ddp *d);
void ari_buckets_free(ar_ddp *d);
/** Runs bucket `b` (an ari_bucket) through its reduction on the queue that carries it. */
AR_NODISCARD ar_status ari_bucket_run(void *b, ar_queue *queue);
/** True if a bucket is the gradient of its one parameter, summed where that lies. */
bool ari_bucket_is_in_place(const ari_bucket *b);
extern const ar_module_ops ari_ddp_ops;
/** Refuses a hook that the numerics do not have. */
AR_NODISCARD ar_status ari_ddp_check_hook(const ar_ctx *ctx, const ar_ddp_options *o);
/** Lets the hook replace the gradients of a bucket: terms, before they are summed, or the sums. */
AR_NODISCARD ar_status ari_ddp_hook(const ar_ddp *d, const ari_bucket *b, bool terms);
/** Sets what of each gradient of the bucket is this rank's. */
void ari_bucket_share(const ari_bucket *b);
/** Completes the rank's slice: the sum over the ranks that shard the bucket is summed over those with the same
 *  slice. */
AR_NODISCARD ar_status ari_bucket_complete(const ari_bucket *b, ar_queue *q);

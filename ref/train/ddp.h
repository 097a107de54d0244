/* SPDX-License-Identifier: Apache-2.0 */
/* Parts of a data-parallel object (anyrank/ddp.h). Their operations are declared below and in units.h; ddp.c uses
 * both. */
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
    bool ready;           /* true after its hook was called in the backward pass that synchronises */
    bool packed;          /* its gradient is in the bucket already, which only faults do */
    ar_param_share share; /* ZeRO-2, ZeRO-3 */
    float *state;         /* state of a hook for each element of this rank's part of the parameter; NULL: none */
} ari_ddp_slot;

typedef struct ari_bucket {
    ar_bucket_info info;
    ar_ddp *ddp;
    ari_ddp_slot *slot; /* [info.params] slots, within ar_ddp.slots */
    bool expert;        /* true for parameters that differ between expert-parallel ranks */
    bool moves;         /* true if the bucket has storage: there are peers, or gradients are kept as shards */
    ar_buf storage;
    ar_buf shard;       /* this rank's slice as a separate bucket of that many elements; ptr NULL: no separate memory */
    ar_buf weights;     /* weights of this rank's slice, for ZeRO-3 */
    size_t *shares;     /* [ranks that shard it]: ZeRO; else NULL */
    size_t *counts;     /* element counts of the ranks' slices if there are peers, otherwise NULL */
    ar_event *produced; /* recorded after all gradients of the bucket were written */
    char tag[160];
} ari_bucket;

typedef enum ari_unit_weights {
    ARI_WEIGHTS_SHARED,    /* each rank has its shard */
    ARI_WEIGHTS_GATHERING, /* the weights are being gathered into `room` */
    ARI_WEIGHTS_FULL       /* the parameters' full values are in memory */
} ari_unit_weights;

/* Unit of parameters: those whose gradients are reduced together and whose weights are gathered together, usually those
 * of one module. The root unit has all parameters that belong to no module's unit. Below ZeRO-2 only the root unit
 * exists, and it does nothing. */
typedef struct ari_unit {
    ar_ddp *ddp;
    ar_module *module; /* the module of the unit; borrowed; NULL: the root unit */
    int stage;         /* index among this rank's pipeline stages */
    ar_module_hook hook;
    ari_bucket *bucket; /* [buckets] the unit's buckets, consecutive in ar_ddp.buckets, as are their parameters */
    size_t buckets, slots;
    /* Gradients: ZeRO-2 */
    bool due;           /* true while gradients wait for their reduction */
    bool holds;         /* true if the shards contain what was reduced since the start */
    size_t grad_bytes;  /* bytes of full gradients in the step's memory */
    ar_event *produced; /* recorded after the gradients were written */
    ar_event *reduced;
    /* Weights: ZeRO-3 */
    ari_unit_weights weights;
    ar_buf room; /* memory in which weights are gathered, one bucket after the other */
    size_t room_bytes, value_bytes;
    ar_event *shared; /* the shares are written */
    ar_event *gathered;
} ari_unit;

/* Number of samples that a step adds to gradients on the rank with the most samples: in the whole step, and at most in
 * one reduction of ZeRO-2, which is one micro-batch, or all of them in a pipeline. 0: unknown. */
typedef struct ari_ddp_step {
    size_t samples, pass_samples, passes;
    size_t tokens, depths; /* tokens of a sample; predictions per token: 1, or more with further tokens */
    bool repeats;          /* true if samples may have a position several times */
    bool even; /* true if all ranks launch buckets between the same collectives, for which a bucket waits for the
                  preceding one */
} ari_ddp_step;

struct ar_ddp {
    ar_module base;    /* base of the object as a module, if it wraps a module */
    ar_ctx *ctx;       /* borrowed */
    ar_module *module; /* the wrapped module; borrowed; NULL: a list of parameters is wrapped */
    char name[96];
    ar_ddp_options options;
    int stage;         /* ZeRO stage: options.zero, or 1 if a single rank has all shards */
    ari_arena lists;   /* memory of all lists except params */
    ar_param **params; /* [n] all parameters in order of registration */
    size_t n;
    /* slots of the parameters that require a gradient, ordered by bucket: */
    ari_ddp_slot *slots; /* [trained] */
    ar_param **bucketed; /* [trained] */
    size_t *offsets;     /* [trained] */
    size_t *all_counts;  /* [count, ranks of the largest sharding group]; NULL without ZeRO */
    size_t trained;
    ari_bucket *buckets; /* [count] */
    size_t count;
    ari_unit *unit; /* [units + 1] units, the root unit last */
    int units;
    int *unit_of;        /* [n] unit of each parameter */
    ari_unit *in_flight; /* the unit whose gradients are being reduced; NULL: none */
    ar_buf room;         /* memory for these; ptr NULL: not allocated */
    size_t room_bytes;
    ar_buf storage; /* storage of the bucket being reduced, below ZeRO-2 */
    size_t storage_bytes, shard_bytes;
    ar_buf exchange; /* scratch memory for reductions, used by one after the other */
    size_t exchange_bytes;
    const ari_communication *gathers;       /* queue and groups for gathering weights; borrowed; NULL: the main queue
                                               is used */
    const ari_communication *communication; /* queue and groups for reductions; borrowed; NULL: buckets use the main
                                               queue */
    ari_ddp_step step;
    bool sync;           /* hooks make gradients ready */
    size_t next_bucket;  /* index of the first bucket that has not been launched */
    bool waited;         /* true if all have been awaited since the last start */
    uint8_t *used;       /* [trained] whether the parameter received a gradient on this rank; after the exchange of
                            find_unused, on any rank */
    ar_buf used_device;  /* [trained] the same on the device; ptr NULL: find_unused is off, or there are no peers */
    const char **unused; /* [unused_count] names; capacity: trained */
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

/** Ends the world because of an error in a reduction that is in flight on some queue. Returns st. */
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

/** Allocates storage for buckets and their gradients: all memory that reductions will need. */
AR_NODISCARD ar_status ari_buckets_alloc(ar_ddp *d);
void ari_buckets_free(ar_ddp *d);
/** Runs bucket `b` (an ari_bucket) through its reduction on the queue that carries it. */
AR_NODISCARD ar_status ari_bucket_run(void *b, ar_queue *queue);
/** Returns true if a bucket is the gradient of a single parameter, reduced in place. */
bool ari_bucket_is_in_place(const ari_bucket *b);
extern const ar_module_ops ari_ddp_ops;
/** Refuses a hook that the numerics do not support. */
AR_NODISCARD ar_status ari_ddp_check_hook(const ar_ctx *ctx, const ar_ddp_options *o);
/** Calls the hook to replace a bucket's gradients: the terms before the reduction, or the sums after it. */
AR_NODISCARD ar_status ari_ddp_hook(const ar_ddp *d, const ari_bucket *b, bool terms);
/** Sets what of each gradient of the bucket is this rank's. */
void ari_bucket_share(const ari_bucket *b);
/** Completes the rank's slice: the sum over the ranks that shard the bucket is summed over those with the same
 *  slice. */
AR_NODISCARD ar_status ari_bucket_complete(const ari_bucket *b, ar_queue *q);

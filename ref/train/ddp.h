/* SPDX-License-Identifier: Apache-2.0 */
/* The parts of a data-parallel object (anyrank/ddp.h). */
#ifndef ARI_TRAIN_DDP_H
#define ARI_TRAIN_DDP_H

#include "anyrank/ddp.h"
#include "ref/context/context.h"

/* One parameter of a bucket. */
typedef struct ari_ddp_slot {
    ar_ddp *ddp;
    ar_param *param;
    size_t bucket;
    bool ready;           /* its hook was called in the backward pass that synchronises */
    bool packed;          /* its gradient lies in the bucket already: only mistakes do that */
    ar_param_share share; /* ZeRO-2, ZeRO-3 */
} ari_ddp_slot;

typedef struct ari_bucket {
    ar_bucket_info info;
    ar_ddp *ddp;
    ari_ddp_slot *slot; /* [info.params], of ar_ddp.slots */
    bool moves;         /* there are peers: its storage exists */
    ar_buf storage;
    ar_buf shard;       /* the own slice, as a bucket of so many elements; ptr NULL: it is nowhere apart */
    ar_buf weights;     /* of the own slice: ZeRO-3 */
    size_t *counts;     /* [ranks that share it out]: ZeRO, with peers; else NULL */
    ar_event *produced; /* all its gradients are written */
    char tag[160];
} ari_bucket;

typedef enum ari_unit_weights {
    ARI_WEIGHTS_SHARED,    /* a rank has its share */
    ARI_WEIGHTS_UNDER_WAY, /* they are gathered into `room` */
    ARI_WEIGHTS_WHOLE      /* the parameters' values have memory */
} ari_unit_weights;

/* Parameters whose gradients are reduced together, and whose weights are gathered together: those of a module, or, the
 * root unit, all that are of none. Below ZeRO-2 there is the root unit alone, which does nothing. */
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

struct ar_ddp {
    ar_ctx *ctx;       /* borrowed */
    ar_module *module; /* borrowed; NULL: a list was wrapped */
    char name[96];
    ar_ddp_options options;
    bool unhooked;     /* zb_hooks_skipped */
    int stage;         /* options.zero, or 1 where one rank alone has all shares */
    ar_param **params; /* [n]: all, in the order of registration */
    size_t n;
    /* Those that require a gradient, bucket after bucket: */
    ari_ddp_slot *slots; /* [trained] */
    ar_param **bucketed; /* [trained] */
    size_t *offsets;     /* [trained] */
    size_t *all_counts;  /* [count, ranks that share]; NULL without ZeRO */
    size_t trained;
    ari_bucket *buckets; /* [count] */
    size_t count;
    ari_unit *unit; /* [units + 1], the root unit last */
    int units;
    int *unit_of;        /* [n]: of params */
    ari_unit *in_flight; /* whose gradients are being reduced; NULL: none */
    ar_buf room;         /* where; ptr NULL: none are */
    size_t room_bytes;
    const ari_communication *gathers;       /* borrowed; NULL: weights are gathered on the main queue */
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
/** The way of bucket `b` (an ari_bucket) on the queue that carries it. */
AR_NODISCARD ar_status ari_bucket_run(void *b, ar_queue *on);
/** Sets what of each gradient of the bucket is this rank's. */
void ari_bucket_share(const ari_bucket *b);
/** The own slice, which is the sum over the ranks that share the bucket, summed over those that have the same slice. */
AR_NODISCARD ar_status ari_bucket_complete(const ari_bucket *b, ar_queue *q);
/** Packs one parameter's gradient where it stands now, so that launching does not: the beginning of many mistakes. */
AR_NODISCARD ar_status ari_bucket_pack_early(ari_ddp_slot *s);

/* --- units -------------------------------------------------------------------------------------------------------- */

/** Which parameters are of which unit. Errors: AR_ERR_ARG (a module that is NULL or a unit already), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_units_init(ar_ddp *d);
/** Buckets come in the order of their index. */
void ari_unit_add_bucket(ar_ddp *d, ari_bucket *b);
void ari_units_free(ar_ddp *d);
/** At the start of a step: nothing is held, nothing under way. */
AR_NODISCARD ar_status ari_units_start(ar_ddp *d);
/** Reduces what is left, and enqueues the completion of all shares. */
AR_NODISCARD ar_status ari_units_finish(ar_ddp *d);
/** Waits for the gradients that are under way, whose memory is then given back. */
AR_NODISCARD ar_status ari_units_settle(ar_ddp *d);
AR_NODISCARD ar_status ari_unit_begin_backward(ari_unit *u);
/** Enqueues the reduction of a unit's gradients, after that of the one before has ended: of two units at most whole
 *  gradients are alive. */
AR_NODISCARD ar_status ari_unit_reduce(ari_unit *u);
void ari_unit_drop_gradients(ari_unit *u);

/** ZeRO-3: from here on the parameters have their shares. */
AR_NODISCARD ar_status ari_weights_share(ar_ddp *d);
/** Makes the values of a unit whole, and begins to gather those of the unit that comes next in this pass. */
AR_NODISCARD ar_status ari_weights_take(ari_unit *u, ar_pass pass);
void ari_weights_release(ari_unit *u);
AR_NODISCARD ar_status ari_weights_start(ar_ddp *d);
AR_NODISCARD ar_status ari_weights_finish(ar_ddp *d);
void ari_weights_free(ari_unit *u);

/* What a step does around its backward passes, for the units of one of this rank's stages. d NULL, and below ZeRO-2:
 * nothing. */

/** Before a backward pass of the stage; weights: one of put-off gradients of weights, in which no module runs. */
AR_NODISCARD ar_status ari_ddp_begin_backward(ar_ddp *d, int stage, bool weights);
/** After it, unless the gradients of weights come in another pass (ar_ctx.later): the stage's that are due are
 *  reduced. */
AR_NODISCARD ar_status ari_ddp_end_backward(ar_ddp *d, int stage);
/** The same calls to the other ranks as a pass that they make through a micro-batch that this rank has not; after a
 *  backward pass ari_ddp_end_backward, or that of the weights, comes as after theirs. */
AR_NODISCARD ar_status ari_ddp_absent_forward(ar_ddp *d, int stage);
AR_NODISCARD ar_status ari_ddp_absent_backward(ar_ddp *d, int stage);

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
static inline ar_comm *ari_ddp_replicate(const ar_ddp *d)
{
    return d->communication && d->communication->replicate ? d->communication->replicate : d->ctx->replicate;
}
/** The ranks that share buckets out: without replicas all that have data. */
static inline ar_comm *ari_ddp_shard(const ar_ddp *d)
{
    if (ar_comm_size(d->ctx->replicate) == 1)
        return ari_ddp_dp(d);
    return d->communication ? d->communication->shard : d->ctx->shard;
}
static inline ar_comm *ari_ddp_tp(const ar_ddp *d)
{
    return d->communication ? d->communication->tp : d->ctx->tp;
}
static inline ar_comm *ari_ddp_ends(const ar_ddp *d)
{
    return d->communication ? d->communication->ends : d->ctx->pp.ends;
}
/** Whether the data-parallel group has peers. */
static inline bool ari_ddp_has_peers(const ar_ddp *d)
{
    return ar_comm_size(d->ctx->dp) > 1;
}

#endif

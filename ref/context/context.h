/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/context.h"
#include "ref/core/axis.h"
#include "ref/core/size.h"

ARI_OWNER(ar_ctx, ar_ctx_destroy)

/* Purposes of memory in a model's step, by the part that allocates it. */
typedef enum ari_use {
    ARI_USE_OUTER, /* embedding, last norm */
    ARI_USE_ATTENTION,
    ARI_USE_MLP,
    ARI_USE_BETWEEN, /* norms, residuals, and values sent between stages */
    ARI_USE_LOGITS,
    ARI_USES
} ari_use;

/* Experts of tokens for a device without contents, which cannot compute the router's choice. */
typedef struct ari_known_routes {
    /* Reads expert [ranks, tokens, k] for the tokens of all expert-parallel ranks in the current pass, ascending for
     * each token. sharer: the rank of ar_ctx.expert_sequence whose expert-parallel ranks these are. */
    ar_status (*read)(void *user, const ar_ctx *ctx, int32_t *expert, const size_t shape[3], const char *router,
                      int sharer);
    void *user;
} ari_known_routes;

/* A resource owned by the step: a buffer of the device, or an object with a destructor. */
typedef struct ari_owned {
    struct ari_owned *next, *prev;
    uint64_t number;                          /* ascending number */
    ar_buf buf;                               /* the buffer, by which the resource is found */
    size_t bytes;                             /* size in bytes; 0 for objects */
    ari_use use;                              /* value of ar_ctx.use at allocation */
    void (*destroy)(ar_ctx *c, void *object); /* NULL: buf is device memory */
    int life;                                 /* value of ar_ctx.life at allocation */
    int holds;                                /* number of ari_step_hold calls in effect */
    bool ended;                               /* true if it was released while still in use */
} ari_owned;

/* Ranks that work on copies of one KV head, created by the first attention that needs them, for all later ones. */
typedef struct ari_replica_group {
    int heads;     /* number of KV heads that are shared; 0: not created yet */
    ar_comm *comm; /* owned */
} ari_replica_group;

/* Declares groups as members of a struct: each has a name and is at its ari_over index. */
#define ARI_OVER_MEMBER(name, member, text, axes) ar_comm *member;
#define ARI_GROUP_MEMBERS                   \
    union {                                 \
        ar_comm *groups[ARI_OVER_GROUPS];   \
        struct {                            \
            ARI_OVER_TABLE(ARI_OVER_MEMBER) \
        };                                  \
    }

/* Communication that overlaps with the main queue: a queue on a thread, and copies of some groups for it, because all
 * calls of one communicator must be on one queue. */
typedef struct ari_communication {
    ar_queue *queue;   /* NULL: not created yet */
    ARI_GROUP_MEMBERS; /* NULL: not made yet, or, except for tp, without other ranks: shard is dp's group if it has
                          no replicas */
} ari_communication;

/* Groups of ranks that share a KV head. */
typedef struct ari_replicas {
    ar_comm *stage; /* in a pipeline: the ranks of one stage, from which the groups are split; NULL: the world */
    ari_replica_group groups[2]; /* groups for heads that every tensor-parallel rank has entirely, and for heads that
                                    these ranks share */
} ari_replicas;

/* Transfers between neighbouring stages of a pipeline. */
typedef enum ari_transfer {
    ARI_SEND_ACTIVATION,
    ARI_RECV_ACTIVATION,
    ARI_SEND_GRADIENT,
    ARI_RECV_GRADIENT,
    ARI_TRANSFERS
} ari_transfer;
/* Queue and communicator of a transfer, separate for each kind so that none waits for another. */
typedef struct ari_neighbour {
    ar_queue *queue; /* NULL: this rank has no such neighbour */
    ar_comm *comm;   /* communicator of two ranks: rank 0 sends, rank 1 receives */
} ari_neighbour;

struct ar_ctx {
    ar_device *device;
    ar_queue *queue;                       /* the main queue */
    ARI_GROUP_MEMBERS;                     /* never NULL */
    ar_comm *world;                        /* nor this */
    ar_parallel layout;                    /* layout for which the groups were created: extents, ring, stages */
    ar_comm *self;                         /* communicator of this rank alone, used for groups that were not given;
                                              owned */
    ari_replicas replicas;                 /* owned */
    ari_communication communication;       /* for gradients; owned */
    ari_communication gathers;             /* for weights: only the shard group; owned */
    ari_communication overlapped;          /* for layers' collectives overlapped with their matmuls: only tp; owned */
    ari_neighbour transfer[ARI_TRANSFERS]; /* for the pipeline; owned */
    bool has_transfers;                    /* true once they have been created */
    bool sp, keep_gathered;
    int overlap; /* number of chunks, at least 1 */
    ar_recomputation recompute;
    double dropout;
    ar_loss_options loss;
    double loss_scale;              /* 1: no scaling */
    ar_dtype activations, matrices; /* dtypes of new activations, and of two-dimensional parameters */
    size_t layers;                  /* number of layers of the model created last; 0: none */
    ari_routed routed;              /* traffic of experts by this rank */
    const ari_known_routes *routes; /* routes for a device without contents; NULL: experts in turn. Borrowed */
    uint64_t seed;
    uint32_t step;
    size_t first_sample, samples; /* position of the current batch in the global batch; samples 0: the batch is
                                     global */
    size_t distinct;              /* number of samples with distinct random numbers; 0: all */
    const ar_arith_ops *arith;
    const char *fault;
    uint64_t attempt;
    ar_tap_fn tap;
    void *tap_user;
    bool counting;      /* a first forward pass in which routers only count the tokens of each expert */
    bool tracks_logits; /* true if attention records its largest logits, for QK-Clip */
    bool operands_once; /* each weight is used in one product per pass, and there is one pass in each direction: its
                           prepared operand need not be kept */
    bool recomputing;   /* a second forward pass: it is not tapped, and it counts no use of a parameter */
    struct ari_ledger *ledger;                             /* record of the values' placements; NULL: none */
    void (*forget)(struct ari_ledger *l, const void *ptr); /* called when memory gets another value; ptr NULL: all
                                                              values end */
    void (*end_ledger)(struct ari_ledger *l);              /* set if the context owns the ledger, else NULL */
    struct ari_unsummed *unsummed;                         /* products that an operator completes later; owned by the
                                                              step */
    struct ari_deferred *deferred; /* collects the weight gradients of a backward pass; NULL: the pass computes them */
    int life;                      /* life of the step's current input (ari_step_end_life); 0: until the end of the
                                      step */
    uint64_t newest_number;        /* number of the newest resource of the step */
    ari_owned owned;               /* head of a circular list of everything that ends with the step, the newest first */
    size_t bytes_now, bytes_peak;
    ari_use use;             /* use of the step's current input */
    size_t stored[ARI_USES]; /* bytes by purpose when ari_step_stored last raised a maximum */
};

/** Return the ranks that hold a parameter's copies and reduce its gradient; among them those that shard it; and those
 *  that hold the same shard. */
static inline ar_comm *ari_ctx_data(const ar_ctx *c, bool expert)
{
    return expert ? c->edp : c->dp;
}
static inline ar_comm *ari_ctx_shard(const ar_ctx *c, bool expert)
{
    return expert ? c->expert_shard : c->shard;
}
static inline ar_comm *ari_ctx_replicate(const ar_ctx *c, bool expert)
{
    return expert ? c->expert_replicate : c->replicate;
}

/** Creates a context like ar_ctx_create with a given arithmetic, borrowed, instead of that of the options' numerics and
 *  precision. */
AR_NODISCARD ar_status ari_ctx_create(ar_ctx **out, const ar_ctx_options *o, const ar_arith_ops *arith);

/* Calls a kernel of the context's device on the context's queue: ARI_KERNEL(ctx, add, y, a, b, n). */
#define ARI_KERNEL(ctx, slot, ...) ((ctx)->device->ops->slot((ctx)->device, (ctx)->queue, __VA_ARGS__))

/** Allocates device memory of at least one byte, which ari_ctx_free releases. */
AR_NODISCARD static inline ar_status ari_ctx_alloc(ar_ctx *c, ar_buf *out, size_t bytes)
{
    return ARI_KERNEL(c, alloc, out, bytes ? bytes : 1);
}
static inline void ari_ctx_free(ar_ctx *c, ar_buf b)
{
    ARI_KERNEL(c, free, b);
}
/** Allocates device memory that ends with the step. */
AR_NODISCARD ar_status ari_step_alloc(ar_ctx *c, ar_buf *out, size_t bytes);
void ari_step_free(ar_ctx *c, ar_buf b);
/** Adds device memory that objects of the step allocate and release themselves to the count. */
static inline void ari_step_count_alloc(ar_ctx *c, size_t bytes)
{
    c->bytes_now += bytes;
    c->bytes_peak = c->bytes_now > c->bytes_peak ? c->bytes_now : c->bytes_peak;
}
static inline void ari_step_count_free(ar_ctx *c, size_t bytes)
{
    c->bytes_now -= bytes;
}
/** Marks the memory of t as holding the step's current input. */
void ari_step_claim(ar_ctx *c, const ar_tensor *t);
/** Raises *max_bytes to the current bytes of step memory, and records what they are for. */
void ari_step_stored(ar_ctx *c, size_t *max_bytes);
/** Makes the step own an object: destroy(c, object) is called at its end. After a failure the object is destroyed at
 *  once. */
AR_NODISCARD ar_status ari_step_own(ar_ctx *c, void *object, void (*destroy)(ar_ctx *c, void *object));
/** Ends an owned object early. */
void ari_step_disown(ar_ctx *c, void *object);
/** Releases everything allocated in the step since ar_ctx.given was `mark`, the newest first, except the memory of
 *  `retained` (NULL: no exception). */
void ari_step_release_since(ar_ctx *c, uint64_t mark, const ar_tensor *retained);

/** Ends everything allocated in the step with this value of ar_ctx.life, the newest first. */
void ari_step_end_life(ar_ctx *c, int life);
/** Holds the memory of t: it stays, even if it is released or its life ends, until it has been unheld equally often.
 *  Memory that is not the step's is ignored. */
void ari_step_hold(ar_ctx *c, const ar_tensor *t);
void ari_step_let_go(ar_ctx *c, const ar_tensor *t);
/** Gives the memory of t to the caller, who frees it with ops->free; it no longer counts as step memory. Errors:
 *  AR_ERR_ARG (it is in use, or not of the step). */
AR_NODISCARD ar_status ari_step_take_out(ar_ctx *c, ar_buf *out, const ar_tensor *t);

/** Makes work enqueued on q from now on run after the work enqueued on `leader` so far, which it records in e. If both
 *  are the same queue it does nothing, and e may be NULL. Errors: those of ar_event_record and ar_queue_wait. */
AR_NODISCARD ar_status ari_queue_follow(ar_queue *q, ar_queue *leader, ar_event *e);
/** Waits for work in flight on q, also after a failure; the thread's message is kept. Accepts NULL. */
void ari_queue_drain(ar_queue *q);

/** The number of this rank of the context's layout along some axes, as ari_place_along counts it. */
int ari_ctx_place(const ar_ctx *c, ari_axes axes);
/** Gets the group of ranks that compute the same KV head as this rank; borrowed. N ranks share kv_heads heads, which
 *  divides N: n tensor-parallel ranks (over_tp; otherwise each has all heads, and n = 1) times their I inner
 *  context-parallel neighbours, where neighbour i of rank r is number r*I + i. The group has N/kv_heads ranks.
 *  Collective on first use: over the tensor-parallel group, or with inner neighbours over the ranks of the stage.
 *  Errors: AR_ERR_UNSUPPORTED (another number of heads in this context), those of the communicator. */
AR_NODISCARD ar_status ari_ctx_replicas(ar_ctx *c, ar_comm **group, int kv_heads, bool over_tp);
/** Returns the communication queue with a copy of the data-parallel group, and with `tp` and `has_ends` also copies of
 *  the tensor-parallel group and of the pipeline's ends. Borrowed; created once for the context. Collective over the
 *  copied groups when it is created. Errors: those of the queue and the communicator. */
AR_NODISCARD ar_status ari_ctx_communication(ar_ctx *c, const ari_communication **borrows, bool tp, bool has_ends);
/** Returns the queue on which weights are gathered, with a copy of the group that shards them; borrowed and created
 *  once like ari_ctx_communication. */
AR_NODISCARD ar_status ari_ctx_gathers(ar_ctx *c, const ari_communication **borrows);
/** Returns the queue for collectives overlapped with a layer's matmuls, with a copy of the tensor-parallel group;
 *  borrowed and created once like ari_ctx_communication. Work in progress there ends before the step's memory does. */
AR_NODISCARD ar_status ari_ctx_overlapped(ar_ctx *c, const ari_communication **borrows);
/** Returns the [ARI_TRANSFERS] of the context's pipeline. Neighbours are those in a ring of its ranks, which is closed
 *  if ranks have virtual stages. Borrowed; created once for the context. Collective over the pipeline when they are
 *  created. Errors: those of the queue and the communicator. */
AR_NODISCARD ar_status ari_ctx_transfers(ar_ctx *c, const ari_neighbour **borrows);
/** True if activations between the tensor-parallel regions are sharded along the sequence. */
static inline bool ari_ctx_sp(const ar_ctx *c)
{
    return c->sp && ar_comm_size(c->tp) > 1;
}

/** Calls ar_ctx_release for several tensors in this order: ARI_RELEASE(ctx, &a, &b). */
void ari_ctx_release_all(ar_ctx *c, ar_tensor *const *t, size_t n);
#define ARI_RELEASE(ctx, ...)                                   \
    ari_ctx_release_all(ctx, (ar_tensor *const[]){__VA_ARGS__}, \
                        sizeof((ar_tensor *const[]){__VA_ARGS__}) / sizeof(ar_tensor *))
/** A fresh matrix. */
AR_NODISCARD static inline ar_status ari_new_rows(ar_ctx *c, ar_tensor *t, ar_dtype dtype, size_t rows, size_t cols)
{
    return ar_ctx_tensor(c, t, dtype, 2, (const size_t[2]){rows, cols});
}
/** y, fresh and contiguous, = x. */
AR_NODISCARD ar_status ari_copy_of(ar_ctx *c, ar_tensor *y, const ar_tensor *x);
/** Creates y with, for each element of row_of (int64), a row of the matrix x times its factor in w; see gather_rows. */
AR_NODISCARD ar_status ari_take_rows(ar_ctx *c, ar_tensor *y, const ar_tensor *x, const ar_tensor *row_of, ar_cbuf w,
                                     size_t k);
/** Frees y unless it is x itself. */
void ari_release_placed(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x);
/** Converts x to another dtype, F32 or BF16, rounded to nearest even. y is x itself if the dtype is x's. Free y with
 *  ari_release_placed. */
AR_NODISCARD ar_status ari_cast(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, ar_dtype dtype);

/* --- numbers of the host that ranks share --- */

/** A fresh vector of n numbers of the host. */
AR_NODISCARD ar_status ari_numbers(ar_ctx *ctx, ar_tensor *t, ar_dtype dtype, size_t n, const void *host);
/** Returns the counts of a collective in which every rank has `count` elements. Release *out with free(). Errors:
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_equal_counts(size_t **out, const ar_comm *group, size_t count);
/** Combines n host numbers in place over a group. Collective. */
AR_NODISCARD ar_status ari_combine(ar_ctx *ctx, ar_comm *group, void *numbers, size_t n, ar_dtype type, ar_op op,
                                   const char *tag);
/** All-gathers words: gathered [ranks of the group, words], of which this rank's row is filled in. Collective. */
AR_NODISCARD ar_status ari_gather_words(ar_ctx *ctx, ar_comm *group, uint64_t *gathered, size_t words, const char *tag);

/* --- tensors as the host reads them ------------------------------------------------------------------------------- */

/** Returns t as the host can read it: t itself if the host can access the device's memory, otherwise a packed copy once
 *  all enqueued work is done; for BF16 a packed fp32 copy. End it with ari_host_view_end. Errors: AR_ERR_MEMORY, those
 *  of the device. */
AR_NODISCARD ar_status ari_host_view(ar_ctx *c, ar_tensor *view, const ar_tensor *t);
/** Ends a view that ari_host_view returned for t. */
void ari_host_view_end(ar_tensor *view, const ar_tensor *t);

/** The elements of a view of any strides, packed row-major; F32 or BF16, host memory, no overlap. */
void ari_pack_elements(float *dst, const ar_tensor *t);

/* Elements that are contiguous in the full tensor: a run along the last dimension of a box. */
typedef struct ari_box_run {
    const float *local; /* the first element in the rank's memory */
    ptrdiff_t stride;   /* distance between elements in the local tensor's memory, in elements */
    size_t count;
    size_t full;        /* index of the first in the full tensor, row-major */
    size_t local_index; /* index in the local tensor, row-major in its shape */
} ari_box_run;

/** Calls f for every run of every box of a rank's tensor (host memory, fp32). */
void ari_for_each_run(const ar_tensor *local, const ar_layout *layout, void (*f)(void *user, const ari_box_run *run),
                      void *user);

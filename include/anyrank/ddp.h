/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_DDP_H
#define ANYRANK_DDP_H

#include "anyrank/module.h"

AR_BEGIN_DECLS

/* Distributed data parallelism (DDP: Li et al. 2020, arXiv:2006.15704). Every rank of the data-parallel group holds the
 * same weights and processes its own samples; gradients are then summed over the group in buckets of several
 * parameters. A bucket is reduced when all of its gradients are ready; all ranks reduce buckets in the same order,
 * bucket 0 first.
 *
 * A training step calls
 *   ar_ddp_start; ar_ddp_set_sync(false), forward and backward passes of all micro-batches but the last;
 *   ar_ddp_set_sync(true), forward and backward pass of the last micro-batch, during which gradients become ready;
 *   ar_ddp_wait; the optimizer.
 *
 * A parameter without gradient on a rank contributes zero. With find_unused the ranks agree, by an all-reduce(max) of a
 * bitmap, which parameters have a gradient on any rank; the others keep ar_param.has_grad false, so that the optimizer
 * updates neither them nor their state. Without find_unused every parameter must get a gradient on every rank with
 * samples, else ar_ddp_wait fails and names the parameters. (A rank on which no parameter got a gradient counts as
 * without samples.)
 *
 * ZeRO-2 and ZeRO-3 (Rajbhandari et al. 2020, arXiv:1910.02054; FSDP: Zhao et al. 2023, arXiv:2304.11277) work by units
 * (ar_unit), each with its own buckets. At the end of a unit's backward pass, in every micro-batch, its gradients are
 * reduce-scattered and the unsharded gradients freed (AR_BUCKETS_OVERLAP: on the communication queue during the next
 * unit's backward pass; AR_BUCKETS_EAGER: after the backward pass of the pipeline stage). ZeRO-3 also all-gathers a
 * unit's weights before its forward and backward pass and frees them afterwards (overlap: prefetches the next unit's
 * weights on another queue). Parameters outside of all units form the root unit, which stays gathered from ar_ddp_start
 * to ar_ddp_wait. Every pass is therefore collective, and a rank without samples must take part, as ar_train_step does.
 * A parameter that is frozen when the ar_ddp is created is not sharded.
 *
 * All ar_ddp of one context share a communication queue, on which all ranks must launch buckets in the same order; so
 * with several ar_ddp every rank needs samples. The buckets of a pipeline's tied weights come last, because they wait
 * for the first stage's backward pass.
 *
 * Functions that communicate are collective over the data-parallel group; for parameters with ar_param.spread over the
 * tensor-parallel group too, and for those with ar_param.ends over the first and last pipeline rank. One thread may use
 * an ar_ddp. */
typedef struct ar_ddp ar_ddp;

/* When buckets are reduced. Both give the same bits. */
typedef enum ar_bucket_mode {
    AR_BUCKETS_OVERLAP, /* during the backward pass, on a communication queue */
    AR_BUCKETS_EAGER    /* after the backward pass, on the main queue */
} ar_bucket_mode;
/* The order in which parameters are assigned to buckets. */
typedef enum ar_bucket_order {
    AR_BUCKETS_REVERSE, /* reverse order of registration, in which gradients become ready */
    AR_BUCKETS_BY_SIZE  /* largest first, equal sizes in order of registration */
} ar_bucket_order;

struct ar_bucket_info;
/** Options of an ar_ddp. Plain data. */
typedef struct ar_ddp_options {
    size_t bucket_bytes; /* capacity, counted as bytes of fp32 gradients; 0: one bucket for each parameter. Buckets are
                            filled in order; a parameter that does not fit begins a new bucket, and one larger than the
                            capacity has a bucket to itself. Parameters of different dtypes or groups share none */
    ar_bucket_mode mode;
    ar_bucket_order order;
    bool mean;           /* gradients become the mean over the N ranks, sum times fl32(1/N); false: the sum, for a loss
                            that is divided by the global number of targets */
    bool find_unused;    /* parameters may be without gradient; see above */
    bool matrices_apart; /* matrices (ar_param.matrix) share no bucket with other parameters, for Muon */
    /* A communication hook, which may modify gradients; NULL: none. g[0, n) are elements [start, start + n) of
     * parameter p on this rank. Called on the rank's thread for each parameter of bucket b that has a gradient; an
     * error ends the step. By default g is the reduced gradient (of this rank's shard, before the factor of `mean`).
     * With hook_terms g is the rank's own gradient before the reduction (for compression; native numerics only; with
     * ZeRO-2 and -3 once per micro-batch). A hook that maps each reduced element by itself keeps exact numerics
     * independent of the layout; ar_check_module detects one that mixes elements. */
    ar_status (*hook)(void *user, const struct ar_bucket_info *b, const ar_param *p, size_t start, float *g, size_t n);
    void *hook_user;   /* first argument of hook; borrowed; shared by all ranks and runs: not for per-element state */
    bool hook_terms;   /* hook runs before the reduction instead of after it */
    bool hook_state;   /* allocates b->hook_state[0, n), fp32 state that the hook keeps between steps for these elements
                          (error feedback), initially 0, in host memory, not saved in checkpoints. Exact numerics stay
                          exact if each state is updated once a step from its own element of g only */
    bool keep_weights; /* ar_ddp_create does not broadcast weights, because all ranks hold the same weights already */
    int zero;          /* ZeRO stage. 1: each rank gets the reduced gradients of its shard of each bucket only; 2: and
                          frees other gradients after their reduction; 3: and keeps only its shard of the weights
                          between uses; 0: none */
    const ar_unit *unit; /* [units], for zero 2 and 3: borrowed during creation, the modules until ar_ddp_destroy.
                            Within a stage, forward passes run the units in this order and backward passes in reverse,
                            by ar_module_forward and ar_module_backward. Parameters of no unit or of several units
                            belong to the root unit */
    size_t units;        /* number of units */
    int root_stage;      /* pipeline stage of the root unit, as ar_unit.stage */
} ar_ddp_options;
#define AR_BUCKET_BYTES ((size_t)26214400) /* default bucket_bytes: 25 MiB */
/** Returns the default options: 25 MiB, overlapped, reverse order, sum, find_unused false, no ZeRO. */
ar_ddp_options ar_ddp_defaults(void);

/** Creates an ar_ddp for a module: broadcasts its parameters from rank 0 of the data-parallel group and adds hooks to
 *  them. Parameters that are frozen now are in no bucket. All ranks must have the same list of parameters. Borrows ctx
 *  and module until ar_ddp_destroy, with which the caller releases *out. Errors: AR_ERR_ARG (options), AR_ERR_MISMATCH
 *  (names the first parameter that another rank lacks or has with another shape), AR_ERR_MEMORY, those of the
 *  communicator. */
AR_NODISCARD ar_status ar_ddp_create(ar_ddp **out, ar_ctx *ctx, ar_module *module, const ar_ddp_options *o);
/** Creates an ar_ddp for a list of n different parameters in order of registration, without a module: the caller runs
 *  the forward and backward passes. `name` is copied. Otherwise as ar_ddp_create. */
AR_NODISCARD ar_status ar_ddp_create_params(ar_ddp **out, ar_ctx *ctx, const char *name, ar_param *const *params,
                                            size_t n, const ar_ddp_options *o);
/** Waits for reductions in flight, removes the hooks and frees. With ZeRO-3 the parameters' values are lost unless they
 *  are gathered. Accepts NULL. */
void ar_ddp_destroy(ar_ddp *d);

/** Returns the ar_ddp as a module with the wrapped module's name, parameters, forward and backward pass. It may be a
 *  child of another module. Destroying it destroys the ar_ddp, not the wrapped module. NULL if the ar_ddp was created
 *  from a list of parameters. */
ar_module *ar_ddp_as_module(ar_ddp *d);

/** Returns the name of the wrapped module, or that of the list of parameters. The ar_ddp owns it. */
const char *ar_ddp_name(const ar_ddp *d);
/** Broadcasts the values of all parameters, frozen ones included, from rank 0 of each parameter's data-parallel group
 *  and increments their versions. ar_ddp_create does this once; call it again after rank 0 has changed weights.
 *  Collective. Errors: those of the communicator. */
AR_NODISCARD ar_status ar_ddp_broadcast_parameters(ar_ddp *d);
/** ZeRO-3: all-gathers all parameters, whose values then are whole until the next ar_ddp_start. With other stages it
 *  does nothing. Collective. Errors: AR_ERR_MEMORY, those of the communicator. */
AR_NODISCARD ar_status ar_ddp_gather_parameters(ar_ddp *d);

/** Begins a step: zeroes the gradients, resets the buckets and turns synchronisation on. Errors: AR_ERR_ARG (a
 *  parameter is trainable that was frozen when the ar_ddp was created), those of the device. */
AR_NODISCARD ar_status ar_ddp_start(ar_ddp *d);
/** Turns synchronisation on or off. With sync false backward passes only accumulate gradients (PyTorch's no_sync); with
 *  true the next backward pass starts the reductions. */
void ar_ddp_set_sync(ar_ddp *d, bool sync);
/** Reduces the remaining buckets, waits for all reductions and copies the results to the parameters' gradients. Call it
 *  once in each step, after the last backward pass. Errors: the first error of any rank and bucket; AR_ERR_DATA (a
 *  parameter without gradient, if find_unused is false). */
AR_NODISCARD ar_status ar_ddp_wait(ar_ddp *d);
/** Reduces all gradients at once and waits, instead of ar_ddp_wait, after backward passes with synchronisation off. The
 *  gradients become the sum or, with ar_ddp_options.mean, the mean. For an asynchronous reduction call ar_ddp_reduce_all
 *  or ar_ddp_reduce_bucket, and then ar_ddp_wait. Errors: as ar_ddp_wait; AR_ERR_ARG (a bucket is reduced already in
 *  this step). */
AR_NODISCARD ar_status ar_ddp_reduce_gradients(ar_ddp *d);
/** Lists the names of parameters that got no gradient on any rank in the step that ar_ddp_wait ended: writes at most
 *  cap pointers to `names` and returns the total number. It is 0 without find_unused. The ar_ddp owns the names, which
 *  are valid until the next ar_ddp_start. */
size_t ar_ddp_unused(const ar_ddp *d, const char **names, size_t cap);

/* State of a bucket within a step: not all gradients are ready; its reduction has been launched; a wait for it, or for
 * the step, has found it reduced. */
typedef enum ar_bucket_state { AR_BUCKET_FILLING, AR_BUCKET_IN_FLIGHT, AR_BUCKET_REDUCED } ar_bucket_state;
/** Description of a bucket. The ar_ddp owns all arrays. */
typedef struct ar_bucket_info {
    size_t index;                /* number of the bucket, in reduction order */
    size_t capacity;             /* bytes of fp32 gradients that it can hold */
    size_t bytes;                /* bytes of fp32 gradients that it holds */
    size_t storage_bytes;        /* bytes while it is reduced, in the arithmetic's format (arith.h); 0: it is not, or by
                                    ZeRO-2 and -3 */
    size_t elements;             /* gradient elements of all its parameters */
    size_t params;               /* number of its parameters */
    ar_param *const *param;      /* [params] */
    const size_t *offset;        /* [params]: index in the bucket of each parameter's first element */
    size_t ready;                /* number of parameters whose gradient is ready */
    bool spread;                 /* also summed over the tensor-parallel group (ar_param.spread), first */
    bool ends;                   /* also summed over the first and last pipeline stage (ar_param.ends), first */
    ar_dtype storage;            /* of the gradients: AR_F32 or AR_BF16 */
    size_t own_start, own_count; /* elements whose sum this rank gets: with ZeRO its shard, else all */
    ar_bucket_state state;
    float *hook_state; /* during a call of ar_ddp_options.hook, with option hook_state; else NULL */
    ar_event *reduced; /* recorded after the reduction, for ar_event_sync and ar_queue_wait; unused with ZeRO-2 and
                          -3 */
} ar_bucket_info;

/** Returns the number of buckets; 0 if no parameter is trainable. */
size_t ar_ddp_buckets(const ar_ddp *d);
/** Writes the description of bucket i to *info. Errors: AR_ERR_ARG (there is no bucket i). */
AR_NODISCARD ar_status ar_ddp_bucket(const ar_ddp *d, size_t i, ar_bucket_info *info);
/** Writes the number of parameter p's bucket to *index. Errors: AR_ERR_NOT_FOUND (p is in no bucket). */
AR_NODISCARD ar_status ar_ddp_bucket_index(const ar_ddp *d, const ar_param *p, size_t *index);
/** ar_ddp_reduce_bucket launches the reduction of bucket i, and of buckets before it that are still filling;
 *  ar_ddp_reduce_all launches that of all buckets. Missing gradients count as zero. Neither waits. Ranks must launch
 *  the same buckets. Errors: AR_ERR_ARG (there is no bucket i; ZeRO-2 and -3, which reduce units), those of the
 *  communicator. */
AR_NODISCARD ar_status ar_ddp_reduce_bucket(ar_ddp *d, size_t i);
AR_NODISCARD ar_status ar_ddp_reduce_all(ar_ddp *d);
/** Waits until bucket i is reduced and its sums are in the gradients of its parameters, before the factor of `mean` and
 *  before ar_ddp_options.hook. The step still has to end with ar_ddp_wait. Errors: AR_ERR_ARG (there is no bucket i; it
 *  has not been launched; ZeRO-2 and -3), the first error of any rank. */
AR_NODISCARD ar_status ar_ddp_wait_bucket(ar_ddp *d, size_t i);

AR_END_DECLS
#endif

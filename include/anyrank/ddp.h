/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_DDP_H
#define ANYRANK_DDP_H

#include "anyrank/module.h"

AR_BEGIN_DECLS

/* Distributed data parallelism (Li et al. 2020, arXiv:2006.15704): every rank of the data-parallel group holds the same
 * weights and goes through its own samples; the gradients are then summed over the group, several at a time, in
 * buckets. A bucket is reduced when ALL its gradients are ready, in one fixed order on every rank: bucket 0 first.
 *
 * A step:  ar_ddp_start -> [ar_ddp_set_sync(false): forward and backward of all micro-batches but the last] ->
 *          ar_ddp_set_sync(true): the last one, whose backward pass makes gradients ready -> ar_ddp_wait -> update.
 *
 * A parameter that got no gradient on this rank counts as zero. With find_unused the ranks agree (an all-reduce(max) of
 * a bitmap) which parameters got one anywhere; one that did not keeps no gradient (ar_param.has_grad), so that an
 * optimizer leaves it and its state alone. Without, every parameter must get a gradient on every rank that has samples:
 * ar_ddp_wait is then an error that names those without. (A rank none of whose parameters got one has no samples.)
 *
 * ZeRO-2 and ZeRO-3 (Rajbhandari et al. 2020, arXiv:1910.02054; Zhao et al. 2023, arXiv:2304.11277) know units: what a
 * unit's backward pass has added is reduced when that pass ends, in every micro-batch, each rank getting its share of
 * the sum, and the whole gradients are freed (overlap: on the communication queue, while the next unit goes backward;
 * eager: after the pass through the stage). ZeRO-3 gathers a unit's weights before each of its passes and gives them
 * back after it (overlap: those of the next unit on another queue in the meantime); the root unit's from ar_ddp_start
 * to ar_ddp_wait. So the ranks meet in every pass, and one without samples has to take part: ar_train_step does. A
 * bucket is of one unit. A parameter that requires no gradient when the object is made stays whole.
 *
 * Objects of one context share its communication queue, in which the ranks must launch all their buckets in one order:
 * with several objects, no rank may be without samples. Buckets of a pipeline's tied weights are the last ones: until
 * the first stage has gone backward, they would hold up the others on the last.
 *
 * All functions with a context inside are collective over the data-parallel group, and where a parameter is `spread`
 * over the tensor-parallel one too, at the `ends` of a pipeline over these. One thread calls them. */
typedef struct ar_ddp ar_ddp;

typedef enum ar_bucket_mode {
    AR_BUCKETS_OVERLAP, /* on a communication queue, while the backward pass goes on */
    AR_BUCKETS_EAGER    /* all of them after the backward pass, on the main queue; the same bits */
} ar_bucket_mode;
typedef enum ar_bucket_order {
    AR_BUCKETS_REVERSE, /* the last parameter registered first, since its gradient is ready first */
    AR_BUCKETS_BY_SIZE  /* the largest first, equal ones as registered */
} ar_bucket_order;

struct ar_bucket_info;
/** Plain data. */
typedef struct ar_ddp_options {
    size_t bucket_bytes; /* capacity: bytes of the parameters' fp32 gradients, in either numerics; 0: one bucket for
                            each parameter. Parameters are put into a bucket one after another; a new one begins with
                            the first that does not fit. One larger than the capacity has a bucket of its own.
                            Parameters of different storage, or summed over different groups, never share one */
    ar_bucket_mode mode;
    ar_bucket_order order;
    bool mean; /* of the ranks' gradients, their sum times fl32(1/N); false: the sum, of a globally normalised loss */
    bool find_unused;
    bool
        matrices_apart; /* matrices (ar_param.matrix) never share a bucket with others: an optimizer keeps other numbers
                            of them (Muon) */
    /* NULL, or what may replace a gradient, which ar_ddp_wait then gives: g[0, n) are elements [start, start + n) of p's
     * part on this rank, those of which it has the sum, before the mean's factor. Called for each parameter of a bucket
     * that has a gradient, on the thread of the rank; an error ends the step. hook_terms: before they are summed, this
     * rank's terms, as they become ready (compression; native numerics alone). A hook of sums leaves exact numerics
     * exact: the sum is the same under every layout, so that what is made of each element by itself is too;
     * ar_check_module finds one that looks at others. State between steps (error feedback of a compression) is the
     * object's, with hook_state, and b->hook_state[0, n) is that of these elements: 0 at first, and as long as it is changed by
     * its own element of g alone, once a step, exact numerics stay exact. State behind `user` is not: ranks, layouts and
     * runs share it. With ZeRO-2 and -3 terms are those of each micro-batch */
    ar_status (*hook)(void *user, const struct ar_bucket_info *b, const ar_param *p, size_t start, float *g, size_t n);
    void *hook_user; /* borrowed */
    bool hook_terms;
    bool hook_state;   /* one fp32 number on the host for each element of this rank; not in checkpoints */
    bool keep_weights; /* create does not broadcast: the ranks have the same weights already (ari_model_set and
                          ar_model_fresh have seen to it) */
    int zero; /* 1: each rank gets the sum of its share of each bucket only (ari_optimizer_create_sharded); 2: and gives
                 the rest back as soon as it is reduced; 3: and has its share of the weights alone between their uses */
    /* zero 2, 3: */
    const ar_unit *unit; /* [units], borrowed during creation, the modules until ar_ddp_destroy: each runs by
                            ar_module_forward and ar_module_backward, in this order and the opposite one within its
                            stage. Of parameters that none of them has, or several, is the root unit */
    size_t units;
    int root_stage; /* of the root unit's parameters */
} ar_ddp_options;
#define AR_BUCKET_BYTES ((size_t)26214400)
/** 25 MiB, overlapped, in reverse order, sum, every parameter used, no ZeRO. */
ar_ddp_options ar_ddp_defaults(void);

/** Wraps a module: its parameters get the values of the group's rank 0 (ari_params_broadcast) and hooks; those that
 *  require no gradient now are left out of the buckets. Borrows ctx and module until ar_ddp_destroy. The ranks' lists
 * of parameters must agree. Gives; ar_ddp_destroy. Errors: AR_ERR_ARG (options), AR_ERR_MISMATCH (names the first
 * parameter that another rank has not, or of another shape), AR_ERR_MEMORY, what the communicator gives. */
AR_NODISCARD ar_status ar_ddp_create(ar_ddp **out, ar_ctx *ctx, ar_module *module, const ar_ddp_options *o);
/** The same for a list of parameters in the order of their registration, each once (a model's): there is no module
 * then, and forward and backward are the caller's. `name` is copied. */
AR_NODISCARD ar_status ar_ddp_create_params(ar_ddp **out, ar_ctx *ctx, const char *name, ar_param *const *params,
                                            size_t n, const ar_ddp_options *o);
/** Waits for what is in flight, and takes the hooks away. ZeRO-3: the parameters have no values then, unless they were
 *  gathered. Accepts NULL. */
void ar_ddp_destroy(ar_ddp *d);

/** The object as a module, of its module's name, parameters and values, which may be a child of others: gradients
 *  become ready as its backward pass goes. Whoever destroys it destroys the object, and not the module that it wraps.
 *  NULL where a list was wrapped. */
ar_module *ar_ddp_as_module(ar_ddp *d);

/** Begins a step: zero gradients, all buckets filling, gradients synchronised. Errors: also AR_ERR_ARG (a parameter
 *  requires a gradient now that did not when the object was made). */
AR_NODISCARD ar_status ar_ddp_start(ar_ddp *d);
/** false: backward passes only add to the gradients (PyTorch's no_sync); true: the next one makes them ready. */
void ar_ddp_set_sync(ar_ddp *d, bool sync);
/** Reduces what has not been reduced yet, waits for all, copies back: every gradient is then complete. Once after the
 *  last backward pass of a step. Errors: the first of any rank and bucket; AR_ERR_DATA (a parameter without gradient,
 *  without find_unused). */
AR_NODISCARD ar_status ar_ddp_wait(ar_ddp *d);

typedef enum ar_bucket_state { AR_BUCKET_FILLING, AR_BUCKET_IN_FLIGHT, AR_BUCKET_REDUCED } ar_bucket_state;
/** One bucket; arrays are borrowed until ar_ddp_destroy. */
typedef struct ar_bucket_info {
    size_t index;
    size_t capacity;      /* bytes of fp32 gradients; that of a parameter larger than the option: its own */
    size_t bytes;         /* of fp32 gradients, filled */
    size_t storage_bytes; /* that it takes, in the arithmetic's own form */
    size_t elements;
    size_t params;
    ar_param *const *param; /* [params] */
    const size_t *offset;   /* [params]: the first element of each */
    size_t ready;           /* parameters that are */
    bool spread;            /* summed over the tensor-parallel group first */
    bool ends;              /* summed over the ends of the pipeline first (ar_param.ends) */
    ar_dtype storage;
    size_t own_start, own_count; /* zero: this rank's elements; else all */
    ar_bucket_state state;
    float *hook_state; /* during a hook, with that option; else NULL */
    ar_buf memory;     /* [storage_bytes] on the device; ptr NULL: without peers, and with ZeRO-2 and -3 */
    ar_event
        *reduced; /* after its reduction, on the queue that carries it: for ari_queue_wait or ar_event_sync. Not with
                          ZeRO-2 and -3 */
} ar_bucket_info;

AR_END_DECLS
#endif

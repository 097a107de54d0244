/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_PARAM_H
#define ANYRANK_PARAM_H

#include "anyrank/block.h"
#include "anyrank/context.h"

AR_BEGIN_DECLS

typedef struct ar_param_cache ar_param_cache; /* a parameter's cached matrix operands (arith.h) */
typedef struct ar_param_grad ar_param_grad;   /* a parameter's gradient accumulator, in the arithmetic's own format */

#define AR_MAX_PARTS 4 /* most matrices in one contraction or packed parameter, as q|k|v or gate|up */

struct ar_param;
/** A callback that runs when a parameter's gradient is complete on this rank: no use in a forward pass still waits for
 *  its backward pass. An error ends the backward pass. */
typedef struct ar_param_hook {
    ar_status (*ready)(void *user, struct ar_param *p);
    void *user; /* first argument of ready; borrowed */
} ar_param_hook;
#define AR_PARAM_HOOKS 4 /* most hooks of a parameter */

/** A rank's ZeRO shard of a parameter, if the data-parallel ranks shard its gradient (ZeRO-2), or gradient and value
 *  (ZeRO-3): elements [start, start + count) of the layer's matrix, row-major. An ar_ddp (ddp.h) owns the memory. */
typedef struct ar_param_share {
    size_t start, count;
    ar_buf value;            /* [count] in the parameter's dtype; ptr NULL: the value is not sharded */
    ar_buf grad;             /* the bucket (arith.h) that holds the gradient as its elements [offset, offset + count) */
    size_t offset, elements; /* elements: of the whole bucket */
} ar_param_share;

/** A parameter on one rank: its shard of the value, the gradient, and how it is initialised and sharded. */
typedef struct ar_param {
    char name[128];   /* Hugging Face name */
    ar_layout layout; /* this rank's boxes of the full tensor in its Hugging Face shape */
    ar_tensor value;  /* this rank's values, contiguous: fp32, or in native numerics BF16 (then the gradient is BF16
                         too, and the optimizer holds the fp32 weights). With ZeRO-3 data.ptr is NULL between uses */
    const ar_param_share *share; /* this rank's ZeRO shard, borrowed from an ar_ddp; NULL: not sharded */
    bool transposed;             /* stored [in, out] (GPT-2's Conv1D); the layer uses the transposed view [out, in] */
    bool requires_grad;          /* false: frozen; no gradient is computed, no update made */
    uint64_t version;            /* counts changes of value; cached operands of an older version are computed again */
    size_t recorded;             /* its number in a record of operations; 0: it is in none */
    int uses;                    /* number of modules of the model that use it; 2 for a tied weight */
    bool spread;                 /* replicated over the tensor-parallel ranks, each of which computes a part of the
                                    gradient (with sequence parallelism: for its own tokens): reduced over this group
                                    too */
    bool plus_one;               /* a norm's gain is 1 + this parameter */
    bool matrix;                 /* a linear layer's weight (no embedding, LM head or router), which Muon updates as one
                                    matrix, or with blocks > 0 as stacked matrices of block[i] rows each: q|k|v,
                                    gate|up */
    int blocks;
    size_t block[AR_MAX_PARTS];
    /* An upper bound on the number of terms that add up to one element of the gradient. */
    enum {
        AR_ADDS_ANY,         /* no bound */
        AR_ADDS_BY_SAMPLE,   /* one for each sample, and each depth of multi-token prediction */
        AR_ADDS_BY_POSITION, /* learned positions: one for each token of a sample with that position id (at most one
                                unless positions restart or are given) */
        AR_ADDS_BY_TOKEN,    /* one for each token */
        AR_ADDS_BY_BOTH      /* a tied embedding: the sum of BY_SAMPLE and BY_TOKEN */
    } adds;
    bool expert; /* an expert's parameter: expert-parallel ranks hold different experts, and only those of
                           ar_expert_groups.copies hold copies of this one */
    bool ends;   /* a tied weight that the first and the last pipeline stage hold copies of: the gradient is summed over
                  both (ar_context_pipeline.ends); norms and counts include the first stage's copy only */
    ar_init_scheme init;    /* distribution of fresh values */
    size_t fan_in, fan_out; /* of the full matrix */
    double init_range;      /* standard deviation of AR_INIT_NORMAL */
    const float *clip;      /* [rows on this rank]: QK-Clip's factors of its rows after this step; NULL: none */
    /* State of the gradient. */
    bool has_grad;               /* a term was added since the last zeroing; after the reduction: on any rank */
    int pending;                 /* uses in forward passes whose backward pass has not run yet */
    float grad_scale;            /* factor still to be applied to the gradient: 1, or 1/N for a mean over N ranks */
    size_t own_start, own_count; /* elements of the layer's matrix whose reduced gradient this rank holds: all of them,
                                    or with ZeRO its shard */
    bool sharded; /* reduced gradients are sharded by ZeRO: each element is on one rank of the group (or on one of each
                     replica, ar_ctx_options.replicate); false: every rank holds the whole gradient */
    ar_param_hook hook[AR_PARAM_HOOKS];
    int hooks; /* entries of hook[] */
    ar_param_cache *cache;
    ar_param_grad *grad;
    ar_device *device;                   /* owns the memory */
    void (*release)(struct ar_param *p); /* frees cache and grad; set by the arithmetic that allocated them */
} ar_param;

/** Initialises *p: allocates its value for the boxes of `layout` (2-D parameters in ar_ctx_options.storage, others
 *  fp32). The value is undefined, the gradient zero. The caller releases it with ar_param_fini. Errors: AR_ERR_ARG
 *  (name too long), AR_ERR_OVERFLOW, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_param_init(ar_param *p, ar_ctx *ctx, const char *name, const ar_layout *layout,
                                     bool transposed);
/** Frees the memory of a parameter. */
void ar_param_fini(ar_param *p);
/** Sets the value: copies this rank's boxes from the full tensor `full` (host memory, row-major, in the Hugging Face
 *  shape) and increments the version. Errors: those of the device. */
AR_NODISCARD ar_status ar_param_set(ar_param *p, ar_ctx *ctx, const float *full);
/** Writes the gradient times p->grad_scale, rounded to fp32, to g, a contiguous fp32 tensor of the shape of p->value.
 *  Errors: AR_ERR_SHAPE, those of the device. */
AR_NODISCARD ar_status ar_param_grad_value(const ar_param *p, ar_ctx *ctx, const ar_tensor *g);
/** Adds a hook to a parameter. Errors: AR_ERR_ARG (it already has AR_PARAM_HOOKS hooks, or this one). */
AR_NODISCARD ar_status ar_param_add_hook(ar_param *p, ar_param_hook hook);
/** Removes a hook; does nothing if the parameter does not have it. */
void ar_param_remove_hook(ar_param *p, ar_param_hook hook);

AR_END_DECLS
#endif

/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_PARAM_H
#define ANYRANK_PARAM_H

#include "anyrank/config.h"
#include "anyrank/context.h"

AR_BEGIN_DECLS

typedef struct ar_param_cache ar_param_cache; /* operands kept by the arithmetic, one list per parameter */
typedef struct ar_param_grad ar_param_grad;   /* gradient state, in the arithmetic's own form */

#define AR_MAX_PARTS 4

struct ar_param;
/** Called when a parameter's gradient is complete on this rank (ari_param_done). A failure ends the backward
 * */
typedef struct ar_param_hook {
    ar_status (*ready)(void *user, struct ar_param *p);
    void *user; /* borrowed */
} ar_param_hook;
#define AR_PARAM_HOOKS 4

/** A rank's share of a parameter when the data-parallel ranks share out its gradient (ZeRO-2), or its value too
 *  (ZeRO-3): elements [start, start + count) of the layer's matrix. The memory is the data-parallel object's. */
typedef struct ar_param_share {
    size_t start, count;
    ar_buf value; /* in its dtype; ptr NULL: the whole value stays */
    ar_buf grad;  /* the gradient: elements [at, at + count) of a bucket (anyrank/arith.h) of so many */
    size_t at, elements;
} ar_param_share;

/** A trainable tensor: this rank's boxes of it, its gradient, and how it starts. */
typedef struct ar_param {
    char name[128];   /* Hugging Face name */
    ar_layout layout; /* in the Hugging Face shape */
    ar_tensor value;  /* local, contiguous; fp32, or (native numerics) BF16: then the gradient is too, and the optimizer
                           keeps the fp32 number of each. data.ptr is NULL between the uses of one that is shared out */
    const ar_param_share *share; /* borrowed from a data-parallel object; NULL: this rank has all of it */
    bool transposed;             /* stored [in, out] (GPT-2's Conv1D): the layer's matrix is the transposed view */
    bool requires_grad;          /* false: frozen. No gradient is made, summed or applied */
    uint64_t version;            /* counts changes of value: kept operands of an older version are made anew */
    int uses;                    /* how many places of the model use it (a tied weight: 2) */
    bool spread;   /* a replicated parameter whose gradient's terms are spread over the tensor-parallel group (the
                           tokens of sequence parallelism): summed over it too */
    bool plus_one; /* a norm's gain is 1 + this */
    bool matrix;   /* a linear layer's weight, no table, head or router: what an optimizer of matrices updates as one,
                           or (blocks > 0) as blocks of so many of its outputs: q | k | v, gate | up */
    int blocks;
    size_t block[AR_MAX_PARTS];
    enum {
        AR_ADDS_ANY,
        AR_ADDS_BY_SAMPLE,
        AR_ADDS_BY_POSITION,
        AR_ADDS_BY_TOKEN,
        AR_ADDS_BY_BOTH
    } adds;      /* how many values an element of its gradient is the sum of: not known; at most one a sample, and
                    depth of further tokens; one a place of a sample with that position, which is one unless positions
                    restart or are given; one a token; of a tied table as many as both */
    bool expert; /* of the data-parallel ranks those of a group have others in its place (ar_expert_groups): its
                           copies are over `copies` alone */
    bool ends; /* a tied weight in a pipeline, of which the first and the last stage hold a copy: its gradient is summed
                  over both (ar_context_pipeline.ends), and where each parameter counts once the first stage's does */
    ar_init_scheme init;
    size_t fan_in, fan_out; /* of the FULL matrix */
    double init_range;      /* of AR_INIT_NORMAL */
    const float
        *clip; /* [outputs here]: what QK-Clip multiplies its rows by after this step, borrowed; NULL: nothing */
    /* The gradient on its way. */
    bool has_grad;               /* something was added since it was zeroed; once reduced: on any rank of the group */
    int pending;                 /* uses in forward passes whose backward has not come yet */
    float grad_scale;            /* of ari_param_grad_value: 1, or 1/N where the mean of N ranks was asked for */
    size_t own_start, own_count; /* the elements, in the order of the layer's matrix, whose gradient is complete here
                                    once reduced: all of them, or with ZeRO this rank's share */
    bool sharded; /* the data-parallel ranks have such shares, and each element is one rank's (a share may be all, or
                     nothing), or with replicas (ar_ctx_options.replicate) one rank's of each; else every rank has the
                     whole gradient */
    ar_param_hook hook[AR_PARAM_HOOKS];
    int hooks;
    ar_param_cache *cache;
    ar_param_grad *grad;
    ar_device *device;                   /* that owns the memory */
    void (*release)(struct ar_param *p); /* frees cache and grad: the slot of the arithmetic that made them */
} ar_param;

/** Memory for the boxes of `layout`, of two dimensions as the context stores those (ar_ctx_options.storage); value
 *  undefined, gradient zero. Errors: AR_ERR_ARG (name too long), AR_ERR_OVERFLOW, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_param_init(ar_param *p, ar_ctx *ctx, const char *name, const ar_layout *layout,
                                     bool transposed);
void ar_param_fini(ar_param *p);
/** Errors: AR_ERR_ARG (AR_PARAM_HOOKS of them, or the same one twice). */
AR_NODISCARD ar_status ar_param_add_hook(ar_param *p, ar_param_hook hook);
/** Takes a hook away; one that is not there is fine. */
void ar_param_remove_hook(ar_param *p, ar_param_hook hook);

AR_END_DECLS
#endif

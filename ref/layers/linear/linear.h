/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "ref/layers/parts.h"

/* Description of one weight of a group, before it exists. */
typedef struct ari_linear_part {
    const char *name;           /* full path, ".weight" and ".bias" are added */
    size_t out;                 /* full output width */
    ar_param *tied;             /* an existing weight, borrowed; NULL: the layer creates one */
    int blocks;                 /* > 0: packed blocks, split block by block (q|k|v) */
    size_t block[AR_MAX_PARTS]; /* widths of the blocks */
    int copies;                 /* number of adjacent ranks that hold the same rows, so that there are N/copies parts */
} ari_linear_part;

/* Weights that multiply the same input: one contraction forward, and one backward for their common dX. A single linear
 * layer is a group of one; q, k, v are a group of three, and gate and up a group of two. Y is [tokens, all outputs side
 * by side]. */
typedef struct ari_linear {
    ar_linear_split split;
    int n;
    ari_features in_features, out;     /* full widths; a part of `out` may consist of several blocks */
    size_t local_width[AR_MAX_PARTS];  /* output widths of the parts in this rank's product, */
    size_t output_width[AR_MAX_PARTS]; /* and in the output */
    size_t local_total, output_total;  /* sums of the widths */
    ar_param *weight[AR_MAX_PARTS];
    ar_param own_weight[AR_MAX_PARTS];
    ar_param bias[AR_MAX_PARTS];
    bool has_bias, owns_input;
    bool peaked;   /* true if the outputs are logits (ar_operand_use) */
    size_t shared; /* number of Y's last features, which heads of all ranks use */
} ari_linear;

typedef struct ari_linear_spec {
    ar_linear_split split;
    int n;
    ari_linear_part part[AR_MAX_PARTS];
    size_t in_features;
    bool bias, transposed;
    bool uneven;     /* true for a vocabulary of logits: the number of rows need not divide */
    bool chooses;    /* a router, a gate */
    bool owns_input; /* the layer releases X because it saves something else */
} ari_linear_spec;

/** Creates the parameters that are not tied. After a failure nothing needs to be released. Errors: AR_ERR_INDIVISIBLE
 *  (names the weight), AR_ERR_ARG (name too long), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_linear_init(ari_linear *l, ar_ctx *ctx, const ari_linear_spec *s);
/** Initialises only weight i, for a layer that multiplies by it itself. Errors: those of ari_linear_init. */
AR_NODISCARD ar_status ari_linear_weight_init(ar_param *p, ar_ctx *ctx, const ari_linear_spec *s, int i);
/** Does the same for a bias. */
AR_NODISCARD ar_status ari_linear_bias_init(ar_param *p, ar_ctx *ctx, const ari_linear_spec *s, int i);
/** Frees what ari_linear_init created; a tied weight stays with its owner. */
void ari_linear_fini(ari_linear *l);
/** Computes y [.., output_total] = x W^T + b, and z = act(y) if act is not AR_ACT_NONE (then *z becomes a tensor). x
 *  and y are placed as the split says; the parts of a group share the redistributed x. */
AR_NODISCARD ar_status ari_linear_forward(ari_linear *l, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                                          ar_activation act, ar_tensor *z);
/* Prefetched input of the layer whose backward pass is next, gathered for the gradients of its weights
 * (ar_parallel.overlap) behind the previous layer's products. Shared by both layers' backward passes; {.next}: not
 * begun. */
typedef struct ari_input_prefetch {
    ari_linear *layer;
    struct ari_gathering *gathering; /* a gathering in the step; NULL: not in flight */
    bool biases_summed;              /* true if the kernel that computed its dY has added dY to the biases' gradients */
} ari_input_prefetch;

static inline bool ari_is_colwise(const ar_linear_split *s)
{
    return s->style == AR_STYLE_COLWISE;
}
static inline bool ari_is_rowwise(const ar_linear_split *s)
{
    return s->style == AR_STYLE_ROWWISE;
}

/** Returns bias sums for the kernel that computes the dY of prefetch->next: sum[i] for part i's bias; marks them as
 *  done in `prefetch`. No sum is returned if the layer has no bias, or if its bias was added with another placement
 *  than dY's. */
AR_NODISCARD ar_status ari_linear_bias_sums(ar_ctx *ctx, ar_row_sum sum[AR_MAX_PARTS], ari_input_prefetch *prefetch);
/** Saves what ari_linear_forward saves for x without computing y: ar_module_ops.recompute of a module that ends with
 *  the layer. */
AR_NODISCARD ar_status ari_linear_recompute(ari_linear *l, ar_ctx *ctx, ar_saved *saved, const ar_tensor *x);
/** Computes dx from dy [.., output_total], with the placements of the gradients of x and y, tapped as `name` (NULL: not
 *  tapped; dx NULL: neither computed nor tapped); then the gradients of biases and weights, in order. For a 2-D input,
 *  ari_ctx_samples determines the samples. prefetch: started for another layer than l, or (l itself) already started;
 *  NULL: neither. */
AR_NODISCARD ar_status ari_linear_backward(ari_linear *l, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx,
                                           const ar_tensor *dy, const char *name, ari_input_prefetch *prefetch);
/** Returns the columns of an output y that belong to weight i, as a view. */
ar_tensor ari_linear_part_of(const ari_linear *l, const ar_tensor *y, int i);
/** Lists each weight and then its bias, including tied weights. Writes at most cap; returns the number. */
size_t ari_linear_params(ari_linear *l, ar_param **out, size_t cap);
/** Creates a single layer as a module with its name. Release it with ar_module_destroy. Errors: those of
 *  ari_linear_init and ari_module_begin. */
AR_NODISCARD ar_status ari_linear_module_create(ar_module **result, ar_ctx *ctx, const char *name, size_t in_features,
                                                size_t out, bool bias, ar_linear_split split);

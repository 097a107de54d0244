/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_LAYERS_LINEAR_H
#define ARI_LAYERS_LINEAR_H

#include "anyrank/layers.h"

typedef enum ari_linear_style {
    ARI_COLUMN, /* rows of W split: Y sharded along features, dX partial */
    ARI_ROW,    /* columns of W split: Y partial, dX sharded along features */
    ARI_WHOLE   /* every rank has W: X, Y and their gradients are whole, and nothing moves */
} ari_linear_style;

/* One weight of a group, as it is described before it exists. */
typedef struct ari_linear_part {
    const char *name; /* full path, ".weight" and ".bias" are added */
    size_t out;       /* full output width */
    ar_param *tied;   /* an existing weight, borrowed; NULL: an own one */
    int blocks;       /* > 0: packed blocks of out/blocks each, split block by block (q|k|v) */
    int copies;       /* > 1: so many neighbouring ranks hold the same rows, so that there are N/copies parts of them */
} ari_linear_part;

/* Weights that multiply the same input: one contraction forward, and one backward for the dX they share. A single
 * linear layer is a group of one; q, k, v and gate, up are groups of three and two. Y is [tokens, the outputs side by
 * side]. */
typedef struct ari_linear {
    ari_linear_style style;
    int n;
    size_t in;                      /* full input width */
    size_t out[AR_MAX_PARTS];       /* full output widths */
    size_t local_out[AR_MAX_PARTS]; /* of this rank's Y */
    size_t local_total;             /* their sum */
    ar_param *weight[AR_MAX_PARTS];
    ar_param own_weight[AR_MAX_PARTS];
    ar_param bias[AR_MAX_PARTS];
    bool has_bias;
    bool input_is_sharded; /* row */
    bool leaves_partial;   /* row: Y is this rank's term */
    bool sequence;
} ari_linear;

typedef struct ari_linear_spec {
    ari_linear_style style;
    int n;
    ari_linear_part part[AR_MAX_PARTS];
    size_t in;
    bool bias, transposed, input_is_sharded;
    bool leaves_partial; /* row: Y is this rank's term, rounded, which nobody adds up here */
    bool uneven;         /* the vocabulary: rows need not divide */
    bool sequence;       /* sequence parallelism: X of a column-parallel group and Y of a row-parallel one, and their
                      gradients, are the rank's own positions [.., s/N, features] */
} ari_linear_spec;

/** Makes the parameters that are not tied. On failure nothing is left to release. Errors: AR_ERR_INDIVISIBLE (names the
 *  weight), AR_ERR_ARG (name too long), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_linear_init(ari_linear *l, ar_ctx *ctx, const ari_linear_spec *s);
/** Frees what ari_linear_init made; a tied weight stays its owner's. */
void ari_linear_fini(ari_linear *l);
/** y [.., local_total] = x W^T + b, and z = act(y) where act is not AR_ACT_NONE (then *z becomes a tensor). With
 *  `sequence` a column-parallel group gathers x along the sequence, once, and a row-parallel one scatters y along
 *  it. */
AR_NODISCARD ar_status ari_linear_forward(ari_linear *l, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                                          ar_activation act, ar_tensor *z);
/** dx from dy [.., local_total], tapped as `name` (dx NULL: neither computed nor tapped); then the gradients of the
 *  weights and biases, in order. What a sample is of a 2-D input says ar_ctx_samples. */
AR_NODISCARD ar_status ari_linear_backward(ari_linear *l, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx,
                                           const ar_tensor *dy, const char *name);
/** Columns of Y that belong to weight i, as a view. */
ar_tensor ari_linear_part_of(const ari_linear *l, const ar_tensor *y, int i);
/** Each weight, then its bias; tied weights too. Returns how many; writes at most cap. */
size_t ari_linear_params(ari_linear *l, ar_param **out, size_t cap);
/** A group of one weight as a module of its name. gather_output: of a column-parallel one. Gives; ar_module_destroy.
 *  Errors: those of ari_linear_init and ari_module_begin. */
AR_NODISCARD ar_status ari_linear_module_create(ar_module **gives, ar_ctx *ctx, const ari_linear_spec *s,
                                                bool gather_output);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_PLACEMENT_H
#define ANYRANK_PLACEMENT_H

#include "anyrank/tensor.h"

AR_BEGIN_DECLS

/* A device mesh, and how a tensor is placed on it, as plain data that is equal on every rank. anyrank/redistribute.h
 * has the communication that moves a tensor from some placements to others. parallelism.md explains both. */

/* --- the mesh ----------------------------------------------------------------------------------------------------- */

#define AR_MESH_DIMS 6  /* most dimensions of a mesh */
#define AR_MESH_NAME 16 /* bytes of a dimension's name, with the final 0 */
typedef struct ar_mesh_dim {
    char name[AR_MESH_NAME]; /* "dp", "tp", .. */
    int size;                /* number of ranks along the dimension, at least 1 */
} ar_mesh_dim;

/** A device mesh: all ranks arranged as a grid, outermost dimension first. In {dp 2, tp 4} rank = dp * 4 + tp, so the
 *  ranks of a tp group are adjacent and those of a dp group 4 apart. */
typedef struct ar_mesh {
    int ndim; /* 0 .. AR_MESH_DIMS; 0: a single rank */
    ar_mesh_dim dim[AR_MESH_DIMS];
} ar_mesh;

/* --- placements --------------------------------------------------------------------------------------------------- */

/* What the ranks along one mesh dimension hold of a tensor T. Replicate and invariant both mean the whole T on every
 * rank; they differ in the gradient. Ranks use a replicated value in different computations (the input of a
 * column-parallel layer, multiplied by different weights), so that each rank's gradient is a partial sum; they use an
 * invariant value in the same computation (a norm, a residual), so that each rank has the whole gradient. */
typedef enum ar_placement_kind {
    AR_REPLICATE,   /* R: the whole T; the gradient is P(sum) */
    AR_INVARIANT,   /* I: the whole T; the gradient is I */
    AR_SHARD,       /* S(d): a part of T along dimension d; the gradient is S(d) */
    AR_PARTIAL_SUM, /* P(sum): T is the sum of the ranks' values; the gradient is R */
    AR_PARTIAL_MAX, /* P(max): T is the element-wise maximum of the ranks' values; it has no gradient */
    AR_PLACEMENT_KINDS
} ar_placement_kind;

/** A placement, as in PyTorch's DTensor (torch.distributed.tensor), whose Replicate covers R and I. A list of
 *  placements has one for each dimension of the mesh, outermost first; {0} is R. If two mesh dimensions shard the same
 *  tensor dimension, the outer one cuts the tensor and the inner one cuts the outer one's parts. */
typedef struct ar_placement {
    ar_placement_kind kind;
    int dim; /* AR_SHARD: the tensor's dimension; negative: counted from the end (-1: the last) */
} ar_placement;

#define AR_PLACEMENT_TEXT 32 /* bytes of a placement's text, with the final 0 */
/** Parses a comma-separated list of n placements, such as "S(0), R", optionally in [] or (). Errors: AR_ERR_ARG
 *  (another number of placements, invalid text). */
AR_NODISCARD ar_status ar_placements_parse(ar_placement *p, int n, const char *text);

/** Computes which part of a tensor of `shape` [ndim] the rank at mesh coordinates coords [mesh->ndim] holds under
 *  placements p [mesh->ndim]: elements [start, start + extent) in each dimension; start [ndim] may be NULL. A dimension
 *  of n elements sharded over N ranks has parts of ceil(n/N) elements, the last ones shorter or empty; uneven false:
 *  AR_ERR_INDIVISIBLE if N does not divide n (the message names both dimensions and numbers). Errors: also AR_ERR_ARG
 *  (ndim, a coordinate, a placement). On error nothing is written. */
AR_NODISCARD ar_status ar_placements_region(size_t *start, size_t *extent, const ar_mesh *mesh, const int *coords,
                                            const ar_placement *p, int ndim, const size_t *shape, bool uneven);

/* --- redistribution ----------------------------------------------------------------------------------------------- */

/** A redistribution: a tensor's shape, its present placements `src` and the wanted placements `dst`. */
typedef struct ar_redistribution {
    int ndim;                                          /* of the full tensor */
    size_t shape[AR_MAX_DIMS];                         /* of the full tensor */
    ar_placement src[AR_MESH_DIMS], dst[AR_MESH_DIMS]; /* one for each dimension of the mesh */
} ar_redistribution;

/* One step of a redistribution, over the ranks along one mesh dimension. */
typedef enum ar_move {
    AR_MOVE_SLICE,          /* R -> S: each rank keeps its part; no communication */
    AR_MOVE_REDUCE_SCATTER, /* P -> S */
    AR_MOVE_ALL_REDUCE,     /* P -> R */
    AR_MOVE_ALL_TO_ALL,     /* S(a) -> S(b) */
    AR_MOVE_ALL_GATHER,     /* S -> R */
    AR_MOVE_FIRST,          /* R -> P(sum): rank 0 keeps the value, others get zeros; no communication */
    AR_MOVE_PAD,            /* S -> P(sum): each rank pads its part with zeros; no communication */
    AR_MOVES
} ar_move;

/** A step together with its mesh dimension `dim` and the placements along it before and after. */
typedef struct ar_redistribution_step {
    int dim;
    ar_move move;
    ar_placement src, dst;
} ar_redistribution_step;
#define AR_REDISTRIBUTION_STEPS (2 * AR_MESH_DIMS) /* most steps of a redistribution */

/** Computes *back, the redistribution of the gradient in the backward pass of redistribution r: from the gradient's
 *  placements of r->dst to those of r->src (R and P(sum) swap). It is the transpose of r: <A x, y> = <x, A^T y>, with
 *  inner products of full tensors, on which A is the identity. back may equal r. AR_ERR_UNSUPPORTED: r contains
 *  P(max). */
AR_NODISCARD ar_status ar_redistribution_backward(ar_redistribution *back, const ar_mesh *mesh,
                                                  const ar_redistribution *r);

AR_END_DECLS
#endif

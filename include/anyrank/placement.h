/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_PLACEMENT_H
#define ANYRANK_PLACEMENT_H

#include "anyrank/tensor.h"

AR_BEGIN_DECLS

/* A mesh of ranks, and how a tensor is placed on it: plain data, the same on every rank, that knows no communicator.
 * What moves a tensor from one list of placements to another is in anyrank/redistribute.h. parallelism.md explains
 * both. */

/* --- the mesh ----------------------------------------------------------------------------------------------------- */

#define AR_MESH_DIMS 6
#define AR_MESH_NAME 16 /* bytes, with the final 0 */
typedef struct ar_mesh_dim {
    char name[AR_MESH_NAME]; /* "dp", "tp", .. */
    int size;                /* ranks along it, at least 1 */
} ar_mesh_dim;

/** A world of ranks as a grid, outermost dimension first: of {dp 2, tp 4} rank = dp * 4 + tp, so the ranks of a tp
 *  group are neighbours and those of a dp group 4 apart. */
typedef struct ar_mesh {
    int ndim; /* 0 .. AR_MESH_DIMS; 0: one rank */
    ar_mesh_dim dim[AR_MESH_DIMS];
} ar_mesh;

/* --- placements --------------------------------------------------------------------------------------------------- */

/* The parts of a tensor T that the ranks along one mesh dimension have. Two placements have the same value on every
 * rank: they differ in the gradient. Every rank uses a replicated value for itself (X of a column-parallel layer, which
 * meets other weights on each), so each rank's gradient is a term of a sum; of an invariant value all ranks compute the
 * same (a norm, a residual), so each rank has the whole gradient. */
typedef enum ar_placement_kind {
    AR_REPLICATE,   /* T; the gradient is Partial(sum) */
    AR_INVARIANT,   /* T; the gradient is invariant */
    AR_SHARD,       /* a part of T along a dimension; the gradient likewise */
    AR_PARTIAL_SUM, /* a term: T is the sum over the ranks; the gradient is replicated */
    AR_PARTIAL_MAX, /* T is the maximum over the ranks, element by element; it has no linear gradient */
    AR_PLACEMENT_KINDS
} ar_placement_kind;

/** Source: PyTorch's DTensor (torch.distributed.tensor), whose Replicate is the first two. A list of placements has
 *  one for each dimension of a mesh, outermost first; zeros are replicated. Where two dimensions shard the same
 *  dimension of the tensor, the outer one cuts it and the inner one cuts the parts. */
typedef struct ar_placement {
    ar_placement_kind kind;
    int dim; /* of a shard: the tensor's dimension, or if negative counted from its end (-1: the last) */
} ar_placement;

#define AR_PLACEMENT_TEXT 32
/** n placements out of a list with commas, in [], in () as Python prints tuples, or bare. Errors: AR_ERR_ARG (another
 *  number of them, one that is not a placement). */
AR_NODISCARD ar_status ar_placements_parse(ar_placement *p, int n, const char *text);

/** The part of a tensor of `shape` [ndim] that the rank at coordinates `coords` has: elements [start, start + extent) of
 *  every dimension. Parts are those of ari_split_uneven: ceil(n / size) elements, the last ones shorter or empty. uneven
 *  false: a dimension that does not divide is AR_ERR_INDIVISIBLE, with both dimensions and both numbers. Shapes: p, coords
 *  [mesh->ndim]; start, extent [ndim]; start may be NULL. Errors: AR_ERR_ARG (ndim, a coordinate, a placement),
 *  AR_ERR_INDIVISIBLE. On error nothing is written. */
AR_NODISCARD ar_status ar_placements_region(size_t *start, size_t *extent, const ar_mesh *mesh, const int *coords,
                                            const ar_placement *p, int ndim, const size_t *shape, bool uneven);

/* --- redistribution: the steps ------------------------------------------------------------------------------------ */

/** From one list of placements of a tensor to another. */
typedef struct ar_redistribution {
    int ndim;
    size_t shape[AR_MAX_DIMS];                         /* of the whole tensor */
    ar_placement from[AR_MESH_DIMS], to[AR_MESH_DIMS]; /* one for each dimension of the mesh */
} ar_redistribution;

/* One step along one mesh dimension of N ranks. */
typedef enum ar_move {
    AR_MOVE_SLICE,          /* R -> S: the own part; nothing moves */
    AR_MOVE_REDUCE_SCATTER, /* P -> S */
    AR_MOVE_ALL_REDUCE,     /* P -> R */
    AR_MOVE_ALL_TO_ALL,     /* S(a) -> S(b) */
    AR_MOVE_ALL_GATHER,     /* S -> R */
    AR_MOVE_FIRST,          /* R -> P(sum): rank 0 keeps the value, the others have zeros; nothing moves */
    AR_MOVE_PAD,            /* S -> P(sum): the own part among zeros; nothing moves */
    AR_MOVES
} ar_move;

typedef struct ar_redistribution_step {
    int dim; /* of the mesh */
    ar_move move;
    ar_placement from, to; /* along it, before and after */
} ar_redistribution_step;
#define AR_REDISTRIBUTION_STEPS (2 * AR_MESH_DIMS)

/** The redistribution of the gradient, for the backward pass: from the gradient of `to` to that of `from`. A
 *  redistribution changes no element of the whole tensor, so as a map of whole tensors it is the identity, and this is
 *  its transpose: <A x, y> = <x, A^T y>, each side the inner product of a whole value and a whole gradient. back may be
 *  r. Errors: AR_ERR_UNSUPPORTED (a P(max)). */
AR_NODISCARD ar_status ar_redistribution_backward(ar_redistribution *back, const ar_mesh *mesh,
                                                  const ar_redistribution *r);

AR_END_DECLS
#endif

/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_REDISTRIBUTE_H
#define ANYRANK_REDISTRIBUTE_H

#include "anyrank/context.h"
#include "anyrank/placement.h"

AR_BEGIN_DECLS

/** A mesh and this rank's communicator along each dimension, in which its rank is its coordinate. */
typedef struct ar_mesh_groups {
    ar_mesh mesh;                /* the device mesh */
    int coords[AR_MESH_DIMS];    /* this rank's coordinates in the mesh */
    ar_comm *comm[AR_MESH_DIMS]; /* owned by the struct */
} ar_mesh_groups;

/** Creates the communicators of a mesh by splitting `world`. Collective over world, with the same mesh on every rank,
 *  in the calling thread: no work may be enqueued on world. The caller releases *groups with ar_mesh_groups_fini before
 *  the rank's function returns. Errors: AR_ERR_ARG (an invalid mesh), AR_ERR_INDIVISIBLE (the mesh does not have
 *  world's number of ranks), AR_ERR_MISMATCH (another rank has another mesh), AR_ERR_MEMORY, those of the
 *  communicator. */
AR_NODISCARD ar_status ar_mesh_groups_init(ar_mesh_groups *groups, const ar_mesh *mesh, ar_comm *world);
/** Destroys the communicators; allowed also after ar_mesh_groups_init has failed. */
void ar_mesh_groups_fini(ar_mesh_groups *groups);

/** Redistributes a tensor: y is the same full tensor as x, placed as r->dst instead of r->src; a copy if both are
 *  equal. For the backward pass call it with the gradient and the result of ar_redistribution_backward.
 *  Source:   PyTorch's DTensor.redistribute; the conjugate operators of Shoeybi et al. 2019, arXiv:1909.08053 (f, f*),
 *            and Korthikanti et al. 2022, arXiv:2205.05198 (g, g*) are cases of it (parallelism.md).
 *  Shapes:   x is the rank's part under r->src, contiguous (ar_placements_region with `uneven` gives its shape);
 *            y becomes the part under r->dst, contiguous, of x's dtype, in step memory (context.h). y may be x.
 *  Numerics: without a reduction elements keep their bits, for all dtypes of whole bytes. P(sum) of I32 and I64 wraps.
 *            P(sum) of F32 in exact numerics uses the order-independent accumulator (numerics.md, section 3) and rounds
 *            once even if several mesh dimensions are summed, so that the bits depend neither on the mesh nor on the
 *            order of ranks; -0 becomes +0, also over one rank. P(sum) of F32, F64, BF16 and F16 in native numerics
 *            adds in the communicator's order. P(max): any dtype that reductions support (comm.h).
 *  Bytes:    sent by all N ranks of a group together, for a value of D bytes: all-gather and reduce-scatter (N-1)*D,
 *            all-reduce 2*(N-1)*D, all-to-all D minus what stays on its rank. For exact sums D is 17 bytes an element.
 *  Collective over the groups of the mesh dimensions that change, in the same order on every rank. tag: as in comm.h.
 *  Errors:   AR_ERR_SHAPE (x does not have the part's shape, or is not contiguous; names both shapes), AR_ERR_ARG (an
 *            invalid placement), AR_ERR_DTYPE (a sum or maximum that the dtype or the numerics do not support),
 *            AR_ERR_OVERFLOW, AR_ERR_MEMORY, those of the communicator. On error y is not written. */
AR_NODISCARD ar_status ar_redistribute(ar_ctx *ctx, const ar_mesh_groups *g, ar_tensor *y, const ar_tensor *x,
                                       const ar_redistribution *r, const char *tag);

/** A distributed tensor, like PyTorch's DTensor: a rank's local part with the full shape, the mesh and the placements.
 *  Plain data, which the caller fills; `local` has the shape that ar_placements_region gives. */
typedef struct ar_placed {
    ar_tensor local;                      /* this rank's part */
    size_t shape[AR_MAX_DIMS];            /* of the full tensor, [local.ndim] */
    const ar_mesh_groups *groups;         /* borrowed */
    ar_placement placement[AR_MESH_DIMS]; /* placement for each mesh dimension */
} ar_placed;
/** Redistributes a distributed tensor: *y is x, placed as `to_placements` [mesh dimensions]. For the backward pass
 *  redistribute y's gradient to the placements that x's gradient has (R and P(sum) swap). y may be x. Collective; tag
 *  and errors as for ar_redistribute; y->local is allocated in step memory. */
AR_NODISCARD ar_status ar_placed_redistribute(ar_ctx *ctx, ar_placed *y, const ar_placed *x,
                                              const ar_placement *to_placements, const char *tag);

AR_END_DECLS
#endif

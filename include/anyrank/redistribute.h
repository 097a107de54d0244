/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_REDISTRIBUTE_H
#define ANYRANK_REDISTRIBUTE_H

#include "anyrank/context.h"
#include "anyrank/placement.h"

AR_BEGIN_DECLS

/** A rank's groups of a mesh, one communicator for each dimension; its rank there is its coordinate. */
typedef struct ar_mesh_groups {
    ar_mesh mesh;
    int at[AR_MESH_DIMS];        /* the rank's coordinates */
    ar_comm *comm[AR_MESH_DIMS]; /* owned */
} ar_mesh_groups;

/** Splits a world into the groups of a mesh. Collective over `world`, with the same mesh on every rank; runs in the
 *  calling thread, as ari_comm_split does. ar_mesh_groups_fini, before the rank's function returns; also after an error
 *  it may be called. Errors: those of ari_mesh_check; AR_ERR_MISMATCH (other ranks have another mesh); those of
 *  ari_comm_split. */
AR_NODISCARD ar_status ar_mesh_groups_init(ar_mesh_groups *g, const ar_mesh *mesh, ar_comm *world);
void ar_mesh_groups_fini(ar_mesh_groups *g);

/** y = the same tensor as x, otherwise placed, by the steps of ari_redistribution_steps; a copy where there are none.
 *  For the backward pass call it with the gradient and ar_redistribution_backward.
 *  Source:   PyTorch's DTensor.redistribute; the conjugate operators of Shoeybi et al. 2019, arXiv:1909.08053 (f, f*),
 *            and Korthikanti et al. 2022, arXiv:2205.05198 (g, g*) are cases of it (parallelism.md).
 *  Shapes:   x, contiguous, is the rank's part by r->from, as ar_placements_region says with uneven parts; y,
 *            contiguous and of x's dtype, a fresh tensor of the step that is the part by r->to. y may be x.
 *  Numerics: what is not summed keeps its bits, of any dtype of whole bytes. P(sum) of I32 and I64: integers, which
 *            wrap. P(sum) of F32 in exact numerics: the order-independent accumulator (numerics.md, section 3),
 *            rounded once though several dimensions be summed, so that neither the mesh's shape nor the order of the
 *            ranks decides a bit; -0 becomes +0, also over one rank. F32, F64, BF16 and F16 in native numerics: the
 *            communicator's order. P(max): any dtype that reductions have (anyrank/comm.h).
 *  Bytes:    of all ranks of a group of N together, for a value of D bytes that the group has: all-gather and
 *            reduce-scatter (N-1)*D, all-reduce 2*(N-1)*D, all-to-all D less what stays on its rank; in a sum by
 *            accumulators D is 18 bytes an element for a reduce-scatter (16 and twice 1), 17 for an all-reduce.
 *  Collective over the groups of the dimensions that change, in the same order on every rank. tag: as in
 *  anyrank/comm.h.
 *  Errors:   AR_ERR_SHAPE (x is not the part, or not contiguous; names both shapes), AR_ERR_ARG (a placement),
 *            AR_ERR_DTYPE (a sum or maximum that the dtype or the numerics do not have, and why), AR_ERR_OVERFLOW,
 *            AR_ERR_MEMORY, what the communicator gives. On error y is not written. */
AR_NODISCARD ar_status ar_redistribute(ar_ctx *ctx, const ar_mesh_groups *g, ar_tensor *y, const ar_tensor *x,
                                       const ar_redistribution *r, const char *tag);

/** A tensor that knows where it is: a rank's part of it, what PyTorch's use_local_output gives, with the whole's shape,
 *  the mesh and a placement for each of its dimensions. Plain data. */
typedef struct ar_placed {
    ar_tensor local;
    size_t shape[AR_MAX_DIMS];    /* of the whole, of local.ndim dimensions */
    const ar_mesh_groups *groups; /* borrowed */
    ar_placement at[AR_MESH_DIMS];
} ar_placed;

AR_END_DECLS
#endif

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/placement.h"

/* Private functions of anyrank/placement.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** Checks that m is a mesh of `world` ranks. Errors: AR_ERR_ARG (no mesh, ndim, a size below 1, a name that is
 *  empty, longer than AR_MESH_NAME or used twice), AR_ERR_INDIVISIBLE (the product of the sizes is not `world`;
 *  names both). */
AR_NODISCARD ar_status ari_mesh_check(const ar_mesh *m, int world);
/** True if two meshes have the same names and sizes in the same order. */
bool ari_mesh_same(const ar_mesh *a, const ar_mesh *b);
/** Returns the dimension with that name; -1: there is none. */
int ari_mesh_find(const ar_mesh *m, const char *name);
/** Computes the rank's coordinate along each dimension: coords [ndim]. */
void ari_mesh_coords(const ar_mesh *m, int rank, int *coords);
/** Writes the ranks of `rank`'s group along dimension `dim`, in order, up to `cap`. Returns their number, 0 if there is
 *  no such dimension. For {dp 4, tp 4} the tp groups are {0..3}, {4..7}, .. and the dp groups {0,4,8,12}, {1,5,9,13},
 *  .. */
int ari_mesh_group(const ar_mesh *m, int rank, int dim, int *ranks, int cap);
/** "R", "I", "S(1)", "S(-1)", "P(sum)", "P(max)"; "?" for another kind. Returns `text`. */
const char *ari_placement_name(char text[AR_PLACEMENT_TEXT], ar_placement p);
/** Parses a placement as this project or PyTorch writes it: "Replicate()", "Shard(1)", "Shard(dim=1)", "Partial()",
 *  "Partial(sum)", "P" and "Invariant()"; surrounding spaces are ignored. Errors: AR_ERR_ARG (lists the valid
 *  forms). */
AR_NODISCARD ar_status ari_placement_read(ar_placement *p, const char *text);
/** "[S(0), R]" of n placements. Cut to `cap` bytes. Returns `text`. */
const char *ari_placements_text(char *text, size_t cap, const ar_placement *p, int n);
/** Checks that a tensor of `ndim` dimensions can have this placement. Errors: AR_ERR_ARG (names the placement and the
 *  valid range of dim). */
AR_NODISCARD ar_status ari_placement_check(ar_placement p, int ndim);
/** True if two placements of a tensor of `ndim` dimensions are equal, S(-1) and S(ndim - 1) included. */
bool ari_placement_same(ar_placement a, ar_placement b, int ndim);
/** Returns the placement of a value's gradient (ar_placement_kind): R and P(sum) are exchanged, I and S stay. Applied
 *  twice it is the identity. Errors: AR_ERR_UNSUPPORTED (a maximum). */
AR_NODISCARD ar_status ari_placement_gradient(ar_placement *g, ar_placement p);
/** Describes the placements as a layout: one box, or none if the part is empty. Replicas are the ranks along replicated
 *  dimensions in row-major order; the terms of a partial tensor are not copies and do not count. Errors: those of
 *  ar_placements_region. */
AR_NODISCARD ar_status ari_placements_layout(ar_layout *o, const ar_mesh *mesh, const int *coords,
                                             const ar_placement *p, int ndim, const size_t *shape, bool uneven);
/** Computes the steps of a redistribution in the order in which ar_redistribute takes them; `steps` has room for
 *  AR_REDISTRIBUTION_STEPS. R, I and P(max) of a value that all ranks have are equal numbers: no step. P(sum) and
 *  P(max) are converted through R. The cheapest possible step comes first: steps without communication, then steps that
 *  complete partial values, then steps that make values larger; among equals the outermost dimension. A shard that an
 *  inner dimension splits further can change only before that inner split or after it is undone, so the inner dimension
 *  is gathered where necessary.
 *  Errors: AR_ERR_ARG (ndim, a placement, P(sum) and P(max) in one list: they do not commute). */
AR_NODISCARD ar_status ari_redistribution_steps(ar_redistribution_step *steps, size_t *n, const ar_mesh *mesh,
                                                const ar_redistribution *r);

AR_END_DECLS

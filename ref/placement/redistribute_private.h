/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/redistribute.h"

/* Functions of anyrank/redistribute.h for the library, the command and the tests alone. */

AR_BEGIN_DECLS

/** ar_redistribute from where x is: y is at `to`, a placement for each dimension of the mesh. The gradient of x is that of
 *  y redistributed to ari_placement_gradient of x's placements. y may be x. Errors: those. */
AR_NODISCARD ar_status ari_placed_redistribute(ar_ctx *ctx, ar_placed *y, const ar_placed *x, const ar_placement *to,
                                               const char *tag);

AR_END_DECLS

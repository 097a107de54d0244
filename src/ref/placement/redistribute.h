/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/arith.h"
#include "anyrank/redistribute.h"

/** ar_redistribute with the sums of F32 terms of another arithmetic than the context's. */
AR_NODISCARD ar_status ari_redistribute(ar_ctx *ctx, const ar_mesh_groups *g, ar_tensor *y, const ar_tensor *x,
                                        const ar_redistribution *r, const ar_arith_ops *sums, const char *tag);

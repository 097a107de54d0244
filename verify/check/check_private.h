/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/check.h"

/* Private functions of anyrank/check.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** Lists the tensors of step 1 in execution order, from the baseline's own run of that step. Layouts are ignored.
 *  Errors: those of ar_check. */
AR_NODISCARD ar_status ari_check_tensors(const ar_check_options *o, ar_check_tensor_fn emit, void *user);
/** Returns the default number of tokens per sequence: 64, or the next number that fits, and at most what the model
 *  supports. p: the number must be divisible as this layout needs. NULL, for the default layouts and a sweep: 72 if the
 *  heads can be sharded over 3 ranks, so that sp works over 2, 3, 4, 6 and 8. */
size_t ari_check_default_seq(const ar_config *c, const ar_parallel *p);
/** Returns the default capacity of a bucket: an eighth of the model's gradients, so that a model of any size has
 *  several buckets, and at most AR_BUCKET_BYTES. Bits do not depend on it. */
size_t ari_check_default_bucket_bytes(const ar_config *c);
/** Writes the layouts that `anyrank check` runs by default: those of a fixed list that are legal for the model and the
 *  batch, or one rank if none is. If 3 divides the heads it is the list with 3 and 6 tensor-parallel ranks, otherwise
 *  the one with 2, 4 and 8. Returns their number, at most cap. */
size_t ari_check_default_layouts(const ar_config *c, const ar_plan *plan, size_t batch, size_t seq, ar_parallel *p,
                                 size_t cap);
/** Writes every legal layout of at most `world` ranks in which every rank has a sample, by world size: all extents,
 *  pipelines with alternating schedules, context-parallel ranks with every inner extent; each also with sp if there are
 *  tensor-parallel ranks, with micro-batches of 2 if a rank has that many samples, with ZeRO if several ranks reduce
 *  gradients, and with zigzag if there is a ring. Returns how many there are; writes at most cap. */
size_t ari_check_sweep(const ar_config *c, const ar_plan *plan, size_t batch, size_t seq, int world, ar_parallel *p,
                       size_t cap);

AR_END_DECLS

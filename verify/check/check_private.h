/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/check.h"

/* Private functions of anyrank/check.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** Lists the tensors of step 1 in execution order, from the baseline's own run of that step. Layouts are not looked at.
 *  Errors: those of ar_check. */
AR_NODISCARD ar_status ari_check_tensors(const ar_check_options *o, ar_check_tensor_fn emit, void *user);
/** The tokens of a sequence where nobody says how many: 64, or the next number that fits, and no more than the model
 *  holds. p given: what it can share out. NULL, for the default layouts and a sweep: 72 where the heads can be
 * split over 3 ranks, so that sp over 2, 3, 4, 6 and 8 has its place. */
size_t ari_check_default_seq(const ar_config *c, const ar_parallel *p);
/** The capacity of a bucket where nobody names one: an eighth of the model's gradients, so that a model of any size has
 *  several of them, and at most AR_BUCKET_BYTES. Bits do not depend on it. */
size_t ari_check_default_bucket_bytes(const ar_config *c);
/** The layouts that `anyrank check` takes by default: those of a fixed list that are legal for the model and the batch,
 *  or one rank if none is. Heads that divide by 3 take the list with 3 and 6 tensor-parallel ranks, others that with 2,
 *  4 and 8. Returns how many, at most cap. */
size_t ari_check_default_layouts(const ar_config *c, const ar_plan *plan, size_t batch, size_t seq, ar_parallel *p,
                                 size_t cap);
/** Every legal layout of at most `world` ranks that leaves none without a sample, by world size: all extents, pipelines
 *  under the schedules in turn, context-parallel ranks with every inner extent, each with sp where there are
 *  tensor-parallel ranks, with micro-batches of 2 where a rank has that many samples, with zero where several ranks sum
 *  gradients, and with zigzag where there is a ring. Returns how many there are; writes at most cap. */
size_t ari_check_sweep(const ar_config *c, const ar_plan *plan, size_t batch, size_t seq, int world, ar_parallel *p,
                       size_t cap);

AR_END_DECLS

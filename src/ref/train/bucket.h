/* SPDX-License-Identifier: Apache-2.0 */
/* The buckets of a data-parallel object. */
#pragma once

#include "ref/train/ddp.h"

/** Storage of the buckets and of the gradients in them: all memory that reductions will take. */
AR_NODISCARD ar_status ari_buckets_alloc(ar_ddp *d);
void ari_buckets_free(ar_ddp *d);
/** The way of bucket `b` (an ari_bucket) on the queue that carries it. */
AR_NODISCARD ar_status ari_bucket_run(void *b, ar_queue *on);
/** The slices of each bucket in which its gradients can be made; and whether they are in this step. */
AR_NODISCARD ar_status ari_buckets_slice(ar_ddp *d);
void ari_ddp_choose_slices(ar_ddp *d);
/** True if a step adds nothing to what ranks sum up of their shares: of those buckets of which slices can be made. */
bool ari_shares_complete(const ar_ddp *d);
extern const ar_module_ops ari_ddp_ops;
/** Refuses a hook that the numerics do not have. */
AR_NODISCARD ar_status ari_ddp_check_hook(const ar_ctx *ctx, const ar_ddp_options *o);
/** Lets the hook replace the gradients of a bucket: terms, before they are summed, or the sums. */
AR_NODISCARD ar_status ari_ddp_hook(const ar_ddp *d, const ari_bucket *b, bool terms);
/** Sets what of each gradient of the bucket is this rank's. */
void ari_bucket_share(const ari_bucket *b);
/** The own slice, which is the sum over the ranks that share the bucket, summed over those that have the same slice. */
AR_NODISCARD ar_status ari_bucket_complete(const ari_bucket *b, ar_queue *q);

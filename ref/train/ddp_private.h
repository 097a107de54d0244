/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/ddp.h"

/* Private functions of anyrank/ddp.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** Returns the options with which it was created. */
ar_ddp_options ari_ddp_options_of(const ar_ddp *d);
/** i < ar_ddp_buckets. */
ar_bucket_info ari_ddp_bucket(const ar_ddp *d, size_t i);
/** Checks that either every parameter of a bucket or none got a gradient here, unless find_unused is set. Ranks that
 *  miss nothing get the error too, because they are about to wait for this one. Errors: AR_ERR_DATA. */
AR_NODISCARD ar_status ari_ddp_check_used(const ar_ddp *d);
/** Returns the bytes of the storage that all buckets share in turn (with ZeRO-2 and -3 it exists only during
 *  reductions), of separate slices, and of the buffers for their sums over ranks. */
size_t ari_ddp_bytes(const ar_ddp *d);
/** Returns the bytes of gradients in a step in addition to those that are kept: of two buckets, one being filled and
 *  one being reduced, or of all buckets if several backward passes add to them or ranks have different numbers of
 *  samples. */
size_t ari_ddp_open_bytes(const ar_ddp *d);

AR_END_DECLS

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/ddp.h"

/* Private functions of anyrank/ddp.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** The options it was made with. */
ar_ddp_options ari_ddp_options_of(const ar_ddp *d);
/** i < ar_ddp_buckets. */
ar_bucket_info ari_ddp_bucket(const ar_ddp *d, size_t i);
/** Checks that every parameter of a bucket got a gradient here, or none did, unless find_unused is on. Ranks to which
 *  nothing is missing learn of it: they are about to wait for this one. Errors: AR_ERR_DATA. */
AR_NODISCARD ar_status ari_ddp_check_used(const ar_ddp *d);
/** Bytes of the storage that all buckets share, one after the other, which with ZeRO-2 and -3 exists during reductions
 *  alone, of slices kept apart, and of the room of their sums over ranks. */
size_t ari_ddp_bytes(const ar_ddp *d);
/** Bytes that gradients have in a step besides those that they keep: of two buckets that are being filled and reduced, or
 *  of all where several backward passes add to them or ranks differ in samples. */
size_t ari_ddp_open_bytes(const ar_ddp *d);

AR_END_DECLS

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/verify.h"

/* Private functions of anyrank/verify.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** Gives tensors of the other dump the reference's names and parts, as a comparison does: without the names of wrappers
 *  ("module.", "_orig_mod."), experts one by one where one of the dumps has a layer's together, samples in the
 *  reference's order, once. Errors: AR_ERR_FORMAT (a dump says of its samples what is no JSON), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_verify_align(ar_dump *reference, ar_dump *candidate);

AR_END_DECLS

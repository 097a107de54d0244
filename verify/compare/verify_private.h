/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/verify.h"

/* Private functions of anyrank/verify.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** Gives tensors of the other dump the reference's names and parts, as a comparison does: without wrappers' names
 *  ("module.", "_orig_mod."), with separate experts if one dump stacks those of a layer, and with each sample once in
 *  the reference's order. Errors: AR_ERR_FORMAT (a dump's samples are invalid JSON), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_verify_align(ar_dump *reference, ar_dump *candidate);

AR_END_DECLS

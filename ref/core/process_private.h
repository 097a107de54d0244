/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/process.h"

/* Private functions of anyrank/process.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** "sim", "mpi", "nccl"; "?" for an unknown value. */
const char *ari_transport_name(ar_transport t);

AR_END_DECLS

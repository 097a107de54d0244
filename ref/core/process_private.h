/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/process.h"

/* Functions of anyrank/process.h for the library, the command and the tests alone. */

AR_BEGIN_DECLS

/** "sim", "mpi", "nccl"; "?" for an unknown value. */
const char *ari_transport_name(ar_transport t);

AR_END_DECLS

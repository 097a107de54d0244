/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/process.h"

/* Private functions of anyrank/process.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** The library that a transport stands on and its version, or why this build or this machine has none; truncates.
 *  Returns whether there is one. AR_TRANSPORT_SIM needs none. */
bool ari_transport_describe(ar_transport t, char *text, size_t size);

struct ari_thread_ranks; /* gpu/cluster/process/process.h */
/** The process of one of the ranks that are threads of this process, which NCCL connects. That rank's thread creates it,
 *  uses it, and destroys it with ar_process_destroy. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_process_thread_create(ar_process **out, struct ari_thread_ranks *t, int rank,
                                                 const ar_process_options *o);

AR_END_DECLS

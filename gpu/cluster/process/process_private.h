/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/process.h"

/* Private functions of anyrank/process.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** NULL: AR_TRANSPORT_SIM. */
ar_transport ari_process_transport(const ar_process *p);
int ari_process_size(const ar_process *p);
/** The number among the processes of this machine: the GPU to take. */
int ari_process_local_rank(const ar_process *p);
/** bytes[0..n) of process 0 to all. */
AR_NODISCARD ar_status ari_process_broadcast(ar_process *p, void *bytes, size_t n);
/** Every process's n bytes (each its own n) to process 0: *gives holds them one after the other, sizes[0..size) how
 * many each gave; free(). Elsewhere *gives = NULL, and sizes may be NULL. Errors: also AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_process_gather(ar_process *p, void **gives, size_t *sizes, const void *bytes, size_t n);
/** Ends all processes' work with this error: every one gets AR_ERR_ABORTED, with `why`, from what it waits in. */
void ari_process_abort(ar_process *p, ar_status st, const char *why);

AR_END_DECLS

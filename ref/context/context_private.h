/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/context.h"

/* Private functions of anyrank/context.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** Returns the index of this rank among the data-parallel ranks with different samples. */
int ari_ctx_data_rank(const ar_ctx *c);
/** Counts bytes of other ranks' memory that this rank read and wrote through the context's groups, including groups
 *  created by the context (KV replicas). */
void ari_ctx_counted(const ar_ctx *c, uint64_t *bytes_read, uint64_t *bytes_written);
/** Returns the number of this rank's calls of one kind through the same groups (ari_comm_calls). */
uint64_t ari_ctx_calls(const ar_ctx *c, const char *kind);
/** Returns the dtype of new activations (ari_activations_of). Layers use the dtype of their input. */
ar_dtype ari_ctx_activations(const ar_ctx *c);
/** Sets the position of a batch's rows in the global batch, which taps of activations [samples, ..] report until the
 *  next call. NULL, or a batch with global_batch 0: there are no other rows. Modules call it with the batch that they
 *  get. */
void ari_ctx_place_batch(ar_ctx *c, const ar_batch *batch);
/** Reports a value to the listener, if there is one. The arguments are those of ar_tap_event. Errors: those of the
 *  listener. */
AR_NODISCARD ar_status ari_tap(ar_ctx *c, const char *name, char pass, const ar_tensor *local, const ar_layout *layout);
/** True if there is a listener (to save the work of preparing a tap). */
bool ari_tapped(const ar_ctx *c);
/** Returns true if this fault is on. Layers use this function only to ask for faults. */
bool ari_faulty(const ar_ctx *c, const char *fault);

AR_END_DECLS

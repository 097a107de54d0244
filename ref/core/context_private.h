/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/context.h"

/* Private functions of anyrank/context.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** The dtype of activations in this precision: AR_BF16 or AR_F32. */
ar_dtype ari_activations_of(ar_precision p);
/** Returns the dtype of two-dimensional parameters in this precision, given the requested `storage` (0: none
 *  requested). */
ar_dtype ari_matrix_dtype(ar_precision p, ar_dtype storage);
/** "none", "selective", "full"; "?" for an unknown value. Static storage. */
const char *ari_recompute_name(ar_recompute r);
/** "all-to-all", "all-gather"; "?". Static storage. */
const char *ari_dispatch_name(ar_dispatch d);
/** Refuses label smoothing outside [0, 1), and a z-loss that is negative or not finite. label: names the options in the
 *  message. Errors: AR_ERR_ARG. */
AR_NODISCARD ar_status ari_loss_options_check(const ar_loss_options *o, const char *label);

AR_END_DECLS

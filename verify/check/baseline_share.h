/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_VERIFY_CHECK_BASELINE_SHARE_H
#define ARI_VERIFY_CHECK_BASELINE_SHARE_H

#include "verify/check/check_baseline.h"

/** ari_check_baseline where ranks are processes: process 0 runs it, and all get what it gives. The others wait as long
 *  as it takes: they hear that it is under way. Errors: process 0's, on all; those of the processes; AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_check_baseline_shared(ari_reference *ref, float *loss, double *max_error,
                                                 const ari_baseline_case *c);

#endif

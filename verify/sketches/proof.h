/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "verify/sketches/sketches.h"

/** Refuses a verdict "same" for which nothing meaningful was compared. The rules are those for dumps
 *  (verify/compare/verify_proof.h). Errors: AR_ERR_DATA. */
AR_NODISCARD ar_status ari_sketches_refuse_dead(const ari_sketch_report *r, const ar_verify_options *o);

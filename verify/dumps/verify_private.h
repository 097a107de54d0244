/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/verify.h"

/* Functions of anyrank/verify.h for the library, the command and the tests alone. */

AR_BEGIN_DECLS

/** ar_verify without the explanation: verdict and figures are final, and ari_verify_explain may follow. Errors: those of
 *  ar_verify, but for the explanation's. */
AR_NODISCARD ar_status ari_verify_compare(ar_verify_report **out, const ar_verify_options *o);

/** Gives tensors of the other dump the reference's names and parts, as a comparison does: without the names of wrappers
 *  ("module.", "_orig_mod."), experts one by one where one of the dumps has a layer's together. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_verify_align(ar_dump *reference, ar_dump *other);
/** Explains a report that differs: fills `facts` and, of some rows, `pattern`, `hint` and `evidence`; `first` may move
 *  past rounding. The verdict does not depend on it. Errors: AR_ERR_ARG (no report, or one that was tried before),
 *  AR_ERR_MEMORY, those of reading; then `explained` stays false. */
AR_NODISCARD ar_status ari_verify_explain(ar_verify_report *r);
/** Writes the report as one HTML page that needs no network. Errors: AR_ERR_IO, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_verify_html(const ar_verify_report *r, const char *path);

AR_END_DECLS

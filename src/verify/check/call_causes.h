/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_VERIFY_CHECK_CALL_CAUSES_H
#define ARI_VERIFY_CHECK_CALL_CAUSES_H

/* What kind of difference it is: identifiers of causes.md, no values but calls having shown them. */
typedef enum ari_call_cause { ARI_CALL_REPEATED, ARI_CALL_ADDED, ARI_CALL_LEFT_OUT, ARI_CALL_CAUSES } ari_call_cause;
extern const char *const ari_call_causes[ARI_CALL_CAUSES];

#endif

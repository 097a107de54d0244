/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_VERIFY_CHECK_CALL_CAUSES_H
#define ARI_VERIFY_CHECK_CALL_CAUSES_H

/* Causes of a difference in calls alone: identifiers of causes.md for runs whose values all agree. */
typedef enum ari_call_cause { ARI_CALL_REPEATED, ARI_CALL_ADDED, ARI_CALL_LEFT_OUT, ARI_CALL_CAUSES } ari_call_cause;
extern const char *const ari_call_causes[ARI_CALL_CAUSES];

#endif

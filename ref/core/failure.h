/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CORE_FAILURE_H
#define ARI_CORE_FAILURE_H

#include "anyrank/queue.h"

/* A status and its message, to be carried to another thread or process. */
typedef struct ari_outcome {
    ar_status status;
    char message[1024]; /* "": AR_OK */
} ari_outcome;
/** st, with this thread's message. */
ari_outcome ari_outcome_of(ar_status st);
/** The status, whose message becomes this thread's. */
ar_status ari_outcome_status(const ari_outcome *o);

/* A failure that may come at any time from outside of a queue and ends what is under way on its stream: that of a
 * communicator whose data a device moves. A wait that would then say that all is well says this instead. Counted
 * references; from any thread. */
typedef struct ari_failure ari_failure;

/** Gives one that has not come. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_failure_create(ari_failure **gives);
ari_failure *ari_failure_keep(ari_failure *f);
/** Accepts NULL. */
void ari_failure_release(ari_failure *f);
/** It has come; the first call wins. */
void ari_failure_set(ari_failure *f, ar_status st, const char *message);
/** AR_OK, or what has come; *message lives as long as f. */
ar_status ari_failure_get(const ari_failure *f, const char **message);

/** From now on the failure is q's too: its waits and what is enqueued on it end with it. The last one given counts. */
void ari_queue_heed(ar_queue *q, ari_failure *f);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_SIM_CRITICAL_PATH_H
#define ARI_SIM_CRITICAL_PATH_H

#include "sim/trace_view.h"

/* What a stretch of the critical path was. */
typedef enum ari_path_kind { ARI_PATH_COMPUTE, ARI_PATH_COMMUNICATION, ARI_PATH_WAIT, ARI_PATH_KINDS } ari_path_kind;

typedef struct ari_path_step {
    ari_path_kind kind;
    size_t lane;               /* of the view: where it ran */
    uint64_t begin_ns, end_ns; /* from the view's start */
    const ari_record *record;  /* of a collective; else NULL */
} ari_path_step;

/** The critical path: from the last end back to the first begin, at every moment what decided it. The steps, the last
 *  one in time first, touch each other: together they are the whole run. Gives; free(). Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_critical_path(ari_path_step **gives, size_t *count, const ari_trace_view *v);

#endif

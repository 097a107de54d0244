/* SPDX-License-Identifier: Apache-2.0 */
/* Parts of a step's time that the layouts of a mesh share, so that the list of operations is walked once for each. */
#ifndef ARI_PLANNER_PARTS_H
#define ARI_PLANNER_PARTS_H

#include "planner/search.h"
#include "planner/time_impl.h"

enum { ARI_PARTS_MICRO = 96, ARI_PARTS_PIPELINES = 18 };

/* Passes by sp and micro-batches; sums by sp, by whether optimizer states are shared, and by pipeline. */
typedef struct ari_form_parts {
    ari_passes *passes[2][ARI_PARTS_MICRO];
    ari_outside *outside[2][2][ARI_PARTS_PIPELINES];
} ari_form_parts;
typedef struct ari_mesh_parts {
    ari_form_parts *
        *form; /* [n], of the same mesh: ways to join its context-parallel ranks, and to share experts out */
    size_t n, room;
    ar_pipeline_schedule *schedule[ARI_PARTS_MICRO][ARI_PARTS_PIPELINES]; /* of all forms */
} ari_mesh_parts;

/** Begins a form. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_mesh_parts_add(ari_mesh_parts *a);
/** Forgets all of them, before another mesh or at the end. */
void ari_mesh_parts_forget(ari_mesh_parts *a);
/** The seconds that a layout takes at least; p: the candidate's choice. Errors: as of ari_time_of. */
AR_NODISCARD ar_status ari_mesh_parts_least(double *seconds, ari_mesh_parts *a, const ari_candidate *f,
                                            const ari_planned *p, const ari_time_options *o);
/** Its time. Errors: as of ari_time_of. */
AR_NODISCARD ar_status ari_mesh_parts_time(ari_time *t, ari_mesh_parts *a, const ari_candidate *f, const ari_planned *p,
                                           const ari_time_options *o);

#endif

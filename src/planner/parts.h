/* SPDX-License-Identifier: Apache-2.0 */
/* Parts of a step's time and memory that the layouts of a mesh share, so that the list of operations is walked once for
 * each. */
#ifndef ARI_PLANNER_PARTS_H
#define ARI_PLANNER_PARTS_H

#include "planner/search.h"
#include "planner/time_impl.h"

/* SHARED: the passes of ZeRO-2 and 3 have operations of their own, and with replicas others. */
enum { ARI_PARTS_MICRO = 96, ARI_PARTS_PIPELINES = 18, ARI_PARTS_SHARED = 4, ARI_PARTS_LISTS = 64 };

/* The passes of a micro-batch, which all layouts of the same tp and cp have whose ranks do the same in it. */
typedef struct ari_shared_passes ari_shared_passes;

/* Of layouts whose context-parallel ranks are joined in one way, that share out experts in one, and sequences: passes by
 * micro-batches; sums by whether optimizer states are shared, and by pipeline; memory by recomputation. */
typedef struct ari_family_parts {
    ari_passes *passes[ARI_PARTS_MICRO]; /* of those below */
    ari_outside *outside[2][ARI_PARTS_PIPELINES];
    double alone[ARI_PARTS_PIPELINES][ARI_PARTS_MICRO][AR_RECOMPUTES]; /* seconds of schedules without transfers; 0 */
    ari_sections *sections[ARI_PARTS_MICRO][ARI_PARTS_SHARED][AR_RECOMPUTES];
} ari_family_parts;
typedef struct ari_mesh_parts {
    int tp, cp;
    ari_shared_passes *passes[ARI_PARTS_LISTS]; /* by their samples */
    ari_family_parts **family;                  /* [n], of the same mesh */
    size_t n, room;
    ar_pipeline_schedule *schedule[ARI_PARTS_MICRO][ARI_PARTS_PIPELINES]; /* of all families */
    size_t operations;                                                    /* of them, roughly */
    ar_pipeline_schedule *few[ARI_PARTS_PIPELINES][ARI_PARTS_MICRO];      /* of as many micro-batches as memory needs */
} ari_mesh_parts;

/** Begins a family. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_mesh_parts_add(ari_mesh_parts *a);
/** Forgets all of them, and passes of another tp or cp, before a mesh or at the end (0). */
void ari_mesh_parts_begin(ari_mesh_parts *a, int tp, int cp);
/** The passes of a family's i-th number of micro-batches; p: a layout of both. Borrows. Errors: as of ari_time_of. */
AR_NODISCARD ar_status ari_mesh_parts_passes(ari_passes **borrows, ari_mesh_parts *a, size_t family, int i,
                                             const ari_planned *p, const ari_time_options *o);
/** The seconds of a candidate's schedule without transfers. Errors: as of ari_time_alone, ar_parallel_schedule. */
AR_NODISCARD ar_status ari_mesh_parts_alone(double *seconds, ari_mesh_parts *a, const ari_candidate *f,
                                            const ari_planned *p, const ari_time_options *o);
/** The time of a candidate; p: its choice. Errors: as of ari_time_of. */
AR_NODISCARD ar_status ari_mesh_parts_time(ari_time *t, ari_mesh_parts *a, const ari_candidate *f, const ari_planned *p,
                                           const ari_time_options *o);
/** Its memory; `enough` as of ari_sections_memory. Errors: as of ari_memory_production. */
AR_NODISCARD ar_status ari_mesh_parts_memory(ari_memory *m, ari_mesh_parts *a, const ari_candidate *f,
                                             const ari_planned *p, double enough);

#endif

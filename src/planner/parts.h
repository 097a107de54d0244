/* SPDX-License-Identifier: Apache-2.0 */
/* Parts of a step's time and memory that the layouts of a mesh share, so that the list of operations is walked once for
 * each. */
#ifndef ARI_PLANNER_PARTS_H
#define ARI_PLANNER_PARTS_H

#include "planner/search.h"
#include "planner/time_impl.h"

enum { ARI_PARTS_MICRO = 96, ARI_PARTS_PIPELINES = 18, ARI_PARTS_LISTS = 256 };

/* Those of one mesh, of which each is made when it is asked for first; what its micro-batches take and keep is that of all
 * meshes of its tp and cp, since the groups that call in them lie within those of dp and pp. */
typedef struct ari_mesh_part ari_mesh_part;
typedef struct ari_mesh_parts {
    int tp, cp;
    ari_mesh_part *list[ARI_PARTS_LISTS]; /* by what tells them apart */
    size_t operations;                    /* of the schedules, roughly */
} ari_mesh_parts;

/** Forgets what no layout of the next mesh has, or at the end (0) all. */
void ari_mesh_parts_begin(ari_mesh_parts *a, int tp, int cp);
/** The passes of a layout's micro-batches. Borrows. Errors: as of ari_time_of. */
AR_NODISCARD ar_status ari_mesh_parts_passes(const ari_passes **borrows, ari_mesh_parts *a, const ari_planned *p,
                                             const ari_time_options *o);
/** The seconds of its schedule without transfers. Errors: as of ari_time_alone, ar_parallel_schedule. */
AR_NODISCARD ar_status ari_mesh_parts_alone(double *seconds, ari_mesh_parts *a, const ari_planned *p,
                                            const ari_time_options *o);
/** Its time; alone: as of ari_time_compose. Errors: as of ari_time_of. */
AR_NODISCARD ar_status ari_mesh_parts_time(ari_time *t, ari_mesh_parts *a, const ari_planned *p,
                                           const ari_time_options *o, double alone);
/** Its memory; `enough` as of ari_sections_memory. Errors: as of ari_memory_production. */
AR_NODISCARD ar_status ari_mesh_parts_memory(ari_memory *m, ari_mesh_parts *a, const ari_planned *p, double enough);

#endif

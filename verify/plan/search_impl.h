/* SPDX-License-Identifier: Apache-2.0 */
/* The search through one mesh after the other: its layouts (search.c), and the best of them (best.c). */
#pragma once

#include <stdint.h>

#include "verify/plan/search.h"
#include "verify/plan/time_impl.h"

/* --- parts of times and memories (parts.c) ------------------------------------------------------------------------ */

/* Parts of a step's time and memory that the layouts of a mesh share, so that the list of operations is walked once for
 * each. */
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
/** The seconds of its schedule without transfers. Errors: as of ari_time_alone, ari_parallel_schedule. */
AR_NODISCARD ar_status ari_mesh_parts_alone(double *seconds, ari_mesh_parts *a, const ari_planned *p,
                                            const ari_time_options *o);
/** Its time; alone: as of ari_time_compose. Errors: as of ari_time_of. */
AR_NODISCARD ar_status ari_mesh_parts_time(ari_time *t, ari_mesh_parts *a, const ari_planned *p,
                                           const ari_time_options *o, double alone);
/** Its memory; `enough` as of ari_sections_memory. Errors: as of ari_memory_production. */
AR_NODISCARD ar_status ari_mesh_parts_memory(ari_memory *m, ari_mesh_parts *a, const ari_planned *p, double enough);

/* --- the search --------------------------------------------------------------------------------------------------- */

/* ZeRO 0 to 3 and 3 with replicas, each with every kind of recomputation. */
enum { ARI_MOST_VARIANTS = 5 * AR_RECOMPUTES, ARI_MOST_DIVISORS = 512 };

/* Order in which a pipeline's ranks process their layers. */
typedef struct ari_seeker_pipeline {
    int virtual_stages;
    ar_pp_schedule schedule;
} ari_seeker_pipeline;

/* Layouts that differ in micro-batches, pipeline, ZeRO, replicas and recomputation alone. */
typedef struct ari_layout_family {
    ari_choice choice;
    int hybrid;  /* replicas that ZeRO-3 can have, each within a node; 1: none */
    int sharers; /* ranks that ZeRO can share out to */
} ari_layout_family;

typedef struct ari_seeker {
    const ari_search *s;
    ari_ranking *r;
    ari_choice mesh;
    int micro[ARI_PARTS_MICRO], micros;
    ari_seeker_pipeline pipeline[ARI_PARTS_PIPELINES];
    int pipelines;
    int divisor[ARI_MOST_DIVISORS], divisors; /* of the ranks */
    ari_layout_family *family;                /* [families] of the mesh */
    size_t families, family_room;
    uint16_t *legal; /* [families][micros][pipelines]: bits of the variants that are */
    size_t groups, legal_room;
    ari_candidate *light; /* [lights]: the lightest of the mesh, equally light by what they share and recompute */
    size_t lights, light_room;
    ari_candidate *variant; /* [n]: those that were looked at; with `every` all */
    size_t n, room;
    ari_mesh_parts parts;
    double enough; /* seconds beyond which a layout is not asked for; INFINITY */
} ari_seeker;

/** A group: all layouts of a family with a number of micro-batches and a pipeline. Writes its variants, whose order is
 *  that of the search, and returns how many. */
int ari_seeker_variants(ari_choice of[ARI_MOST_VARIANTS], const ari_seeker *k, size_t group);
/** Computes a candidate's time, and its memory; not exactly: of one that does not fit only that it does not. Errors:
 *  those of ari_time_of and ari_memory_production. */
AR_NODISCARD ar_status ari_seeker_settle(ari_seeker *k, ari_candidate *f);
AR_NODISCARD ar_status ari_seeker_weigh(ari_seeker *k, ari_candidate *f, bool exactly);
/** Lists a candidate. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_seeker_keep(ari_ranking *r, const ari_candidate *f);
/** Remembers it if it is the fastest legal one so far. */
void ari_seeker_note(ari_ranking *r, const ari_candidate *f);
/** Lists the fastest of the mesh that fits, or where none does the one that needs least. Of equally fast ones it is
 *  always the same. Errors: as above. */
AR_NODISCARD ar_status ari_seeker_best(ari_seeker *k);

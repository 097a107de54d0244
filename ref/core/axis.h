/* SPDX-License-Identifier: Apache-2.0 */
/* Axes of a layout as values: code loops over them, or asks for those along which something is sharded. */
#pragma once

#include "anyrank/parallel.h"
#include "anyrank/placement.h"

AR_BEGIN_DECLS

/* Axes of a layout, the outermost first, which is their order in a rank's number. Context-parallel ranks lie along two
 * axes: the positions of a ring, and the neighbours that exchange heads for positions (ar_parallel). */
enum { ARI_AXIS_PP, ARI_AXIS_DP, ARI_AXIS_RING, ARI_AXIS_INNER, ARI_AXIS_TP, ARI_PLACED_AXES };
/** "dp", "cp_ring". Static storage. */
const char *ari_axis_name(int axis);

/* Set of axes, one bit each, named by what is sharded along them. */
typedef unsigned ari_axes;
enum {
    ARI_CUTS_LAYERS = 1 << ARI_AXIS_PP,
    ARI_CUTS_SAMPLES = 1 << ARI_AXIS_DP,
    ARI_CUTS_POSITIONS = 1 << ARI_AXIS_RING | 1 << ARI_AXIS_INNER,
    ARI_CUTS_FEATURES = 1 << ARI_AXIS_TP,
    /* Ranks along these axes have the same parameters, whose gradients are summed over them. */
    ARI_CUTS_DATA = ARI_CUTS_SAMPLES | ARI_CUTS_POSITIONS,
    /* Ranks along these axes have different parameters. */
    ARI_CUTS_MODEL = ARI_CUTS_LAYERS | ARI_CUTS_FEATURES,
    ARI_ALL_AXES = (1 << ARI_PLACED_AXES) - 1
};

/* Groups of ranks for a step's collectives, in the order in which they are split from the world: name, member of a
 * context, text, and the axes along which the members differ. */
#define ARI_OVER_TABLE(X)                                                                                           \
    X(TP, tp, "tp", ARI_CUTS_FEATURES)                                                                              \
    X(PP, pipeline, "pp", ARI_CUTS_LAYERS)                                                                          \
    X(ENDS, ends, "pp_ends", ARI_CUTS_LAYERS)  /* in a pipeline, the ranks of the first and the last stage */       \
    X(SHARD, shard, "dp_shard", ARI_CUTS_DATA) /* ranks over which ZeRO shards, if further ranks hold replicas */   \
    X(REPLICATE, replicate, "dp_replicate", ARI_CUTS_SAMPLES) /* the ranks with the same shard */                   \
    X(CP, sequence, "cp", ARI_CUTS_POSITIONS)                                                                       \
    X(RING, ring, "cp_ring", 1 << ARI_AXIS_RING)     /* pass keys and values on */                                  \
    X(INNER, inner, "cp_inner", 1 << ARI_AXIS_INNER) /* exchange heads for positions */                             \
    X(EP, ep, "ep", ARI_CUTS_DATA)                   /* ranks that have different experts of a layer and exchange
                                                        tokens */   \
    X(EDP, edp, "edp", ARI_CUTS_DATA)                /* ranks that have the same experts and sum their gradients */ \
    X(EXPERT_SHARD, expert_shard, "edp_shard",                                                                      \
      ARI_CUTS_DATA) /* among those, the ranks that shard, as in SHARD, and */                                      \
    X(EXPERT_REPLICATE, expert_replicate, "edp_replicate", ARI_CUTS_SAMPLES) /* REPLICATE do of dp */               \
    X(EXPERT_CP, expert_sequence, "edp_cp", ARI_CUTS_POSITIONS) /* among those, the ranks with tokens of the same
                                                                   samples */   \
    X(DP, dp, "dp", ARI_CUTS_DATA)                              /* sum gradients */
typedef enum ari_over {
#define ARI_OVER_ENUM(name, member, text, axes) ARI_OVER_##name,
    ARI_OVER_TABLE(ARI_OVER_ENUM)
#undef ARI_OVER_ENUM
        ARI_OVER_GROUPS,
    ARI_OVER_COPIES = ARI_OVER_GROUPS /* neighbours that hold the same KV head: some of the ranks along the last two
                                         axes */
} ari_over;
/** "tp", "cp_ring". Static storage. */
const char *ari_over_name(ari_over group_kind);
/** Returns true for groups that share experts or have copies of experts. */
bool ari_over_experts(ari_over group_kind);
/** Returns the axes along which the members of such a group differ; 0 for a group of copies. */
ari_axes ari_over_axes(ari_over group_kind);

/* The extents of a layout, outermost first. */
enum { ARI_LAYOUT_PP, ARI_LAYOUT_DP, ARI_LAYOUT_CP, ARI_LAYOUT_TP, ARI_LAYOUT_AXES };
typedef struct ari_layout_axis {
    const char *name; /* "cp": name in the option, a layout's text, JSON, and a dump's mesh */
    ari_axes axes;
    size_t extent, coord; /* offsets of the axis's int in ar_parallel and in ar_parallel_rank */
} ari_layout_axis;
extern const ari_layout_axis ari_layout_axes[ARI_LAYOUT_AXES];
/** Returns extent i of a layout as given: 0 if it was not. */
int ari_layout_as_given(const ar_parallel *p, int i);
void ari_layout_set(ar_parallel *p, int i, int extent);
/** Returns the number of ranks along the axis, at least 1. */
int ari_layout_extent(const ar_parallel *p, int i);

/** Returns true if an extent, or a further split of an extent or of a rank's work, is negative. */
bool ari_extents_negative(const ar_parallel *p);
/** "tp=2, cp=1, dp=4, pp=1". Returns `out`. */
#define ARI_EXTENTS_TEXT (24 * ARI_LAYOUT_AXES)
char *ari_extents_text(char out[ARI_EXTENTS_TEXT], const ar_parallel *p);

/* Ranks along each axis, at least 1. */
typedef struct ari_ranks {
    int along[ARI_PLACED_AXES];
} ari_ranks;
ari_ranks ari_ranks_of(const ar_parallel *p);
/** Returns the number of ranks that differ only along these axes. */
int ari_ranks_along(const ari_ranks *r, ari_axes axes);
/** Returns the index of a rank among the ranks that differ from it only along these axes. Such a group has equal
 *  coordinates along all other axes. */
int ari_place_along(const ari_ranks *r, int rank, ari_axes axes);
/** Describes a layout as a mesh, and a rank's coordinates; coords: [AR_MESH_DIMS]. Extents of one rank are left out,
 *  except those that shard an axis in `always`. */
void ari_layout_mesh(ar_mesh *mesh, int *coords, const ar_parallel *p, int rank, ari_axes always);
/** Returns true if tensor parallelism does not divide experts; each tensor-parallel rank then has some whole
 *  experts. */
bool ari_experts_unsplit(const ar_parallel *p);
/** True if routes decide how many rows a rank's experts have. */
bool ari_experts_routed(const ar_parallel *p);
/** Returns true if the copies of a rank's experts are on other ranks than the copies of its other parameters, so that
 *  experts have separate groups. */
bool ari_experts_separate(const ar_parallel *p);
/** Returns the axes whose ranks together hold all copies of all experts. */
ari_axes ari_expert_axes(const ar_parallel *p);
/** Returns how many of the ranks with copies of an expert have tokens of the same samples, because a sequence's
 *  positions are spread over several expert-parallel groups. */
int ari_expert_sequence(const ar_parallel *p);

/** Returns true if a rank computes all gradients of a micro-batch before any gradient of another. A pipeline that
 *  defers weight gradients computes others in between, and a weight used by two stages of a rank has two passes. */
bool ari_passes_separate(const ar_parallel *p);

/* Traffic that depends on the routes of tokens. */
typedef struct ari_routed {
    uint64_t rows;      /* rows of tokens that expert-parallel ranks send to the experts of others, and back */
    uint64_t gradients; /* rows of experts that are sent to the rank that computes their gradient for a sample, per
                           product */
} ari_routed;
/** Does what ari_ranks_along does for a layout: ari_extent(p, ARI_CUTS_DATA) ranks sum gradients. */
int ari_extent(const ar_parallel *p, ari_axes axes);

AR_END_DECLS

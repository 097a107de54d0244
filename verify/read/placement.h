/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <jansson.h>

#include "anyrank/dump.h"
#include "ref/core/size.h"

/* Placement of a rank's tensors in its file's __metadata__ (pytorch.md): PyTorch's DCP_SHARDING_INFO, and
 * ANYRANK_PLACEMENT for facts that it lacks. */
#define ARI_DUMP_DCP "DCP_SHARDING_INFO"
#define ARI_DUMP_PLACEMENT "ANYRANK_PLACEMENT"
/* File of the optimizer's state next to a model in Hugging Face's format. */
#define ARI_DUMP_STATE "optimizer.safetensors"

/* The placement of one tensor. */
typedef struct ari_placed {
    char *name;
    int ndim; /* number of dimensions of the full tensor; -1: unknown */
    size_t shape[AR_ST_MAX_DIMS];
    bool has_shape; /* true if the file states the shape; otherwise the shape is the largest extent over all ranks'
                       files */
    size_t boxes;   /* number of boxes; 0: the whole entry is one box at `offset` */
    ar_dump_box *box;
    ar_dump_box *local; /* for boxes that were read: position of each in the file's tensor, whose shape the text
                           lacks; at and stride are for ari_placed_resolve. NULL: set already */
    size_t offset[AR_ST_MAX_DIMS];
    int replica, replicas; /* number of this replica and of all replicas; 0 of 0: unknown */
    bool assumed;    /* its position is not recorded: it is assumed to be a copy on every rank unless a mapping says
                        otherwise */
    int sample_rows; /* rows along dimension 0 of each sample; 0: unknown */
    char *left_out;  /* reason why this is not part of any tensor; NULL: it is a part */
    bool partial;
    unsigned partial_over; /* bit set of the mesh dimensions of the partial sum, outermost first from bit 0; 0: all
                              ranks of one copy */
} ari_placed;
typedef struct ari_placement {
    int rank, world; /* -1 and 0: unknown */
    ar_mesh mesh;    /* the mesh; no dimensions: unknown */
    int coords[AR_MESH_DIMS];
    bool has_at;
    ari_placed *tensor; /* sorted by name */
    size_t tensors;
    char **order; /* names in execution order */
    size_t ordered;
    ari_arena arena; /* memory of the placements that were read */
} ari_placement;

/** Parses both texts; either may be NULL. `file` is for messages. Call ari_placement_fini, also after an error. Errors:
 *  AR_ERR_FORMAT ("InvalidPlacement: ..."), AR_ERR_OVERFLOW, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_placement_parse(ari_placement *p, const char *dcp, const char *placement_text,
                                           const char *file);
void ari_placement_fini(ari_placement *p);
/** Forgets all tensors but keeps the rank's description and the execution order. */
void ari_placement_forget_tensors(ari_placement *p);
/** Returns the two texts for a file with these tensors. Each tensor is one box with its full shape and offset. dcp
 *  NULL: that text is not needed, for example for a file of no rank (rank -1) that only records an execution order.
 *  Release both with free(), also after an error. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_placement_text(char **dcp, char **placement_text, const ari_placement *p);
/** Returns the mesh as [["tp", 2], ..], a new reference; NULL if memory is short. */
json_t *ari_mesh_json(const ar_mesh *m);
/** Sets the boxes of a tensor, or the box at its offset, within the file's own tensor. They belong to the arena. t
 *  NULL: nothing is recorded, and the tensor is full. Errors: AR_ERR_FORMAT ("InvalidPlacement: ..."),
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_placed_resolve(ar_dump_box **box, size_t *boxes, ari_arena *a, const ari_placed *t,
                                          const ar_st_entry *entry, const char *file);
/** Finds a tensor's placement; NULL: the file does not describe the tensor. */
const ari_placed *ari_placement_find(const ari_placement *p, const char *name);

/* --- a rank's files ----------------------------------------------------------------------------------------------- */
/* Files of a rank's tensors. PyTorch's readers know one box per tensor and file, so the second box of a packed tensor
 * (q|k|v) goes into a second file of the rank, and so on: rank-00003.safetensors, rank-00003-2.safetensors. */

/* A tensor's boxes: each but the first is in a further file. */
typedef struct ari_boxes {
    size_t n;
    ar_box box[AR_MAX_BOXES];
} ari_boxes;
/** Lists the non-empty boxes of a layout, with adjacent boxes merged. */
void ari_boxes_of(ari_boxes *o, const ar_layout *layout);

#define ARI_RANK_FILE 64
/** The name of the file of a rank's boxes number `k`. */
void ari_rank_file_name(char name[ARI_RANK_FILE], int rank, size_t k);

/** Returns metadata as pairs: the two texts of ari_placement_text with their keys, and a marker that the texts are
 *  present. */
#define ARI_RANK_METADATA 3
void ari_rank_metadata(const char *pair[2 * ARI_RANK_METADATA], char *const text[2]);

/** Elements of a box. */
size_t ari_dump_box_count(int ndim, const ar_dump_box *b);
/** Cuts a box to a region of the full tensor, [start, start + extent). Returns false if nothing is left. */
bool ari_dump_box_cut(ar_dump_box *out, const ar_dump_box *b, int ndim, const size_t *start, const size_t *extent);

/* --- whether boxes share out a tensor ----------------------------------------------------------------------------- */
/* A box of a tensor, given by its `global` and `extent`, and its owner. */
typedef struct ari_cover_box {
    const ar_dump_box *box;
    size_t owner;
} ari_cover_box;

typedef enum ari_cover_fault {
    ARI_COVERED, /* every element is in exactly one box */
    ARI_COVER_GAP,
    ARI_COVER_OVERLAP,
    ARI_COVER_IRREGULAR /* thousands of boxes that no plane through the tensor separates; not all pairs were checked */
} ari_cover_fault;
typedef struct ari_cover {
    ari_cover_fault fault;
    size_t start[AR_ST_MAX_DIMS], extent[AR_ST_MAX_DIMS]; /* of the gap, or of the overlap of two boxes */
    bool is_full;                                         /* for a gap: true if the whole gap is missing, false if
                                                             some of its elements are */
    size_t owner[2];                                      /* owners of two overlapping boxes */
    size_t compared;                                      /* pairs */
} ari_cover;

/** Checks whether n nonempty boxes partition a tensor of this shape. Reorders the boxes. The check divides the tensor
 *  by planes that cut no box until each piece belongs to one box, which takes n log n steps for usual shardings. */
void ari_cover_check(ari_cover *result, int ndim, const size_t *shape, ari_cover_box *box, size_t n);
/** "[0:64, 128:256]"; returns `text`. */
#define ARI_REGION_TEXT 400
const char *ari_region_text(char text[ARI_REGION_TEXT], int ndim, const size_t *start, const size_t *extent);

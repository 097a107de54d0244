/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_DUMP_PARTS_COVER_H
#define ARI_DUMP_PARTS_COVER_H

#include "anyrank/dump.h"

/* A box of a tensor, by its `global` and `extent`, and whose it is. */
typedef struct ari_cover_box {
    const ar_dump_box *box;
    size_t owner;
} ari_cover_box;

typedef enum ari_cover_fault {
    ARI_COVERED, /* every element is in exactly one box */
    ARI_COVER_GAP,
    ARI_COVER_OVERLAP,
    ARI_COVER_IRREGULAR /* thousands of boxes that no plane through the tensor separates: not all were looked at */
} ari_cover_fault;
typedef struct ari_cover {
    ari_cover_fault fault;
    size_t start[AR_ST_MAX_DIMS], extent[AR_ST_MAX_DIMS]; /* of the gap, or of what is in both boxes */
    bool all;                                             /* a gap: all of it is missing; else some elements of it */
    size_t owner[2];                                      /* of boxes that overlap */
    size_t compared;                                      /* pairs */
} ari_cover;

/** Whether n boxes that lie in a tensor of this shape and are not empty share it out. Reorders them. Planes that cut no
 *  box divide the tensor until each piece is one box's: n log n steps for what people do with tensors. */
void ari_cover_check(ari_cover *result, int ndim, const size_t *shape, ari_cover_box *box, size_t n);
/** "[0:64, 128:256]"; returns `text`. */
#define ARI_REGION_TEXT 400
const char *ari_region_text(char text[ARI_REGION_TEXT], int ndim, const size_t *start, const size_t *extent);

#endif

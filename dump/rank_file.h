/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_DUMP_RANK_FILE_H
#define ARI_DUMP_RANK_FILE_H

#include "anyrank/tensor.h"

/* A rank's tensors as files. PyTorch's readers know one box a tensor and file, so that of packed tensors (q|k|v) the
 * second box goes into a second file of the rank, and so on: rank-00003.safetensors, rank-00003-2.safetensors. */

/* A tensor's boxes: each but the first is in a further file. */
typedef struct ari_boxes {
    size_t n;
    ar_box box[AR_MAX_BOXES];
} ari_boxes;
/** Those of a layout that are not empty; those that go on where another ends are one. */
void ari_boxes_of(ari_boxes *o, const ar_layout *layout);

#define ARI_RANK_FILE 64
/** The name of the file of a rank's boxes number `k`. */
void ari_rank_file_name(char name[ARI_RANK_FILE], int rank, size_t k);

/** Metadata, as pairs: the two texts of ari_placement_text under their keys, and what says that they are there. */
#define ARI_RANK_METADATA 3
void ari_rank_metadata(const char *pair[2 * ARI_RANK_METADATA], char *const text[2]);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CORE_BOXES_H
#define ARI_CORE_BOXES_H

#include "anyrank/tensor.h"

/* Elements that lie next to each other in the full tensor: a run along the last dimension of a box. */
typedef struct ari_box_run {
    const float *local; /* the first element in the rank's memory */
    ptrdiff_t stride;   /* from one to the next there, in elements */
    size_t count;
    size_t full;        /* index of the first in the full tensor, row-major */
    size_t local_index; /* and in the local one, row-major in its shape */
} ari_box_run;

/** Calls f for every run of every box of a rank's tensor (host memory, fp32). */
void ari_for_each_run(const ar_tensor *local, const ar_layout *layout, void (*f)(void *user, const ari_box_run *run),
                      void *user);

#endif

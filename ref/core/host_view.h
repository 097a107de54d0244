/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CORE_HOST_VIEW_H
#define ARI_CORE_HOST_VIEW_H

#include "anyrank/context.h"

/** t as the host can read it: t itself where the host reaches the device's memory, else a packed copy, once everything
 *  enqueued before is done. ari_host_view_end. Errors: AR_ERR_MEMORY, those of the device. */
AR_NODISCARD ar_status ari_host_view(ar_ctx *c, ar_tensor *view, const ar_tensor *t);
/** Of what ari_host_view made of t. */
void ari_host_view_end(ar_tensor *view, const ar_tensor *t);

/** The elements of a view of any strides, packed row-major; fp32, host memory, no overlap. */
void ari_pack_elements(float *to, const ar_tensor *t);

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

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

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/core/boxes.h"

void ari_for_each_run(const ar_tensor *local, const ar_layout *o, void (*f)(void *user, const ari_box_run *run),
                      void *user)
{
    const int nd = o->ndim;
    for (size_t k = 0; k < o->nbox; k++) {
        const ar_box *b = &o->box[k];
        size_t runs = 1;
        for (int d = 0; d + 1 < nd; d++)
            runs *= b->extent[d];
        const size_t width = nd > 0 ? b->extent[nd - 1] : 1;
        for (size_t i = 0; i < runs && width > 0; i++) {
            size_t rest = i, full = 0, full_stride = 1, index = 0, index_stride = 1;
            ptrdiff_t offset = 0;
            for (int d = nd - 1; d >= 0; d--) {
                const size_t x = d == nd - 1 ? 0 : rest % b->extent[d];
                rest = d == nd - 1 ? rest : rest / b->extent[d];
                full += (b->global[d] + x) * full_stride;
                index += (b->local[d] + x) * index_stride;
                offset += (ptrdiff_t)(b->local[d] + x) * local->stride[d];
                full_stride *= o->shape[d];
                index_stride *= local->shape[d];
            }
            const ari_box_run run = {(const float *)local->data.ptr + offset, nd > 0 ? local->stride[nd - 1] : 1, width,
                                     full, index};
            f(user, &run);
        }
    }
}

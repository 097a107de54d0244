/* SPDX-License-Identifier: Apache-2.0 */
#include "dump/rank_file.h"

#include <stdio.h>

#include "dump/placement.h"

/* Whether b goes on where a ends, along one dimension, in both tensors. */
static bool continues(const ar_box *a, const ar_box *b, int ndim, int along)
{
    for (int d = 0; d < ndim; d++) {
        const size_t step = d == along ? a->extent[d] : 0;
        if (b->global[d] != a->global[d] + step || b->local[d] != a->local[d] + step ||
            (d != along && b->extent[d] != a->extent[d]))
            return false;
    }
    return true;
}

void ari_boxes_of(ari_boxes *o, const ar_layout *layout)
{
    o->n = 0;
    for (size_t i = 0; i < layout->nbox; i++) {
        const ar_box *b = &layout->box[i];
        bool empty = false;
        int along = 0;
        for (int d = 0; d < layout->ndim; d++)
            empty |= b->extent[d] == 0;
        if (empty)
            continue;
        ar_box *last = o->n > 0 ? &o->box[o->n - 1] : NULL;
        while (last != NULL && along < layout->ndim && !continues(last, b, layout->ndim, along))
            along++;
        if (last != NULL && along < layout->ndim)
            last->extent[along] += b->extent[along];
        else
            o->box[o->n++] = *b;
    }
}

void ari_rank_file_name(char name[ARI_RANK_FILE], int rank, size_t k)
{
    char number[24] = "";
    if (k > 0)
        snprintf(number, sizeof number, "-%zu", k + 1);
    snprintf(name, ARI_RANK_FILE, "rank-%05d%s.safetensors", rank, number);
}

void ari_rank_metadata(const char *pair[2 * ARI_RANK_METADATA], char *const text[2])
{
    pair[0] = "DCP_VERSION";
    pair[1] = "1.0";
    pair[2] = ARI_DUMP_DCP;
    pair[3] = text[0];
    pair[4] = ARI_DUMP_PLACEMENT;
    pair[5] = text[1];
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/check/coverage.h"

#include <stdio.h>
#include <string.h>

/* Whether two ranks hold the very same boxes of the same copy. */
static bool same_part(const ari_finding *a, const ari_finding *b)
{
    if (!a->seen || !b->seen || a->layout.nbox == 0 || a->layout.nbox != b->layout.nbox ||
        a->layout.replica != b->layout.replica)
        return false;
    for (size_t k = 0; k < a->layout.nbox; k++) {
        const ar_box *x = &a->layout.box[k], *y = &b->layout.box[k];
        for (int d = 0; d < a->layout.ndim; d++) {
            if (x->global[d] != y->global[d] || x->extent[d] != y->extent[d])
                return false;
        }
    }
    return true;
}

static bool explain_same_part(ar_first_difference *f, const ari_comparator *ranks, int n, size_t tensor)
{
    for (int a = 0; a < n; a++) {
        for (int b = a + 1; b < n; b++) {
            if (!same_part(&ranks[a].finding[tensor], &ranks[b].finding[tensor]))
                continue;
            snprintf(f->pattern, sizeof f->pattern, "ranks %d and %d hold the same part of it, and others hold none", a,
                     b);
            snprintf(
                f->hint, sizeof f->hint,
                "two ranks have the same place in their groups: the tensor- and data-parallel groups do not form a "
                "mesh (wrong stride or order of the ranks, or the two swapped)");
            return true;
        }
    }
    return false;
}

void ari_explain_coverage(ar_first_difference *f, const ari_comparator *ranks, int n, size_t tensor)
{
    size_t covered = 0, count = ranks[0].reference->tensor[tensor].count;
    int broken = -1, replicas = 1, silent = 0;
    for (int r = n - 1; r >= 0; r--) {
        const ari_finding *found = &ranks[r].finding[tensor];
        covered += found->covered;
        broken = found->broken ? r : broken;
        replicas = found->seen ? found->layout.replicas : replicas;
        silent += !found->seen;
    }
    if (silent == n) {
        snprintf(f->pattern, sizeof f->pattern, "the ranks did not report this tensor");
        snprintf(f->hint, sizeof f->hint, "a part of the step that the baseline has was not run");
    } else if (broken >= 0) {
        snprintf(f->pattern, sizeof f->pattern, "rank %d reported it more than once, in parts that do not join",
                 broken);
        snprintf(f->hint, sizeof f->hint,
                 "a micro-batch went through it twice, or not at all, or stands in the wrong place of the batch");
    } else if (!explain_same_part(f, ranks, n, tensor)) {
        snprintf(f->pattern, sizeof f->pattern, "the ranks did not report all of it: %zu of %zu elements, in %d cop%s",
                 covered, count * (size_t)replicas, replicas, replicas == 1 ? "y" : "ies");
        snprintf(f->hint, sizeof f->hint, "%s",
                 silent > 0 ? "some ranks did not run this part of the step"
                            : "a micro-batch, or a part of the tensor, belongs to no rank or to two");
    }
}

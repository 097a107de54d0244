/* SPDX-License-Identifier: Apache-2.0 */
#include <stdint.h>
#include <stdlib.h>

#include "dump/dump.h"
#include "ref/core/size.h"

/* The execution order of all ranks, from the order of each. A chain of tensors: what a rank names for the first time
 * comes right behind what it names before it. */
#define END SIZE_MAX

static size_t find(const ar_dump *d, const char *name)
{
    const ar_dump_tensor *t = ar_dump_find(d, name);
    return t == NULL ? END : (size_t)(t - d->tensor);
}

/* next[d->tensors]: the first of the chain. */
static void chain_file(const ar_dump *d, const ari_placement *p, size_t *next, bool *chained)
{
    size_t last = d->tensors;
    for (size_t i = 0; i < p->ordered; i++) {
        const size_t k = find(d, p->order[i]);
        if (k == END)
            continue;
        if (!chained[k]) {
            next[k] = next[last];
            next[last] = k;
            chained[k] = true;
        }
        last = k;
    }
}

ar_status ari_dump_set_order(ar_dump *d)
{
    size_t *next = NULL;
    bool *chained = NULL;
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, ari_alloc((void **)&next, d->tensors + 1, sizeof *next, "an execution order"));
    AR_TRY_TO(done, st, ari_alloc_zero((void **)&chained, d->tensors, sizeof *chained, "an execution order"));
    next[d->tensors] = END;
    for (size_t i = 0; i < d->files; i++) /* by rank */
        chain_file(d, &d->file[i].placement, next, chained);
    for (size_t k = next[d->tensors], order = 0; k != END; k = next[k])
        d->tensor[k].order = order++;
done:
    free(next);
    free(chained);
    return st;
}

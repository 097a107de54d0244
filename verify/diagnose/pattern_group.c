/* SPDX-License-Identifier: Apache-2.0 */
/* The ranks as a mesh: rank = dp_rank * tp + tp_rank. */
#include <stdlib.h>

#include "ref/core/size.h"
#include "verify/diagnose/pattern_impl.h"

static bool is_mesh(const ari_difference *d)
{
    return d->tp > 0 && d->dp > 0 && d->tp * d->dp == d->ranks;
}

int ari_tp_of(const ari_difference *d)
{
    return is_mesh(d) ? d->tp : d->ranks;
}

int ari_dp_of(const ari_difference *d)
{
    return is_mesh(d) ? d->dp : 1;
}

const char *ari_over_name(ari_over over)
{
    return over == ARI_OVER_TP ? "tp" : over == ARI_OVER_DP ? "dp" : "tp and dp";
}

/* --- along which groups copies differ ----------------------------------------------------------------------------- */

static bool same_boxes(const ar_layout *a, const ar_layout *b)
{
    if (a->nbox != b->nbox)
        return false;
    for (size_t k = 0; k < a->nbox; k++) {
        if (memcmp(a->box[k].global, b->box[k].global, (size_t)a->ndim * sizeof *a->box[k].global) != 0 ||
            memcmp(a->box[k].extent, b->box[k].extent, (size_t)a->ndim * sizeof *a->box[k].extent) != 0)
            return false;
    }
    return a->nbox > 0;
}

static size_t local_count(const ari_rank_copy *c)
{
    size_t count = 1;
    for (int i = 0; i < c->ndim; i++)
        count *= c->shape[i];
    return count;
}

ari_over ari_apart_over(const ari_difference *d)
{
    const int tp = ari_tp_of(d), dp = ari_dp_of(d);
    bool within_tp = false, within_dp = false;
    for (int a = 0; a < d->ranks; a++) {
        for (int b = 0; b < a; b++) {
            const bool neighbours = a / tp == b / tp, strided = a % tp == b % tp;
            if ((!neighbours && !strided) || !same_boxes(d->copy[a].layout, d->copy[b].layout) ||
                memcmp(d->copy[a].local, d->copy[b].local, local_count(&d->copy[a]) * sizeof(float)) == 0)
                continue;
            within_tp = within_tp || neighbours;
            within_dp = within_dp || strided;
        }
    }
    if (within_tp && within_dp)
        return ARI_OVER_BOTH;
    return within_dp || (!within_tp && dp > 1 && tp == 1) ? ARI_OVER_DP : ARI_OVER_TP;
}

bool ari_in_group(const ari_difference *d, int rank, ari_over over, int key)
{
    const int tp = ari_tp_of(d);
    return over == ARI_OVER_BOTH || (over == ARI_OVER_TP ? rank / tp : rank % tp) == key;
}

int ari_groups(const ari_difference *d, ari_over over)
{
    return over == ARI_OVER_BOTH ? 1 : over == ARI_OVER_TP ? ari_dp_of(d) : ari_tp_of(d);
}

/* --- one tensor-parallel group alone ------------------------------------------------------------------------------ */

/* The samples that a group holds, the same on each of its ranks; false where they are not. */
static bool samples_of(const ari_difference *d, int first, int tp, size_t *start, size_t *count)
{
    bool any = false;
    for (int r = first; r < first + tp; r++) {
        const ar_layout *o = d->copy[r].layout;
        for (size_t k = 0; k < o->nbox; k++) {
            if (any && (o->box[k].global[0] != *start || o->box[k].extent[0] != *count))
                return false;
            *start = o->box[k].global[0];
            *count = o->box[k].extent[0];
            any = true;
        }
    }
    return any && *count > 0;
}

/* Whether the groups have shares of a parameter's gradient (ZeRO), so that no group has all of it. */
static bool is_shared_out(const ari_difference *d, int tp)
{
    for (int r = tp; r < d->ranks; r++) {
        const ar_layout *a = d->copy[r % tp].layout, *b = d->copy[r].layout;
        if (a->nbox + b->nbox > 0 && !same_boxes(a, b))
            return true;
    }
    return false;
}

/* Copies over dp become those of the group: dp groups number theirs one after the other. */
static void renumber(ar_layout *o, int dp)
{
    if (o->replicas % dp != 0)
        return;
    o->replicas /= dp;
    o->replica %= o->replicas;
}

ar_status ari_one_group(ari_difference *out, ari_group_view *view, const ari_difference *d, int rank)
{
    const int tp = ari_tp_of(d), dp = ari_dp_of(d), first = rank / tp * tp;
    const bool activation = (d->pass == 'f' || d->pass == 'b') && d->ndim >= 3;
    size_t start = 0, count = 0, inner = 1;
    *view = (ari_group_view){NULL, NULL, {0}};
    if (dp < 2 || (activation && !samples_of(d, first, tp, &start, &count)) || (d->pass == 'g' && is_shared_out(d, tp)))
        return AR_OK;
    AR_TRY(ari_alloc_zero((void **)&view->layout, (size_t)tp, sizeof *view->layout, "layouts of a group"));
    ar_status st = ari_alloc_zero((void **)&view->copy, (size_t)tp, sizeof *view->copy, "copies of a group");
    if (st != AR_OK) {
        ari_group_view_fini(view);
        return st;
    }
    *out = *d;
    for (int i = 0; i < d->ndim; i++)
        view->shape[i] = d->shape[i];
    for (int i = 1; i < d->ndim; i++)
        inner *= d->shape[i];
    if (activation) {
        view->shape[0] = out->batch = count;
        out->reference = d->reference + start * inner;
        out->ids = d->ids ? d->ids + start * d->seq : NULL;
    }
    for (int r = 0; r < tp; r++) {
        view->copy[r] = d->copy[first + r];
        view->layout[r] = *d->copy[first + r].layout;
        view->copy[r].layout = &view->layout[r];
        for (size_t k = 0; activation && k < view->layout[r].nbox; k++)
            view->layout[r].box[k].global[0] -= start;
        if (activation)
            view->layout[r].shape[0] = count;
        else
            renumber(&view->layout[r], dp);
    }
    out->shape = view->shape;
    out->copy = view->copy;
    out->ranks = out->tp = tp;
    out->dp = 1;
    return AR_OK;
}

void ari_group_view_fini(ari_group_view *view)
{
    free(view->layout);
    free(view->copy);
    *view = (ari_group_view){NULL, NULL, {0}};
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/core/axis.h"

#include "ref/core/size.h"
#include "ref/core/text.h"

#define EXTENT(name) .extent = offsetof(ar_parallel, name), .coord = offsetof(ar_parallel_rank, name)
const ari_layout_axis ari_layout_axes[] = {
    [ARI_LAYOUT_PP] = {"pp", ARI_CUTS_LAYERS, EXTENT(pp)},
    [ARI_LAYOUT_DP] = {"dp", ARI_CUTS_SAMPLES, EXTENT(dp)},
    [ARI_LAYOUT_CP] = {"cp", ARI_CUTS_POSITIONS, EXTENT(cp)},
    [ARI_LAYOUT_TP] = {"tp", ARI_CUTS_FEATURES, EXTENT(tp)},
};

const char *ari_axis_name(int axis)
{
    static const char *const names[ARI_PLACED_AXES] = {[ARI_AXIS_PP] = "pp",
                                                       [ARI_AXIS_DP] = "dp",
                                                       [ARI_AXIS_RING] = "cp_ring",
                                                       [ARI_AXIS_INNER] = "cp_inner",
                                                       [ARI_AXIS_TP] = "tp"};
    return names[axis];
}

const char *ari_over_name(ari_over group_kind)
{
    static const char *const names[] = {
#define ARI_OVER_TEXT(name, member, text, axes) text,
        ARI_OVER_TABLE(ARI_OVER_TEXT)
#undef ARI_OVER_TEXT
            [ARI_OVER_COPIES] = "KV copies"};
    return names[group_kind];
}

bool ari_over_experts(ari_over group_kind)
{
    return group_kind >= ARI_OVER_EP && group_kind <= ARI_OVER_EXPERT_CP;
}

ari_axes ari_over_axes(ari_over group_kind)
{
    static const ari_axes along[] = {
#define ARI_OVER_AXES(name, member, text, axes) axes,
        ARI_OVER_TABLE(ARI_OVER_AXES)
#undef ARI_OVER_AXES
            [ARI_OVER_COPIES] = 0};
    return along[group_kind];
}

int ari_layout_as_given(const ar_parallel *p, int i)
{
    return *(const int *)((const char *)p + ari_layout_axes[i].extent);
}

void ari_layout_set(ar_parallel *p, int i, int extent)
{
    *(int *)((char *)p + ari_layout_axes[i].extent) = extent;
}

int ari_layout_extent(const ar_parallel *p, int i)
{
    return ari_at_least_one(ari_layout_as_given(p, i));
}

bool ari_extents_negative(const ar_parallel *p)
{
    bool negative = p->ep < 0 || p->etp < 0 || p->cp_inner < 0 || p->virtual_stages < 0 || p->micro_batches < 0;
    for (int i = 0; i < ARI_LAYOUT_AXES; i++)
        negative = negative || ari_layout_as_given(p, i) < 0;
    return negative;
}

char *ari_extents_text(char out[ARI_EXTENTS_TEXT], const ar_parallel *p)
{
    ari_text t = ari_text_in(out, ARI_EXTENTS_TEXT);
    for (int i = ARI_LAYOUT_AXES - 1; i >= 0; i--) {
        const int extent = ari_layout_as_given(p, i);
        ari_say(&t, "%s%s=%d", i == ARI_LAYOUT_AXES - 1 ? "" : ", ", ari_layout_axes[i].name, extent == 0 ? 1 : extent);
    }
    return out;
}

ari_ranks ari_ranks_of(const ar_parallel *p)
{
    const int shared = ari_layout_extent(p, ARI_LAYOUT_CP), inner = shared > 1 ? ari_at_least_one(p->cp_inner) : 1;
    return (ari_ranks){{[ARI_AXIS_PP] = ari_layout_extent(p, ARI_LAYOUT_PP),
                        [ARI_AXIS_DP] = ari_layout_extent(p, ARI_LAYOUT_DP),
                        [ARI_AXIS_RING] = ari_at_least_one(shared / inner),
                        [ARI_AXIS_INNER] = inner,
                        [ARI_AXIS_TP] = ari_layout_extent(p, ARI_LAYOUT_TP)}};
}

int ari_ranks_along(const ari_ranks *r, ari_axes axes)
{
    int n = 1;
    for (int i = 0; i < ARI_PLACED_AXES; i++)
        n *= axes >> i & 1 ? r->along[i] : 1;
    return n;
}

int ari_place_along(const ari_ranks *r, int rank, ari_axes axes)
{
    int place = 0, step = 1;
    for (int i = ARI_PLACED_AXES - 1; i >= 0; i--) {
        const int coord = rank % r->along[i];
        rank /= r->along[i];
        place += axes >> i & 1 ? coord * step : 0;
        step *= axes >> i & 1 ? r->along[i] : 1;
    }
    return place;
}

_Static_assert(ARI_LAYOUT_AXES <= AR_MESH_DIMS, "a mesh has no room for a layout");
void ari_layout_mesh(ar_mesh *mesh, int *coords, const ar_parallel *p, int rank, ari_axes always)
{
    const ari_ranks ranks = ari_ranks_of(p);
    mesh->ndim = 0;
    for (int i = 0; i < ARI_LAYOUT_AXES; i++) {
        const ari_layout_axis *axis = &ari_layout_axes[i];
        ar_mesh_dim *dim = &mesh->dim[mesh->ndim];
        if (ari_layout_extent(p, i) == 1 && !(axis->axes & always))
            continue;
        snprintf(dim->name, sizeof dim->name, "%s", axis->name);
        dim->size = ari_layout_extent(p, i);
        coords[mesh->ndim++] = ari_place_along(&ranks, rank, axis->axes);
    }
}

bool ari_experts_unsplit(const ar_parallel *p)
{
    return p->etp == 1 && ari_extent(p, ARI_CUTS_FEATURES) > 1;
}

bool ari_experts_routed(const ar_parallel *p)
{
    return ari_at_least_one(p->ep) > 1;
}

bool ari_experts_separate(const ar_parallel *p)
{
    return ari_experts_routed(p) || ari_experts_unsplit(p);
}

ari_axes ari_expert_axes(const ar_parallel *p)
{
    return ARI_CUTS_DATA | (ari_experts_unsplit(p) ? ARI_CUTS_FEATURES : 0u);
}

int ari_expert_sequence(const ar_parallel *p)
{
    const ari_axes samples = ARI_CUTS_SAMPLES;
    const int sharers = ari_extent(p, ari_expert_axes(p) & ~samples), ep = ari_at_least_one(p->ep);
    return sharers > ep ? sharers / ep : 1;
}

bool ari_passes_separate(const ar_parallel *p)
{
    return p->pp <= 1 || (!p->own_schedule && p->virtual_stages <= 1 && p->schedule != AR_PP_ZERO_BUBBLE);
}

int ari_extent(const ar_parallel *p, ari_axes axes)
{
    const ari_ranks r = ari_ranks_of(p);
    return ari_ranks_along(&r, axes);
}

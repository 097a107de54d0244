/* SPDX-License-Identifier: Apache-2.0 */
/* The ranks of a layout, and the groups that share something. */
#include "ref/models/stages.h"

#include <limits.h>
#include <string.h>

#include "anyrank/placement.h"
#include "ref/comm/comm_private.h"
#include "ref/core/axis.h"
#include "ref/core/size.h"
#include "ref/core/text.h"
#include "ref/models/parallel_private.h"
#include "ref/placement/context_private.h"

ar_parallel_rank ari_parallel_rank_of(const ar_parallel *p, int rank)
{
    const ari_ranks ranks = ari_ranks_of(p);
    ar_parallel_rank coordinates;
    for (int i = 0; i < ARI_LAYOUT_AXES; i++)
        *(int *)((char *)&coordinates + ari_layout_axes[i].coord) =
            ari_place_along(&ranks, rank, ari_layout_axes[i].axes);
    return coordinates;
}

/* Appends "; stages 1 and 5, layers 2..3 and 10..11" for the pipeline's rank `place`. */
static void say_stages(ari_text *t, const ar_parallel *p, size_t layers, int place)
{
    const int stages_per_rank = ari_at_least_one(p->virtual_stages), total_stages = ari_parallel_stages(p),
              ranks = total_stages / stages_per_rank;
    for (int i = 0; i < stages_per_rank; i++)
        ari_say(t, "%s%d",
                i == 0                     ? (stages_per_rank > 1 ? "; stages " : "; stage ")
                : i + 1 == stages_per_rank ? " and "
                                           : ", ",
                i * ranks + place);
    for (int i = 0, listed = 0; i < stages_per_rank; i++) {
        size_t first_layer = 0, count = 0;
        ari_stage_layers(&first_layer, &count, &p->stages, layers, (size_t)total_stages, (size_t)(i * ranks + place));
        if (count == 0)
            continue;
        ari_say(t, "%s%zu", listed++ == 0 ? ", layers " : i + 1 == stages_per_rank ? " and " : ", ", first_layer);
        if (count > 1)
            ari_say(t, "..%zu", first_layer + count - 1);
    }
}

void ari_parallel_rank_text(char out[AR_RANK_TEXT], const ar_parallel *p, size_t layers, int rank)
{
    const ari_ranks ranks = ari_ranks_of(p);
    ar_mesh mesh;
    int coordinates[AR_MESH_DIMS];
    ari_text t = ari_text_in(out, AR_RANK_TEXT);
    ari_say(&t, "rank %d", rank);
    if (ari_ranks_along(&ranks, ARI_CUTS_LAYERS) == 1 || rank < 0 || rank >= ar_parallel_world(p))
        return;
    ari_layout_mesh(&mesh, coordinates, p, rank, ARI_CUTS_SAMPLES | ARI_CUTS_FEATURES);
    for (int i = 0; i < mesh.ndim; i++)
        ari_say(&t, "%s%s %d", i == 0 ? " (" : ", ", mesh.dim[i].name, coordinates[i]);
    say_stages(&t, p, layers, ari_place_along(&ranks, rank, ARI_CUTS_LAYERS));
    ari_say(&t, ")");
}

enum { MOST_NAMED = 4 };
/* Finds the ranks that a line names: "rank 1", "ranks 0 and 2", "ranks 1, 3"; but not the group in "#7 of ranks
 * 0-3". */
static int ranks_in(int found[MOST_NAMED], const char *line, size_t length)
{
    int n = 0;
    for (const char *cursor = line; (cursor = strstr(cursor, "rank")) != NULL && cursor < line + length;) {
        const bool group =
            cursor - line >= 5 && cursor[-5] >= '0' && cursor[-5] <= '9' && strncmp(cursor - 4, " of ", 4) == 0;
        cursor += cursor[4] == 's' ? 5 : 4;
        while (!group && n < MOST_NAMED) {
            uint64_t rank = 0;
            bool is_listed = false;
            cursor += strspn(cursor, ", ");
            cursor += strncmp(cursor, "and ", 4) == 0 ? 4 : 0;
            const char *end = NULL;
            if (!ari_natural(&rank, cursor, &end) || rank > INT_MAX)
                break;
            cursor = end;
            for (int i = 0; i < n; i++)
                is_listed = is_listed || found[i] == (int)rank;
            if (!is_listed)
                found[n++] = (int)rank;
        }
    }
    return n;
}

void ari_name_ranks(char *out, size_t cap, const char *message, const ar_parallel *p, size_t layers)
{
    int rank[MOST_NAMED];
    const size_t line_length = strcspn(message, "\n");
    const int n = ari_extent(p, ARI_CUTS_LAYERS) > 1 ? ranks_in(rank, message, line_length) : 0;
    ari_text t = ari_text_in(out, cap);
    ari_say(&t, "%.*s", (int)line_length, message);
    for (int i = 0; i < n; i++) {
        char text[AR_RANK_TEXT];
        if (rank[i] >= ar_parallel_world(p))
            continue;
        ari_parallel_rank_text(text, p, layers, rank[i]);
        ari_say(&t, "\n  %s", text);
    }
    ari_say(&t, "%s", message + line_length);
}

/* Addresses of the groups, by ari_over. */
#define GROUPS(g)                                                                                               \
    {                                                                                                           \
        [ARI_OVER_TP] = &(g)->tp, [ARI_OVER_PP] = &(g)->pp.group, [ARI_OVER_ENDS] = &(g)->pp.ends,              \
        [ARI_OVER_SHARD] = &(g)->shard, [ARI_OVER_REPLICATE] = &(g)->replicate, [ARI_OVER_CP] = &(g)->cp.group, \
        [ARI_OVER_RING] = &(g)->cp.ring, [ARI_OVER_INNER] = &(g)->cp.inner, [ARI_OVER_EP] = &(g)->ep.group,     \
        [ARI_OVER_EDP] = &(g)->ep.copies, [ARI_OVER_EXPERT_SHARD] = &(g)->ep.shard,                             \
        [ARI_OVER_EXPERT_REPLICATE] = &(g)->ep.replicate, [ARI_OVER_EXPERT_CP] = &(g)->ep.sequence,             \
        [ARI_OVER_DP] = &(g)->dp                                                                                \
    }

/* Returns true if a layout has such a group; groups that a context always requires exist in every layout. */
static bool has_group(const ar_parallel *p, ari_over group_kind)
{
    if (group_kind == ARI_OVER_SHARD || group_kind == ARI_OVER_REPLICATE)
        return ari_at_least_one(p->dp_replicate) > 1;
    if (group_kind == ARI_OVER_EP || group_kind == ARI_OVER_EDP)
        return ari_experts_separate(p);
    if (group_kind == ARI_OVER_EXPERT_SHARD || group_kind == ARI_OVER_EXPERT_REPLICATE)
        return ari_experts_separate(p) && ari_at_least_one(p->dp_replicate) > 1;
    if (group_kind == ARI_OVER_EXPERT_CP)
        return ari_experts_separate(p) && ari_expert_sequence(p) > 1;
    if (group_kind == ARI_OVER_RING || group_kind == ARI_OVER_INNER)
        return ari_extent(p, ARI_CUTS_POSITIONS) > 1;
    return group_kind == ARI_OVER_TP || group_kind == ARI_OVER_DP || ari_extent(p, ari_over_axes(group_kind)) > 1;
}

/* Splits off a group of ranks that differ only along its axes. Ranks that reduce gradients form consecutive replicas of
 * those that shard them. */
static ar_status split(ar_comm **out, ar_comm *world, const ar_parallel *p, ari_over group_kind)
{
    const ari_ranks ranks = ari_ranks_of(p);
    const bool replicates = group_kind == ARI_OVER_REPLICATE;
    const ari_axes axes = replicates ? ARI_CUTS_DATA : ari_over_axes(group_kind);
    const int rank = ar_comm_rank(world);
    int n = ari_ranks_along(&ranks, axes);
    int place = ari_place_along(&ranks, rank, axes), group = ari_place_along(&ranks, rank, ARI_ALL_AXES & ~axes);
    if (group_kind == ARI_OVER_ENDS) {
        group = place > 0 && place < n - 1 ? -1 : group;
        place = place > 0;
        n = 2;
    }
    if (group_kind == ARI_OVER_SHARD || replicates) {
        const int per_replica = n / ari_at_least_one(p->dp_replicate), replica = place / per_replica,
                  share = place % per_replica;
        group = replicates ? group * per_replica + share : group * (n / per_replica) + replica;
        place = replicates ? replica : share;
        n = replicates ? n / per_replica : per_replica;
    }
    return ari_comm_join(out, world, group, place, n);
}

/* Splits the world into groups of consecutive ranks that together have all experts; the copies of a sharding replica
 * are consecutive. */
static ar_status split_experts(ar_comm **out, ar_comm *world, const ar_parallel *p, ari_over group_kind)
{
    const ari_ranks ranks = ari_ranks_of(p);
    const ari_axes axes = ari_expert_axes(p);
    const int rank = ar_comm_rank(world), ep = ari_at_least_one(p->ep);
    const int place = ari_place_along(&ranks, rank, axes), copies = ari_ranks_along(&ranks, axes) / ep;
    const int team = ari_place_along(&ranks, rank, ARI_ALL_AXES & ~axes);
    const int ep_rank = place % ep, copy = place / ep, sequence = ari_expert_sequence(p);
    const int replicas = ari_at_least_one(p->dp_replicate), per_replica = copies / replicas;
    if (group_kind == ARI_OVER_EP)
        return ari_comm_join(out, world, team * copies + copy, ep_rank, ep);
    if (group_kind == ARI_OVER_EDP)
        return ari_comm_join(out, world, team * ep + ep_rank, copy, copies);
    if (group_kind == ARI_OVER_EXPERT_SHARD)
        return ari_comm_join(out, world, (team * ep + ep_rank) * replicas + copy / per_replica, copy % per_replica,
                             per_replica);
    if (group_kind == ARI_OVER_EXPERT_REPLICATE)
        return ari_comm_join(out, world, (team * ep + ep_rank) * per_replica + copy % per_replica, copy / per_replica,
                             replicas);
    return ari_comm_join(out, world, (team * ep + ep_rank) * (copies / sequence) + copy / sequence, copy % sequence,
                         sequence);
}

ar_status ari_groups_begin(ar_parallel_groups *out, ar_comm *world, const ar_parallel *p, bool wrong_stride)
{
    ar_comm **const groups[] = GROUPS(out);
    const int summed = ari_extent(p, ARI_CUTS_DATA), inner = ari_at_least_one(p->cp_inner);
    const int rank = ar_comm_rank(world);
    *out = (ar_parallel_groups){.cp.zigzag = p->zigzag, .ep.whole = ari_experts_unsplit(p), .ep.dispatch = p->dispatch};
    if (ar_comm_size(world) != ar_parallel_world(p) || ari_layout_extent(p, ARI_LAYOUT_CP) % inner != 0) {
        char text[256];
        ari_parallel_text(text, sizeof text, p);
        return ar_error_set(AR_ERR_ARG, "groups of %s (inner %d) in a world of %d ranks, expected %d", text, inner,
                            ar_comm_size(world), ar_parallel_world(p));
    }
    if (ari_extent(p, ARI_CUTS_LAYERS) > 1) {
        out->pp.virtual_stages = p->virtual_stages;
        out->pp.stages = p->stages;
    }
    for (int group_kind = 0; group_kind < ARI_OVER_GROUPS; group_kind++) {
        if (group_kind == ARI_OVER_DP && wrong_stride)
            AR_TRY(ari_comm_join(groups[group_kind], world, rank / summed, rank % summed, summed));
        else if (has_group(p, (ari_over)group_kind))
            AR_TRY((ari_over_experts((ari_over)group_kind) ? split_experts : split)(groups[group_kind], world, p,
                                                                                    (ari_over)group_kind));
        ari_comm_name_group(*groups[group_kind], group_kind);
    }
    return AR_OK;
}

ar_status ar_parallel_groups_begin(ar_parallel_groups *out, ar_comm *world, const ar_parallel *p)
{
    return ari_groups_begin(out, world, p, false);
}

void ar_parallel_groups_use(ar_ctx_options *o, const ar_parallel_groups *g)
{
    o->tp = g->tp;
    o->dp = g->dp;
    o->shard = g->shard;
    o->replicate = g->replicate;
    o->cp = g->cp;
    o->ep = g->ep;
    o->pp = g->pp;
}

void ar_parallel_groups_end(ar_parallel_groups *g)
{
    ar_comm **const groups[] = GROUPS(g);
    for (int group_kind = ARI_OVER_GROUPS - 1; group_kind >= 0; group_kind--)
        ar_comm_destroy(*groups[group_kind]);
    *g = (ar_parallel_groups){.tp = NULL};
}

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
    ar_parallel_rank at;
    for (int i = 0; i < ARI_LAYOUT_AXES; i++)
        *(int *)((char *)&at + ari_layout_axes[i].at) = ari_place_along(&ranks, rank, ari_layout_axes[i].axes);
    return at;
}

/* "; stages 1 and 5, layers 2..3 and 10..11", of the rank at `place` of the pipeline. */
static void say_stages(ari_text *t, const ar_parallel *p, size_t layers, int place)
{
    const int each = ari_at_least_one(p->virtual_stages), all = ari_parallel_stages(p), ranks = all / each;
    for (int i = 0; i < each; i++)
        ari_say(t, "%s%d",
                i == 0          ? (each > 1 ? "; stages " : "; stage ")
                : i + 1 == each ? " and "
                                : ", ",
                i * ranks + place);
    for (int i = 0, listed = 0; i < each; i++) {
        size_t first = 0, count = 0;
        ari_stage_layers(&first, &count, &p->stages, layers, (size_t)all, (size_t)(i * ranks + place));
        if (count == 0)
            continue;
        ari_say(t, "%s%zu", listed++ == 0 ? ", layers " : i + 1 == each ? " and " : ", ", first);
        if (count > 1)
            ari_say(t, "..%zu", first + count - 1);
    }
}

void ari_parallel_rank_text(char out[AR_RANK_TEXT], const ar_parallel *p, size_t layers, int rank)
{
    const ari_ranks ranks = ari_ranks_of(p);
    ar_mesh mesh;
    int at[AR_MESH_DIMS];
    ari_text t = ari_text_in(out, AR_RANK_TEXT);
    ari_say(&t, "rank %d", rank);
    if (ari_ranks_along(&ranks, ARI_CUTS_LAYERS) == 1 || rank < 0 || rank >= ar_parallel_world(p))
        return;
    ari_layout_mesh(&mesh, at, p, rank, ARI_CUTS_SAMPLES | ARI_CUTS_FEATURES);
    for (int i = 0; i < mesh.ndim; i++)
        ari_say(&t, "%s%s %d", i == 0 ? " (" : ", ", mesh.dim[i].name, at[i]);
    say_stages(&t, p, layers, ari_place_along(&ranks, rank, ARI_CUTS_LAYERS));
    ari_say(&t, ")");
}

enum { MOST_NAMED = 4 };
/* The ranks that a line names: "rank 1", "ranks 0 and 2", "ranks 1, 3"; but not the group of "#7 of ranks 0-3". */
static int ranks_in(int found[MOST_NAMED], const char *line, size_t length)
{
    int n = 0;
    for (const char *at = line; (at = strstr(at, "rank")) != NULL && at < line + length;) {
        const bool group = at - line >= 5 && at[-5] >= '0' && at[-5] <= '9' && strncmp(at - 4, " of ", 4) == 0;
        at += at[4] == 's' ? 5 : 4;
        while (!group && n < MOST_NAMED) {
            uint64_t rank = 0;
            bool there = false;
            at += strspn(at, ", ");
            at += strncmp(at, "and ", 4) == 0 ? 4 : 0;
            const char *end = NULL;
            if (!ari_natural(&rank, at, &end) || rank > INT_MAX)
                break;
            at = end;
            for (int i = 0; i < n; i++)
                there = there || found[i] == (int)rank;
            if (!there)
                found[n++] = (int)rank;
        }
    }
    return n;
}

void ari_name_ranks(char *out, size_t cap, const char *message, const ar_parallel *p, size_t layers)
{
    int rank[MOST_NAMED];
    const size_t first = strcspn(message, "\n");
    const int n = ari_extent(p, ARI_CUTS_LAYERS) > 1 ? ranks_in(rank, message, first) : 0;
    ari_text t = ari_text_in(out, cap);
    ari_say(&t, "%.*s", (int)first, message);
    for (int i = 0; i < n; i++) {
        char text[AR_RANK_TEXT];
        if (rank[i] >= ar_parallel_world(p))
            continue;
        ari_parallel_rank_text(text, p, layers, rank[i]);
        ari_say(&t, "\n  %s", text);
    }
    ari_say(&t, "%s", message + first);
}

/* Addresses of the groups, by ari_over. */
#define GROUPS(g)                                                                                             \
    {                                                                                                         \
        [ARI_OVER_TP] = &(g)->tp, [ARI_OVER_PP] = &(g)->pp.all, [ARI_OVER_ENDS] = &(g)->pp.ends,              \
        [ARI_OVER_SHARD] = &(g)->shard, [ARI_OVER_REPLICATE] = &(g)->replicate, [ARI_OVER_CP] = &(g)->cp.all, \
        [ARI_OVER_RING] = &(g)->cp.ring, [ARI_OVER_INNER] = &(g)->cp.inner, [ARI_OVER_EP] = &(g)->ep.all,     \
        [ARI_OVER_EDP] = &(g)->ep.copies, [ARI_OVER_EXPERT_SHARD] = &(g)->ep.shard,                           \
        [ARI_OVER_EXPERT_REPLICATE] = &(g)->ep.replicate, [ARI_OVER_EXPERT_CP] = &(g)->ep.sequence,           \
        [ARI_OVER_DP] = &(g)->dp                                                                              \
    }

/* True if a layout has such a group; every layout has those that a context always requires. */
static bool has_group(const ar_parallel *p, ari_over over)
{
    if (over == ARI_OVER_SHARD || over == ARI_OVER_REPLICATE)
        return ari_at_least_one(p->dp_replicate) > 1;
    if (over == ARI_OVER_EP || over == ARI_OVER_EDP)
        return ari_experts_apart(p);
    if (over == ARI_OVER_EXPERT_SHARD || over == ARI_OVER_EXPERT_REPLICATE)
        return ari_experts_apart(p) && ari_at_least_one(p->dp_replicate) > 1;
    if (over == ARI_OVER_EXPERT_CP)
        return ari_experts_apart(p) && ari_expert_sequence(p) > 1;
    if (over == ARI_OVER_RING || over == ARI_OVER_INNER)
        return ari_extent(p, ARI_CUTS_POSITIONS) > 1;
    return over == ARI_OVER_TP || over == ARI_OVER_DP || ari_extent(p, ari_over_axes(over)) > 1;
}

/* A group is of ranks that differ along its axes alone. Those that sum gradients are so many replicas, one after the
 * other, of those that share them out. */
static ar_status split(ar_comm **gives, ar_comm *world, const ar_parallel *p, ari_over over)
{
    const ari_ranks ranks = ari_ranks_of(p);
    const bool replicates = over == ARI_OVER_REPLICATE;
    const ari_axes axes = replicates ? ARI_CUTS_DATA : ari_over_axes(over);
    const int rank = ar_comm_rank(world);
    int n = ari_ranks_along(&ranks, axes);
    int place = ari_place_along(&ranks, rank, axes), group = ari_place_along(&ranks, rank, ARI_ALL_AXES & ~axes);
    if (over == ARI_OVER_ENDS) {
        group = place > 0 && place < n - 1 ? -1 : group;
        place = place > 0;
        n = 2;
    }
    if (over == ARI_OVER_SHARD || replicates) {
        const int each = n / ari_at_least_one(p->dp_replicate), replica = place / each, share = place % each;
        group = replicates ? group * each + share : group * (n / each) + replica;
        place = replicates ? replica : share;
        n = replicates ? n / each : each;
    }
    return ari_comm_join(gives, world, group, place, n);
}

/* Runs of neighbours have the experts between them, and the copies of a replica of shares follow each other. */
static ar_status split_experts(ar_comm **gives, ar_comm *world, const ar_parallel *p, ari_over over)
{
    const ari_ranks ranks = ari_ranks_of(p);
    const ari_axes axes = ari_expert_axes(p);
    const int rank = ar_comm_rank(world), ep = ari_at_least_one(p->ep);
    const int at = ari_place_along(&ranks, rank, axes), copies = ari_ranks_along(&ranks, axes) / ep;
    const int team = ari_place_along(&ranks, rank, ARI_ALL_AXES & ~axes);
    const int own = at % ep, copy = at / ep, sequence = ari_expert_sequence(p);
    const int replicas = ari_at_least_one(p->dp_replicate), each = copies / replicas;
    if (over == ARI_OVER_EP)
        return ari_comm_join(gives, world, team * copies + copy, own, ep);
    if (over == ARI_OVER_EDP)
        return ari_comm_join(gives, world, team * ep + own, copy, copies);
    if (over == ARI_OVER_EXPERT_SHARD)
        return ari_comm_join(gives, world, (team * ep + own) * replicas + copy / each, copy % each, each);
    if (over == ARI_OVER_EXPERT_REPLICATE)
        return ari_comm_join(gives, world, (team * ep + own) * each + copy % each, copy / each, replicas);
    return ari_comm_join(gives, world, (team * ep + own) * (copies / sequence) + copy / sequence, copy % sequence,
                         sequence);
}

ar_status ari_groups_begin(ar_parallel_groups *gives, ar_comm *world, const ar_parallel *p, bool wrong_stride)
{
    ar_comm **const groups[] = GROUPS(gives);
    const int summed = ari_extent(p, ARI_CUTS_DATA), inner = ari_at_least_one(p->cp_inner);
    const int rank = ar_comm_rank(world);
    *gives = (ar_parallel_groups){.cp.zigzag = p->zigzag, .ep.whole = ari_experts_whole(p), .ep.dispatch = p->dispatch};
    if (ar_comm_size(world) != ar_parallel_world(p) || ari_layout_extent(p, ARI_LAYOUT_CP) % inner != 0) {
        char text[256];
        ari_parallel_text(text, sizeof text, p);
        return ar_error_set(AR_ERR_ARG, "groups of %s (inner %d) in a world of %d ranks, expected %d", text, inner,
                            ar_comm_size(world), ar_parallel_world(p));
    }
    if (ari_extent(p, ARI_CUTS_LAYERS) > 1) {
        gives->pp.virtual_stages = p->virtual_stages;
        gives->pp.stages = p->stages;
    }
    for (int over = 0; over < ARI_OVER_GROUPS; over++) {
        if (over == ARI_OVER_DP && wrong_stride)
            AR_TRY(ari_comm_join(groups[over], world, rank / summed, rank % summed, summed));
        else if (has_group(p, (ari_over)over))
            AR_TRY((ari_over_experts((ari_over)over) ? split_experts : split)(groups[over], world, p, (ari_over)over));
        ari_comm_name_group(*groups[over], over);
    }
    return AR_OK;
}

ar_status ar_parallel_groups_begin(ar_parallel_groups *gives, ar_comm *world, const ar_parallel *p)
{
    return ari_groups_begin(gives, world, p, false);
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
    for (int over = ARI_OVER_GROUPS - 1; over >= 0; over--)
        ar_comm_destroy(*groups[over]);
    *g = (ar_parallel_groups){.tp = NULL};
}

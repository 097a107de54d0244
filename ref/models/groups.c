/* SPDX-License-Identifier: Apache-2.0 */
/* The ranks of a layout, and the groups that share something. */
#include "ref/models/groups.h"

#include "anyrank/placement.h"
#include "ref/core/size.h"

ar_parallel_rank ar_parallel_rank_of(const ar_parallel *p, int rank)
{
    const int tp = ari_at_least_one(p->tp), cp = ari_at_least_one(p->cp);
    return (ar_parallel_rank){.dp = rank / (tp * cp), .cp = rank / tp % cp, .tp = rank % tp};
}

/* Those that share a sequence. `lane`: the ranks that have the same samples and the same features. */
static ar_status split_context(ar_context_groups *g, ar_comm *world, const ar_parallel *p, const ar_parallel_rank *at)
{
    const int cp = ari_at_least_one(p->cp), inner = ari_at_least_one(p->cp_inner), ring = cp / inner;
    const int place = at->cp / inner, neighbour = at->cp % inner, lane = at->dp * ari_at_least_one(p->tp) + at->tp;
    g->zigzag = p->zigzag;
    if (cp == 1)
        return AR_OK;
    AR_TRY(ar_comm_split(&g->all, world, lane, at->cp));
    AR_TRY(ar_comm_split(&g->ring, world, lane * inner + neighbour, place));
    return ar_comm_split(&g->inner, world, lane * ring + place, neighbour);
}

ar_status ari_groups_begin(ar_parallel_groups *gives, ar_comm *world, const ar_parallel *p, bool wrong_stride)
{
    const int cp = ari_at_least_one(p->cp), summed = ari_at_least_one(p->dp) * cp, rank = ar_comm_rank(world);
    const ar_parallel_rank at = ar_parallel_rank_of(p, rank);
    const int who = at.dp * cp + at.cp;
    *gives = (ar_parallel_groups){.tp = NULL};
    if (ar_comm_size(world) != ar_parallel_world(p) || cp % ari_at_least_one(p->cp_inner) != 0)
        return ar_error_set(AR_ERR_ARG, "groups of tp=%d, cp=%d (inner %d), dp=%d in a world of %d ranks, expected %d",
                            ari_at_least_one(p->tp), cp, ari_at_least_one(p->cp_inner), ari_at_least_one(p->dp),
                            ar_comm_size(world), ar_parallel_world(p));
    AR_TRY(ar_comm_split(&gives->tp, world, who, at.tp));
    AR_TRY(split_context(&gives->cp, world, p, &at));
    return wrong_stride ? ar_comm_split(&gives->dp, world, rank / summed, rank % summed)
                        : ar_comm_split(&gives->dp, world, at.tp, who);
}

ar_status ar_parallel_groups_begin(ar_parallel_groups *gives, ar_comm *world, const ar_parallel *p)
{
    return ari_groups_begin(gives, world, p, false);
}

void ar_parallel_groups_end(ar_parallel_groups *g)
{
    ar_comm *const all[] = {g->cp.inner, g->cp.ring, g->cp.all, g->dp, g->tp};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        ar_comm_destroy(all[i]);
    *g = (ar_parallel_groups){.tp = NULL};
}

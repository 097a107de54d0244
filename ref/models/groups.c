/* SPDX-License-Identifier: Apache-2.0 */
/* The ranks of a layout, and the groups that share something. */
#include "ref/models/groups.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "anyrank/placement.h"
#include "ref/core/size.h"
#include "ref/core/text.h"

ar_parallel_rank ar_parallel_rank_of(const ar_parallel *p, int rank)
{
    const int tp = ari_at_least_one(p->tp), cp = ari_at_least_one(p->cp);
    const int dp = ari_at_least_one(p->dp);
    return (ar_parallel_rank){
        .pp = rank / (tp * cp * dp), .dp = rank / (tp * cp) % dp, .cp = rank / tp % cp, .tp = rank % tp};
}

/* "; stages 1 and 5, layers 2..3 and 10..11" */
static void say_stages(ari_text *t, const ar_parallel *p, size_t layers, int pp)
{
    const int each = ari_at_least_one(p->virtual_stages), all = ar_parallel_stages(p);
    for (int i = 0; i < each; i++)
        ari_say(t, "%s%d",
                i == 0          ? (each > 1 ? "; stages " : "; stage ")
                : i + 1 == each ? " and "
                                : ", ",
                i * p->pp + pp);
    for (int i = 0, told = 0; i < each; i++) {
        size_t first = 0, count = 0;
        ar_stage_layers(&first, &count, &p->stages, layers, (size_t)all, (size_t)(i * p->pp + pp));
        if (count == 0)
            continue;
        ari_say(t, "%s%zu", told++ == 0 ? ", layers " : i + 1 == each ? " and " : ", ", first);
        if (count > 1)
            ari_say(t, "..%zu", first + count - 1);
    }
}

void ar_parallel_rank_text(char out[AR_RANK_TEXT], const ar_parallel *p, size_t layers, int rank)
{
    ari_text t = ari_text_in(out, AR_RANK_TEXT);
    ari_say(&t, "rank %d", rank);
    if (ari_at_least_one(p->pp) == 1 || rank < 0 || rank >= ar_parallel_world(p))
        return;
    const ar_parallel_rank at = ar_parallel_rank_of(p, rank);
    ari_say(&t, " (pp %d, dp %d, ", at.pp, at.dp);
    if (ari_at_least_one(p->cp) > 1)
        ari_say(&t, "cp %d, ", at.cp);
    ari_say(&t, "tp %d", at.tp);
    say_stages(&t, p, layers, at.pp);
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
            char *end = NULL;
            at += strspn(at, ", ");
            at += strncmp(at, "and ", 4) == 0 ? 4 : 0;
            const long rank = *at >= '0' && *at <= '9' ? strtol(at, &end, 10) : -1;
            bool there = rank < 0 || rank > INT_MAX;
            if (there)
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
    const int n = ari_at_least_one(p->pp) > 1 ? ranks_in(rank, message, first) : 0;
    ari_text t = ari_text_in(out, cap);
    ari_say(&t, "%.*s", (int)first, message);
    for (int i = 0; i < n; i++) {
        char text[AR_RANK_TEXT];
        if (rank[i] >= ar_parallel_world(p))
            continue;
        ar_parallel_rank_text(text, p, layers, rank[i]);
        ari_say(&t, "\n  %s", text);
    }
    ari_say(&t, "%s", message + first);
}

/* Those that share a sequence. `lane`: the ranks that have the same samples and the same features. */
static ar_status split_context(ar_context_groups *g, ar_comm *world, const ar_parallel *p, const ar_parallel_rank *at)
{
    const int cp = ari_at_least_one(p->cp), inner = ari_at_least_one(p->cp_inner), ring = cp / inner;
    const int place = at->cp / inner, neighbour = at->cp % inner;
    const int lane = (at->pp * ari_at_least_one(p->dp) + at->dp) * ari_at_least_one(p->tp) + at->tp;
    g->zigzag = p->zigzag;
    if (cp == 1)
        return AR_OK;
    AR_TRY(ar_comm_split(&g->all, world, lane, at->cp));
    AR_TRY(ar_comm_split(&g->ring, world, lane * inner + neighbour, place));
    return ar_comm_split(&g->inner, world, lane * ring + place, neighbour);
}

/* Those that have the stages of the same samples and positions. */
static ar_status split_pipeline(ar_context_pipeline *g, ar_comm *world, const ar_parallel *p,
                                const ar_parallel_rank *at)
{
    const int pp = ari_at_least_one(p->pp), each = ar_comm_size(world) / pp, lane = ar_comm_rank(world) % each;
    const bool end = at->pp == 0 || at->pp == pp - 1;
    if (pp == 1)
        return AR_OK;
    g->virtual_stages = p->virtual_stages;
    g->stages = p->stages;
    AR_TRY(ar_comm_split(&g->all, world, lane, at->pp));
    return ar_comm_split(&g->ends, world, end ? lane : -1, at->pp);
}

/* Those of the ranks that sum gradients that share them out, and those that have the same share. */
static ar_status split_shards(ar_parallel_groups *g, ar_comm *world, const ar_parallel *p, const ar_parallel_rank *at)
{
    const int replicas = ari_at_least_one(p->dp_replicate), cp = ari_at_least_one(p->cp);
    const int each = ari_at_least_one(p->dp) / replicas, replica = at->dp / each;
    const int share = at->dp % each * cp + at->cp, row = at->pp * ari_at_least_one(p->tp) + at->tp;
    if (replicas == 1)
        return AR_OK;
    AR_TRY(ar_comm_split(&g->shard, world, row * replicas + replica, share));
    return ar_comm_split(&g->replicate, world, row * each * cp + share, replica);
}

ar_status ari_groups_begin(ar_parallel_groups *gives, ar_comm *world, const ar_parallel *p, bool wrong_stride)
{
    const int cp = ari_at_least_one(p->cp), summed = ari_at_least_one(p->dp) * cp, rank = ar_comm_rank(world);
    const ar_parallel_rank at = ar_parallel_rank_of(p, rank);
    const int who = at.dp * cp + at.cp, column = at.pp * summed + who, row = at.pp * ari_at_least_one(p->tp) + at.tp;
    const int within = rank - at.pp * ari_at_least_one(p->tp) * summed;
    *gives = (ar_parallel_groups){.tp = NULL};
    if (ar_comm_size(world) != ar_parallel_world(p) || cp % ari_at_least_one(p->cp_inner) != 0)
        return ar_error_set(AR_ERR_ARG,
                            "groups of tp=%d, cp=%d (inner %d), dp=%d, pp=%d in a world of %d ranks, expected %d",
                            ari_at_least_one(p->tp), cp, ari_at_least_one(p->cp_inner), ari_at_least_one(p->dp),
                            ari_at_least_one(p->pp), ar_comm_size(world), ar_parallel_world(p));
    AR_TRY(ar_comm_split(&gives->tp, world, column, at.tp));
    AR_TRY(split_pipeline(&gives->pp, world, p, &at));
    AR_TRY(split_shards(gives, world, p, &at));
    AR_TRY(split_context(&gives->cp, world, p, &at));
    return wrong_stride
               ? ar_comm_split(&gives->dp, world, at.pp * ari_at_least_one(p->tp) + within / summed, within % summed)
               : ar_comm_split(&gives->dp, world, row, who);
}

ar_status ar_parallel_groups_begin(ar_parallel_groups *gives, ar_comm *world, const ar_parallel *p)
{
    return ari_groups_begin(gives, world, p, false);
}

void ar_parallel_groups_end(ar_parallel_groups *g)
{
    ar_comm *const all[] = {g->replicate, g->shard,  g->pp.ends, g->pp.all, g->cp.inner,
                            g->cp.ring,   g->cp.all, g->dp,      g->tp};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        ar_comm_destroy(all[i]);
    *g = (ar_parallel_groups){.tp = NULL};
}

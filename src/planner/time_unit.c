/* SPDX-License-Identifier: Apache-2.0 */
#include "planner/time_impl.h"

ari_shared_unit ari_shared_unit_of(const ari_planned *p, const ari_time_options *o, const ari_passes *passes, int part)
{
    const double times = part == ARI_PART_BLOCKS ? (double)passes->layers : 1.0;
    const double all = passes->parameters[part], experts = passes->experts[part];
    return (ari_shared_unit){.links = {ari_links_of_shares(p, o), ari_links_of(p, o, ARI_OVER_EXPERT_SHARD)},
                             .copies = {ari_links_of_replicas(p, o), ari_links_of(p, o, ARI_OVER_EXPERT_REPLICATE)},
                             .n = {(all - experts) / times, experts / times},
                             .sum_width = o->fp32_sums ? 4.0 : 2.0};
}

/* Bytes of a weight, and of its gradient. */
static double width_of(const ari_shared_unit *u, ari_call_kind kind)
{
    return kind == ARI_CALL_ALL_GATHER ? 2.0 : u->sum_width;
}

double ari_shared_unit_call(ari_traffic *moved, const ari_shared_unit *u, ari_call_kind kind, double times)
{
    const bool sums = kind == ARI_CALL_ALL_REDUCE;
    const double width = width_of(u, kind);
    double seconds = 0.0;
    for (int i = 0; i < ARI_SHARED_OUT; i++) {
        const ari_links *l = sums ? &u->copies[i] : &u->links[i];
        const double n = sums ? u->n[i] / u->links[i].n : u->n[i], each = ari_links_call(l, kind, n, width);
        if (u->n[i] <= 0.0)
            continue;
        seconds += each;
        if (moved)
            ari_traffic_count(moved, ARI_TIME_DP, ari_call_name(kind), l, times,
                              times * ari_links_sent(l, kind, n, width), times * each);
    }
    return seconds;
}

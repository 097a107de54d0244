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

double ari_shared_unit_seconds(const ari_shared_unit *u, ari_call_kind kind)
{
    double sum = 0.0;
    for (int i = 0; i < ARI_SHARED_OUT; i++)
        sum += u->n[i] > 0.0 ? ari_links_call(&u->links[i], kind, u->n[i], width_of(u, kind)) : 0.0;
    return sum;
}

double ari_shared_unit_sum(ari_traffic *moved, const ari_shared_unit *u, double times)
{
    const ari_call_kind sum = ARI_CALL_ALL_REDUCE;
    double seconds = 0.0;
    for (int i = 0; i < ARI_SHARED_OUT; i++) {
        const ari_links *l = &u->copies[i];
        const double share = u->n[i] / u->links[i].n, each = ari_links_call(l, sum, share, u->sum_width);
        if (u->n[i] == 0.0)
            continue;
        seconds += each;
        if (moved)
            ari_traffic_count(moved, ARI_TIME_DP, ari_call_name(sum), l, times,
                              times * ari_links_sent(l, sum, share, u->sum_width), times * each);
    }
    return seconds;
}

void ari_shared_unit_count(ari_traffic *moved, const ari_shared_unit *u, ari_call_kind kind, double times)
{
    for (int i = 0; i < ARI_SHARED_OUT; i++) {
        const ari_links *l = &u->links[i];
        if (u->n[i] > 0.0)
            ari_traffic_count(moved, ARI_TIME_DP, ari_call_name(kind), l, times,
                              times * ari_links_sent(l, kind, u->n[i], width_of(u, kind)),
                              times * ari_links_call(l, kind, u->n[i], width_of(u, kind)));
    }
}

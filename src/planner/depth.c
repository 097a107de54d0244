/* SPDX-License-Identifier: Apache-2.0 */
#include "planner/search.h"

/* Adds anyrank's own costs, if it can run the layout. */
static ar_status add_own(ari_depth *d, const ari_time_options *time)
{
    ari_time_options o = *time;
    ari_planned own = d->planned;
    o.cost_model = ARI_COST_OWN;
    d->has_own = ari_planned_counted(&d->planned) && ari_planned_quick(&d->planned);
    if (!d->has_own)
        return AR_OK;
    own.flash = false;
    if (own.step.run.ddp.bucket_bytes == ARI_BUCKETS_USUAL)
        own.step.run.ddp.bucket_bytes = AR_BUCKET_BYTES;
    AR_TRY(ari_time_of(&d->own_time, &own, &o));
    return ari_memory_own_most(&d->own_memory, &own);
}

ar_status ari_depth_of(ari_depth *d, const ari_search *s, const ari_choice *c, const ari_candidate *faster)
{
    const double room = s->time.cluster.memory_bytes;
    *d = (ari_depth){.planned = ari_choice_planned(&s->base, c), .found = {.choice = *c, .reason = ""}};
    const char *lacks = ari_system_lacks(s, c);
    if (lacks)
        return ar_error_set(AR_ERR_ARG, "%s lacks %s", ari_system_names[s->system - 1], lacks);
    AR_TRY(ari_planned_check(&d->planned));
    ari_system_flags(d->flags, sizeof d->flags, s, &d->planned);
    AR_TRY(ari_time_of(&d->time, &d->planned, &s->time));
    AR_TRY(ari_memory_production(&d->memory, &d->planned));
    d->found.seconds = ari_time_step(&d->time);
    d->found.bound = ari_bound_of(&d->time);
    AR_TRY(ari_throughput_of(&d->throughput, &d->planned, &s->time, d->found.seconds));
    d->found.bytes = ari_memory_sum(&d->memory);
    d->found.fits = room <= 0.0 || d->found.bytes <= room;
    ari_advice(d->advice, sizeof d->advice, &d->planned, &d->time, &d->memory, faster, room);
    return s->first ? AR_OK : add_own(d, &s->time);
}

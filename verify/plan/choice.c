/* SPDX-License-Identifier: Apache-2.0 */
/* Chosen layout: converts it from and to what is planned, describes it in words, checks whether it is legal before its
 * cost is computed, and computes its cost in depth. */
#include "ref/core/size.h"
#include "ref/core/text.h"
#include "ref/models/parallel_private.h"
#include "verify/plan/search.h"

const int ari_planned_axes[] = {ARI_LAYOUT_TP, ARI_LAYOUT_CP, ARI_LAYOUT_PP, ARI_LAYOUT_DP};

ari_choice ari_choice_of(const ar_parallel *p)
{
    ari_choice c = {.cp_inner = p->cp_inner,
                    .ep = p->ep,
                    .etp = p->etp,
                    .zigzag = p->zigzag,
                    .zero = p->zero,
                    .dp_replicate = p->dp_replicate,
                    .micro_batches = p->micro_batches,
                    .virtual_stages = p->virtual_stages,
                    .schedule = p->schedule,
                    .sp = p->sp,
                    .recompute = p->recompute.part};
    for (int i = 0; i < ARI_LAYOUT_AXES; i++)
        c.extent[i] = ari_layout_as_given(p, ari_planned_axes[i]);
    return c;
}

char *ari_choice_text(char out[ARI_CHOICE_TEXT], const ari_choice *c, int n, const char *separator)
{
    ari_text t = ari_text_in(out, ARI_CHOICE_TEXT);
    for (int i = 0; i < n; i++)
        ari_say(&t, "%s%s=%d", i == 0 ? "" : separator, ari_layout_axes[ari_planned_axes[i]].name, c->extent[i]);
    return out;
}

ari_planned ari_choice_planned(const ari_planned *base, const ari_choice *c)
{
    ari_planned p = *base;
    ar_parallel *layout = &p.step.run.parallel;
    for (int i = 0; i < ARI_LAYOUT_AXES; i++)
        ari_layout_set(layout, ari_planned_axes[i], c->extent[i]);
    layout->sp = c->sp && c->tp > 1;
    layout->zero = c->zero;
    layout->dp_replicate = c->dp_replicate;
    layout->micro_batches = c->micro_batches;
    layout->cp_inner = c->cp_inner;
    layout->ep = c->ep;
    layout->etp = c->etp;
    layout->dispatch = c->ep > 1 ? layout->dispatch : AR_DISPATCH_ALL_TO_ALL;
    layout->zigzag = c->zigzag && c->cp > ari_at_least_one(c->cp_inner);
    layout->overlap = c->overlap > 0 ? c->overlap : layout->overlap;
    layout->virtual_stages = c->virtual_stages;
    layout->schedule = c->schedule;
    layout->recompute.part = c->recompute;
    return p;
}

/* --- legal -------------------------------------------------------------------------------------------------------- */

ar_status ari_planned_world(int *ranks, const ari_planned *p)
{
    const ari_choice c = ari_choice_of(&p->step.run.parallel);
    size_t world = 1;
    for (int i = 0; i < ARI_LAYOUT_AXES; i++) {
        char text[ARI_CHOICE_TEXT];
        if (c.extent[i] < 0)
            return ar_error_set(AR_ERR_ARG, "an extent of %d ranks: extents are at least 1", c.extent[i]);
        world *= (size_t)ari_at_least_one(c.extent[i]);
        if (world > ARI_MAX_GPUS)
            return ar_error_set(AR_ERR_ARG, "%s are more than %d ranks",
                                ari_choice_text(text, &c, ARI_LAYOUT_AXES, ", "), ARI_MAX_GPUS);
    }
    *ranks = (int)world;
    return AR_OK;
}

ar_status ari_planned_check(const ari_planned *p)
{
    const ar_run *run = &p->step.run;
    const ar_parallel layout = run->parallel;
    int world = 0;
    if (layout.zero < 0 || layout.zero > 3)
        return ar_error_set(AR_ERR_ARG, "zero=%d: a stage from 0 to 3", layout.zero);
    AR_TRY(ari_planned_world(&world, p));
    AR_TRY(ari_parallel_check(&layout, p->step.config, &run->plan, run->batch, run->seq));
    if (run->parallel.zero > 0 && ari_extent(&layout, ARI_CUTS_DATA) == 1)
        return ar_error_set(AR_ERR_ARG, "zero=%d shares out to the ranks of %s and %s: there is one",
                            run->parallel.zero, ari_layout_axes[ARI_LAYOUT_DP].name,
                            ari_layout_axes[ARI_LAYOUT_CP].name);
    const size_t items = (size_t)ari_parallel_stages(&layout) * (size_t)ari_at_least_one(layout.micro_batches);
    if (ari_extent(&layout, ARI_CUTS_LAYERS) > 1 && items > AR_MAX_STAGE_MICRO_BATCHES)
        return ar_error_set(AR_ERR_OVERFLOW, "%d stages of %d micro-batches: a schedule has at most %d passes forward",
                            ari_parallel_stages(&layout), ari_at_least_one(layout.micro_batches),
                            AR_MAX_STAGE_MICRO_BATCHES);
    const size_t dp = (size_t)ari_at_least_one(layout.dp);
    if (run->batch < dp)
        return ar_error_set(AR_ERR_ARG,
                            "a batch of %zu has no sample for each of dp=%zu ranks; use a batch of at least "
                            "%zu, or a smaller dp",
                            run->batch, dp, dp);
    return AR_OK;
}

/* --- in depth ----------------------------------------------------------------------------------------------------- */

/* Adds the memory of anyrank itself, if a dry run of the layout is quick. */
static ar_status add_own(ari_depth *d)
{
    const ar_parallel *layout = &d->planned.step.run.parallel;
    ari_planned planned = d->planned;
    d->has_own = layout->zero <= 1 && ari_at_least_one(layout->dp_replicate) == 1 && ari_planned_quick(&d->planned);
    if (!d->has_own)
        return AR_OK;
    planned.flash = false;
    if (planned.step.run.ddp.bucket_bytes == ARI_BUCKETS_USUAL)
        planned.step.run.ddp.bucket_bytes = AR_BUCKET_BYTES;
    return ari_memory_own_most(&d->own_memory, &planned);
}

ar_status ari_depth_of(ari_depth *d, const ari_search *s, const ari_choice *c, const ari_candidate *faster)
{
    const double scratch = s->time.cluster.memory_bytes;
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
    d->found.fits = scratch <= 0.0 || d->found.bytes <= scratch;
    ari_advice(d->advice, sizeof d->advice, &d->planned, &d->time, &d->memory, faster, scratch);
    return s->first_only ? AR_OK : add_own(d);
}

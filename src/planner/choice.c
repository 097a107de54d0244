/* SPDX-License-Identifier: Apache-2.0 */
/* A layout as it is chosen: of what is planned, in words, and put into it. */
#include "planner/search.h"
#include "ref/core/size.h"
#include "ref/core/text.h"

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
                    .recompute = p->recompute.what};
    for (int i = 0; i < ARI_LAYOUT_AXES; i++)
        c.extent[i] = ari_layout_as_given(p, ari_planned_axes[i]);
    return c;
}

char *ari_choice_text(char out[ARI_CHOICE_TEXT], const ari_choice *c, int n, const char *between)
{
    ari_text t = ari_text_in(out, ARI_CHOICE_TEXT);
    for (int i = 0; i < n; i++)
        ari_say(&t, "%s%s=%d", i == 0 ? "" : between, ari_layout_axes[ari_planned_axes[i]].name, c->extent[i]);
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
    layout->recompute.what = c->recompute;
    return p;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "planner/planner.h"
#include "ref/core/size.h"

static const char *const names[] = {
#define ARI_MEMORY_NAME(name, text) [ARI_MEMORY_##name] = text,
    ARI_MEMORY_TABLE(ARI_MEMORY_NAME)
#undef ARI_MEMORY_NAME
};

const char *ari_memory_name(ari_memory_kind k)
{
    return names[k];
}

double ari_memory_sum(const ari_memory *m)
{
    double sum = 0.0;
    for (int k = 0; k < ARI_MEMORY_KINDS; k++)
        sum += m->of[k];
    return sum;
}

double ari_optimizer_states(const ar_optimizer_options *o)
{
    if (o->kind != AR_OPTIMIZER_SGD)
        return 2.0;
    return o->momentum != 0.0 ? 1.0 : 0.0;
}

int ari_planned_overlap(const ari_planned *p)
{
    const ar_parallel *layout = &p->step.run.parallel;
    return layout->sp && layout->tp > 1 ? ari_at_least_one(layout->overlap) : 1;
}

bool ari_planned_runs(const ari_planned *p)
{
    return ari_at_least_one(p->pp) == 1 && ari_at_least_one(p->chunks) == 1 && p->step.run.parallel.zero <= 1;
}

size_t ari_layers_walked(const ari_step_case *c)
{
    const ar_recomputation *r = &c->run.parallel.recompute;
    const bool alike = c->run.plan.rules == 0 && (r->what == AR_RECOMPUTE_NONE || ari_at_least_one(r->every) == 1);
    return alike ? 1 : c->config->layers;
}

double ari_recomputed_share(const ari_step_case *c)
{
    const size_t every = (size_t)ari_at_least_one(c->run.parallel.recompute.every), layers = c->config->layers;
    if (c->run.parallel.recompute.what == AR_RECOMPUTE_NONE || layers == 0)
        return 0.0;
    return (double)(layers / every + (layers % every != 0)) / (double)layers;
}

void ari_stage_layers(size_t *first, size_t *count, size_t layers, size_t parts, size_t i)
{
    const size_t least = layers / parts, longer = layers % parts, begin = (parts - longer) / 2;
    const size_t before = i < begin ? 0 : i - begin < longer ? i - begin : longer;
    *first = i * least + before;
    *count = least + (i >= begin && i - begin < longer);
}

size_t ari_stage_count(const ari_planned *p, size_t i)
{
    const size_t pp = (size_t)ari_at_least_one(p->pp), parts = pp * (size_t)ari_at_least_one(p->chunks);
    size_t layers = 0;
    for (size_t part = i; part < parts; part += pp) {
        size_t first = 0, count = 0;
        ari_stage_layers(&first, &count, p->step.config->layers, parts, part);
        layers += count;
    }
    return layers;
}

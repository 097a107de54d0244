/* SPDX-License-Identifier: Apache-2.0 */
#include "planner/planner.h"

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

size_t ari_layers_walked(const ari_step_case *c)
{
    return c->run.plan.rules == 0 ? 1 : c->config->layers;
}

void ari_stage_layers(size_t *first, size_t *count, size_t layers, size_t parts, size_t i)
{
    const size_t least = layers / parts, longer = layers % parts, begin = (parts - longer) / 2;
    const size_t before = i < begin ? 0 : i - begin < longer ? i - begin : longer;
    *first = i * least + before;
    *count = least + (i >= begin && i - begin < longer);
}

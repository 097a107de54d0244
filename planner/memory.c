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

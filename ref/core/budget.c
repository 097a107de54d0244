/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/core/budget.h"

#include <sched.h>
#include <unistd.h>

int ari_cores(void)
{
    cpu_set_t mask;
    if (sched_getaffinity(0, sizeof mask, &mask) == 0 && CPU_COUNT(&mask) > 0)
        return CPU_COUNT(&mask);
    const long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 ? (int)online : 1;
}

int ari_core_budget(int threads, int ranks)
{
    const int share = ranks > 0 ? threads / ranks : 1;
    return share > 1 ? share : 1;
}

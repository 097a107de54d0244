/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/gradcheck/gradcheck_draw.h"

#include <math.h>

#include "ref/numerics/philox.h"

enum { TRIES = 1000 };

static void add(ari_drawn *d, size_t at)
{
    for (size_t i = 0; i < d->n; i++) {
        if (d->at[i] == at)
            return;
    }
    d->at[d->n++] = at;
}

void ari_draw_elements(ari_drawn *d, uint64_t key, size_t wanted, double low, const double *gradient, size_t count)
{
    size_t place = 0;
    for (uint64_t i = 0; i < TRIES && d->n < wanted; i++) {
        place = (size_t)(ari_random_unit(ari_random_u32(key, i, 0, (uint32_t)wanted)) * (double)count);
        if (low > 0.0 ? fabs(gradient[place]) > low : gradient[place] == 0.0)
            add(d, place);
    }
    for (size_t i = 0; i < count && d->n < wanted; i++) {
        const size_t at = (place + i) % count;
        if (low > 0.0 ? fabs(gradient[at]) > low : gradient[at] == 0.0)
            add(d, at);
    }
}

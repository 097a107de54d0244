/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "anyrank/sim.h"

/* Rank = ((pp * DP + dp) * CP + cp) * TP + tp: tp neighbours are neighbours, pp stages are far apart. */

ar_status ar_mesh_check(const ar_mesh *m, int world)
{
    if (!m || m->pp < 1 || m->dp < 1 || m->cp < 1 || m->tp < 1 || world < 1)
        return ar_error_set(AR_ERR_ARG, "mesh: extents of at least 1 are expected");
    /* Divides instead of multiplying: the product of four extents may not fit. */
    int left = world;
    const int extents[] = {m->tp, m->cp, m->dp, m->pp};
    for (int i = 0; i < 4; i++) {
        if (left % extents[i] != 0)
            left = 0;
        left /= extents[i];
    }
    if (left != 1)
        return ar_error_set(AR_ERR_INDIVISIBLE, "mesh: pp %d * dp %d * cp %d * tp %d is not the world of %d ranks",
                            m->pp, m->dp, m->cp, m->tp, world);
    return AR_OK;
}

void ar_mesh_coords(const ar_mesh *m, int rank, int *pp, int *dp, int *cp, int *tp)
{
    *tp = rank % m->tp;
    rank /= m->tp;
    *cp = rank % m->cp;
    rank /= m->cp;
    *dp = rank % m->dp;
    *pp = rank / m->dp;
}

int ar_mesh_group(const ar_mesh *m, int rank, const char *dim, int *ranks, int cap)
{
    static const char *const names[] = {"tp", "cp", "dp", "pp"};
    const int extents[] = {m->tp, m->cp, m->dp, m->pp};
    int stride = 1;
    for (int d = 0; d < 4; stride *= extents[d], d++) {
        if (strcmp(dim, names[d]) != 0)
            continue;
        const int first = rank - rank / stride % extents[d] * stride;
        for (int i = 0; i < extents[d] && i < cap; i++)
            ranks[i] = first + i * stride;
        return extents[d];
    }
    return 0;
}

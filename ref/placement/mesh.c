/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "anyrank/placement.h"
#include "ref/core/text.h"
#include "ref/placement/placement_private.h"

static ar_status check_dim(const ar_mesh *m, int d)
{
    const char *name = m->dim[d].name;
    const size_t length = strnlen(name, AR_MESH_NAME);
    if (length == 0 || length == AR_MESH_NAME)
        return ar_error_set(AR_ERR_ARG, "mesh: dimension %d needs a name of 1 to %d bytes", d, AR_MESH_NAME - 1);
    if (m->dim[d].size < 1)
        return ar_error_set(AR_ERR_ARG, "mesh: dimension '%s' has %d ranks, expected at least 1", ARI_SHOW(name),
                            m->dim[d].size);
    if (ari_mesh_find(m, name) != d)
        return ar_error_set(AR_ERR_ARG, "mesh: two dimensions are named '%s'", ARI_SHOW(name));
    return AR_OK;
}

ar_status ari_mesh_check(const ar_mesh *m, int world)
{
    if (!m || m->ndim < 0 || m->ndim > AR_MESH_DIMS || world < 1)
        return ar_error_set(AR_ERR_ARG, "mesh: 0 to %d dimensions and a world of at least 1 rank are expected",
                            AR_MESH_DIMS);
    char text[256];
    ari_text sizes = ari_text_in(text, sizeof text);
    int remaining = world; /* divided, since the product of the sizes may not fit */
    for (int d = 0; d < m->ndim; d++) {
        AR_TRY(check_dim(m, d));
        ari_say(&sizes, "%s%s %d", d ? " * " : "", m->dim[d].name, m->dim[d].size);
        remaining = remaining % m->dim[d].size == 0 ? remaining / m->dim[d].size : 0;
    }
    if (remaining != 1)
        return ar_error_set(AR_ERR_INDIVISIBLE, "mesh: %s is not the world of %d ranks", m->ndim ? text : "one rank",
                            world);
    return AR_OK;
}

bool ari_mesh_same(const ar_mesh *a, const ar_mesh *b)
{
    bool equal = a->ndim == b->ndim;
    for (int d = 0; d < a->ndim && equal; d++)
        equal = a->dim[d].size == b->dim[d].size && strncmp(a->dim[d].name, b->dim[d].name, AR_MESH_NAME) == 0;
    return equal;
}

int ari_mesh_find(const ar_mesh *m, const char *name)
{
    for (int d = 0; d < m->ndim; d++) {
        if (strncmp(m->dim[d].name, name, AR_MESH_NAME) == 0)
            return d;
    }
    return -1;
}

void ari_mesh_coords(const ar_mesh *m, int rank, int *coords)
{
    for (int d = m->ndim - 1; d >= 0; d--) {
        coords[d] = rank % m->dim[d].size;
        rank /= m->dim[d].size;
    }
}

int ari_mesh_group(const ar_mesh *m, int rank, int dim, int *ranks, int cap)
{
    if (dim < 0 || dim >= m->ndim)
        return 0;
    int stride = 1;
    for (int d = dim + 1; d < m->ndim; d++)
        stride *= m->dim[d].size;
    const int size = m->dim[dim].size, first_rank = rank - rank / stride % size * stride;
    for (int i = 0; i < size && i < cap; i++)
        ranks[i] = first_rank + i * stride;
    return size;
}

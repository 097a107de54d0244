/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/comm.h"
#include "anyrank/redistribute.h"
#include "ref/placement/placement_private.h"

/* FNV-1a over names and sizes, as a color. */
static int color_of(const ar_mesh *mesh)
{
    uint32_t hash = 2166136261u;
    for (int d = 0; d < mesh->ndim; d++) {
        const uint32_t size = (uint32_t)mesh->dim[d].size;
        for (int i = 0; i < AR_MESH_NAME && mesh->dim[d].name[i]; i++)
            hash = (hash ^ (unsigned char)mesh->dim[d].name[i]) * 16777619u;
        for (int i = 0; i < 32; i += 8)
            hash = (hash ^ (size >> i & 0xffu)) * 16777619u;
    }
    return (int)(hash & 0x7fffffffu);
}

/* Ranks with different meshes would wait for each other in groups, so all ranks first compare their meshes. */
static ar_status check_agreement(const ar_mesh *mesh, ar_comm *world)
{
    ar_comm *group = NULL;
    AR_TRY(ar_comm_split(&group, world, color_of(mesh), ar_comm_rank(world)));
    const int ranks = ar_comm_size(group), world_size = ar_comm_size(world);
    ar_comm_destroy(group);
    return ranks == world_size
               ? AR_OK
               : ar_error_set(AR_ERR_MISMATCH,
                              "mesh: %d of %d ranks have rank %d's mesh; all have to give the same names and "
                              "sizes",
                              ranks, world_size, ar_comm_rank(world));
}

ar_status ar_mesh_groups_init(ar_mesh_groups *g, const ar_mesh *mesh, ar_comm *world)
{
    const int rank = ar_comm_rank(world);
    *g = (ar_mesh_groups){.mesh = {0}};
    AR_TRY(ari_mesh_check(mesh, ar_comm_size(world)));
    AR_TRY(check_agreement(mesh, world));
    g->mesh = *mesh;
    ari_mesh_coords(mesh, rank, g->coords);
    for (int d = 0; d < mesh->ndim; d++) {
        int first_rank = rank;
        ari_mesh_group(mesh, rank, d, &first_rank, 1);
        const ar_status st = ar_comm_split(&g->comm[d], world, first_rank, g->coords[d]);
        if (st != AR_OK) {
            ar_mesh_groups_fini(g);
            return st;
        }
    }
    return AR_OK;
}

void ar_mesh_groups_fini(ar_mesh_groups *g)
{
    for (int d = 0; d < AR_MESH_DIMS; d++) {
        ar_comm_destroy(g->comm[d]);
        g->comm[d] = NULL;
    }
}

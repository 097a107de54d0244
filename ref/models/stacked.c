/* SPDX-License-Identifier: Apache-2.0 */

#include <stdio.h>
#include <string.h>

#include "ref/models/placement.h"

bool ari_stacked_path(char *out, size_t cap, ar_arch arch, const char *layer, ari_role role)
{
    static const char mlp[] = "mlp";
    const ari_family *f = ari_family_of(arch);
    char path[160];
    ari_role_path(path, sizeof path, arch, "", role);
    const size_t begin = strlen(f->blocks) + strlen(".."), own = strlen(f->mlp);
    const bool below = strlen(path) > begin && strncmp(path + begin, f->mlp, own) == 0,
               expert = ari_is_expert_part(role);
    if (!ari_part_path(f, ARI_ROUTER) || !below || (!expert && strcmp(f->mlp, mlp) == 0))
        return false;
    snprintf(out, cap, "%s.%s.%s%s", f->blocks, layer, mlp,
             !expert                   ? path + begin + own
             : role == ARI_EXPERT_DOWN ? ".experts.down_proj"
                                       : ".experts.gate_up_proj");
    return true;
}

/* [E, 2F, h] or [E, h, F] of an expert's own [F, h] or [h, F]. */
static void stack_expert(ari_stacked *s, const ar_config *c, const ari_param_place *at, const size_t *shape)
{
    s->ndim = 3;
    s->shape[0] = c->experts.n;
    s->shape[1] = at->part->role == ARI_EXPERT_DOWN ? shape[0] : 2 * shape[0];
    s->shape[2] = shape[1];
    s->expert = at->expert;
    s->row = at->part->role == ARI_EXPERT_UP ? shape[0] : 0;
}

/* GPT-OSS's, of a weight [out, in] or a bias [out]. */
static void interleave_expert(ari_stacked *s, const ar_config *c, const ari_param_place *at, int ndim,
                              const size_t *shape)
{
    const bool down = at->part->role == ARI_EXPERT_DOWN;
    const size_t every = down ? 1 : 2;
    s->ndim = ndim + 1;
    s->shape[0] = c->experts.n;
    s->shape[ndim] = every * shape[0];
    if (ndim == 2)
        s->shape[1] = shape[1];
    s->expert = at->expert;
    s->row = at->part->role == ARI_EXPERT_UP ? 1 : 0;
    s->step[0] = every;
    s->step[1] = every * shape[0];
}

bool ari_stacked_of(ari_stacked *s, const ar_config *c, const char *name, int ndim, const size_t *shape)
{
    ari_param_place at;
    char layer[24], path[140];
    *s = (ari_stacked){.ndim = ndim};
    const bool interleaved = ari_family_of(c->arch)->interleaved;
    if (!ari_param_place_of(&at, c, name) || (ndim != 2 && !interleaved) ||
        !ari_part_in_layer(c, at.part->role, at.layer))
        return false;
    snprintf(layer, sizeof layer, "%zu", at.layer);
    if (!ari_stacked_path(path, sizeof path, c->arch, layer, at.part->role))
        return false;
    memcpy(s->shape, shape, (size_t)ndim * sizeof *shape);
    if (ari_is_expert_part(at.part->role) && interleaved)
        interleave_expert(s, c, &at, ndim, shape);
    else if (ari_is_expert_part(at.part->role))
        stack_expert(s, c, &at, shape);
    snprintf(s->name, sizeof s->name, "%s%s", path,
             ari_is_expert_part(at.part->role) ? (ndim == 1 ? "_bias" : "") : ari_param_suffix(at.part->role, false));
    return true;
}

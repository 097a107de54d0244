/* SPDX-License-Identifier: Apache-2.0 */
/* Places of parameters in a model, by their names. */
#include "ref/models/placement.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "anyrank/config.h"

/* "3.mlp.up_proj.weight" -> 3, *rest "mlp.up_proj.weight". Names have no leading zeros and no sign. */
static bool numbered(const char *text, size_t *number, const char **rest)
{
    size_t n = 0, digits = 0;
    for (; text[digits] >= '0' && text[digits] <= '9'; digits++) {
        if (__builtin_mul_overflow(n, (size_t)10, &n) || __builtin_add_overflow(n, (size_t)(text[digits] - '0'), &n))
            return false;
    }
    if (digits == 0 || (digits > 1 && text[0] == '0') || text[digits] != '.')
        return false;
    *number = n;
    *rest = text + digits + 1;
    return true;
}

/* Returns the rest of `name` after `path` and a dot; NULL: it does not begin with them. "*" in the path stands for a
 * number, which is stored in *number. */
static const char *below(const char *name, const char *path, size_t *number)
{
    if (!path || !path[0])
        return NULL;
    for (; *path; path++) {
        if (*path != '*') {
            if (*path != *name++)
                return NULL;
        } else if (numbered(name, number, &name)) {
            name--; /* the dot */
        } else {
            return NULL;
        }
    }
    return *name == '.' ? name + 1 : *name == '\0' ? name : NULL;
}

size_t ari_layer_of_name(const ar_config *c, const char *name)
{
    size_t layer = 0;
    const char *rest = below(name, ari_family_of(c->arch)->blocks, &layer);
    return rest && numbered(rest, &layer, &rest) && layer < ar_config_blocks(c) ? layer : SIZE_MAX;
}

/* A parameter's position in the model, derived from its name. */
typedef struct param_place {
    const ari_family_part *part; /* static storage */
    size_t layer;                /* SIZE_MAX: in no layer */
    size_t expert;               /* 0 without experts */
} param_place;

/* Returns false if no part of the family has this name. */
static bool param_place_of(param_place *p, const ar_config *c, const char *name)
{
    const ari_family *f = ari_family_of(c->arch);
    const char *rest = name;
    size_t layer = 0;
    *p = (param_place){.layer = ari_layer_of_name(c, name)};
    if (p->layer != SIZE_MAX)
        (void)numbered(below(name, f->blocks, &layer), &layer, &rest);
    for (p->part = f->part; p->part->path; p->part++) {
        const bool in_block = ari_section_of(p->part->role) == ARI_IN_BLOCKS;
        if (in_block == (p->layer != SIZE_MAX) && below(rest, p->part->path, &p->expert) != NULL)
            return true;
    }
    return false;
}

/* --- stacked experts ---------------------------------------------------------------------------------------------- */

bool ari_stacked_path(char *out, size_t cap, ar_arch arch, const char *layer, ari_role role)
{
    static const char mlp[] = "mlp";
    const ari_family *f = ari_family_of(arch);
    char path[160];
    ari_role_path(path, sizeof path, arch, "", role);
    const size_t begin = strlen(f->blocks) + strlen(".."), mlp_length = strlen(f->mlp);
    const bool below = strlen(path) > begin && strncmp(path + begin, f->mlp, mlp_length) == 0,
               expert = ari_is_expert_part(role);
    if (!ari_part_path(f, ARI_ROUTER) || !below || (!expert && strcmp(f->mlp, mlp) == 0))
        return false;
    snprintf(out, cap, "%s.%s.%s%s", f->blocks, layer, mlp,
             !expert                   ? path + begin + mlp_length
             : role == ARI_EXPERT_DOWN ? ".experts.down_proj"
                                       : ".experts.gate_up_proj");
    return true;
}

/* Describes how an expert's [F, h] or [h, F] lies in the stacked [E, 2F, h] or [E, h, F]. */
static void stack_expert(ari_stacked *s, const ar_config *c, const param_place *place, const size_t *shape)
{
    s->ndim = 3;
    s->shape[0] = c->experts.n;
    s->shape[1] = place->part->role == ARI_EXPERT_DOWN ? shape[0] : 2 * shape[0];
    s->shape[2] = shape[1];
    s->expert = place->expert;
    s->row = place->part->role == ARI_EXPERT_UP ? shape[0] : 0;
}

/* GPT-OSS's, of a weight [out, in] or a bias [out]. */
static void interleave_expert(ari_stacked *s, const ar_config *c, const param_place *place, int ndim,
                              const size_t *shape)
{
    const bool down = place->part->role == ARI_EXPERT_DOWN;
    const size_t every = down ? 1 : 2;
    s->ndim = ndim + 1;
    s->shape[0] = c->experts.n;
    s->shape[ndim] = every * shape[0];
    if (ndim == 2)
        s->shape[1] = shape[1];
    s->expert = place->expert;
    s->row = place->part->role == ARI_EXPERT_UP ? 1 : 0;
    s->step[0] = every;
    s->step[1] = every * shape[0];
}

bool ari_stacked_of(ari_stacked *s, const ar_config *c, const char *name, int ndim, const size_t *shape)
{
    param_place place;
    char layer[24], path[140];
    *s = (ari_stacked){.ndim = ndim};
    const bool interleaved = ari_family_of(c->arch)->interleaved;
    if (!param_place_of(&place, c, name) || (ndim != 2 && !interleaved) ||
        !ari_part_in_layer(c, place.part->role, place.layer))
        return false;
    snprintf(layer, sizeof layer, "%zu", place.layer);
    if (!ari_stacked_path(path, sizeof path, c->arch, layer, place.part->role))
        return false;
    memcpy(s->shape, shape, (size_t)ndim * sizeof *shape);
    if (ari_is_expert_part(place.part->role) && interleaved)
        interleave_expert(s, c, &place, ndim, shape);
    else if (ari_is_expert_part(place.part->role))
        stack_expert(s, c, &place, shape);
    snprintf(s->name, sizeof s->name, "%s%s", path,
             ari_is_expert_part(place.part->role) ? (ndim == 1 ? "_bias" : "")
                                                  : ari_param_suffix(place.part->role, false));
    return true;
}

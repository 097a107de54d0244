/* SPDX-License-Identifier: Apache-2.0 */
/* The ranks' parts of parameters, without a model: the layers' own split as a table. */
#include "ref/models/placement.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "anyrank/reshard.h"
#include "ref/core/atomic_file.h"
#include "ref/core/axis.h"
#include "ref/core/size.h"
#include "ref/models/stages.h"

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

/* The rest of `name` after `path` and a dot; NULL: the name does not begin so. "*" in the path stands for a number, which
 * goes to *number. */
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

/* False: no part of the family has this name. */
static bool param_place_of(ari_param_place *p, const ar_config *c, const char *name)
{
    const ari_family *f = ari_family_of(c->arch);
    size_t layer = 0;
    *p = (ari_param_place){.layer = ari_layer_of_name(c, name), .rest = name};
    if (p->layer != SIZE_MAX)
        (void)numbered(below(name, f->blocks, &layer), &layer, &p->rest);
    for (p->part = f->part; p->part->path; p->part++) {
        const bool within = ari_section_of(p->part->role) == ARI_IN_BLOCKS;
        if (within == (p->layer != SIZE_MAX) && (p->kind = below(p->rest, p->part->path, &p->expert)) != NULL)
            return true;
    }
    return false;
}

/* A linear layer's weight or bias. Column-parallel: along its outputs; row-parallel: along its inputs, of which a bias
 * has none. */
static void place_linear(ari_placing *p, const ar_config *c, const ari_family_part *part, const char *kind)
{
    const ari_part_kind *k = ari_part_kind_of(part->role);
    const bool bias = strcmp(kind, "bias") == 0, column = k->style == AR_STYLE_COLWISE;
    const ari_shape_extent split = column ? k->out : k->in;
    if ((bias && !column) || k->style == AR_STYLE_REPLICATE)
        return;
    p->dim = bias || column != ari_family_of(c->arch)->transposed ? 0 : 1;
    p->blocks = split == ARI_PACKED_HEADS ? 3 : split == ARI_PACKED_FFN ? 2 : 1;
    for (int i = 0; i < p->blocks && p->blocks > 1; i++)
        p->block[i] = p->blocks == 2 ? c->ffn : (i == 0 ? c->heads : c->kv_heads) * c->head_dim;
    p->copied = split == ARI_KV_HEADS;
    /* If KV heads divide, so do query heads. */
    const bool by_heads = split == ARI_QUERY_HEADS || split == ARI_VALUE_HEADS || split == ARI_KEY_VALUE_HEADS;
    p->heads = p->copied || split == ARI_PACKED_HEADS ? c->kv_heads : by_heads ? c->heads : 0;
}

static void outside(ari_placing *p, const ar_config *c, ari_role role, bool embedding_hidden)
{
    const bool token = role == ARI_TOKENS;
    p->vocabulary = token || role == ARI_HEAD;
    if (p->vocabulary) {
        p->dim = token && embedding_hidden ? 1 : 0;
        p->uneven = p->dim == 0;
    }
    p->first = token || role == ARI_POSITIONS;
    p->last = !p->first || (token && (c->tied || c->mtp > 0));
}

void ari_placing_of(ari_placing *p, const ar_config *c, const char *name, int ndim, const size_t *shape,
                    bool embedding_hidden)
{
    ari_param_place at;
    const bool known = param_place_of(&at, c, name);
    *p = (ari_placing){.ndim = ndim, .dim = -1, .blocks = 1, .layer = at.layer};
    for (int d = 0; d < ndim; d++)
        p->shape[d] = shape[d];
    if (p->layer == SIZE_MAX)
        outside(p, c, known ? at.part->role : ARI_NO_ROLE, embedding_hidden);
    else if (known && ari_part_kind_of(at.part->role)->form == ARI_FORM_LINEAR)
        place_linear(p, c, at.part, at.kind);
    if (known && ari_part_kind_of(at.part->role)->form == ARI_FORM_HEADS) {
        p->dim = 0;
        p->heads = c->heads;
    }
}

static ar_status check_heads(const ari_placing *p, const char *name, int tp)
{
    const size_t n = (size_t)tp, extent = p->blocks > 1 ? p->block[1] : p->shape[p->dim];
    if (p->heads == 0 || p->heads % n == 0 || (p->copied && n % p->heads == 0))
        return AR_OK;
    return ar_error_set(
        AR_ERR_INDIVISIBLE,
        "%s: dimension %d of %zu is %zu heads%s, which cannot be split over%s tp=%d ranks; use a tp that divides %zu%s",
        ARI_SHOW(name), p->dim, extent, p->heads, p->blocks > 1 ? " in each block" : "",
        p->copied ? ", nor copied evenly to," : "", tp, p->heads, p->copied ? " or is a multiple of it" : "");
}

ar_status ari_placing_layout(ar_layout *o, const ari_placing *p, const char *name, int tp, int rank)
{
    if (tp < 1 || rank < 0 || rank >= tp)
        return ar_error_set(AR_ERR_ARG, "%s: rank %d of tp=%d is not a rank", ARI_SHOW(name), rank, tp);
    if (p->dim < 0)
        return ar_layout_replicate(o, p->ndim, p->shape, rank, tp);
    if (p->uneven)
        return ar_layout_shard_uneven(o, p->ndim, p->shape, p->dim, rank, tp);
    AR_TRY(check_heads(p, name, tp));
    const int copies = p->copied && (size_t)tp > p->heads ? tp / (int)p->heads : 1, parts = tp / copies;
    const size_t whole[1] = {p->shape[p->dim]}, *block = p->blocks > 1 ? p->block : whole;
    for (int i = 0; i < p->blocks; i++) {
        if (block[i] % (size_t)parts != 0)
            return ar_error_set(AR_ERR_INDIVISIBLE,
                                "%s: dimension %d of %zu cannot be split over tp=%d ranks; use a tp that divides it",
                                ARI_SHOW(name), p->dim, block[i], parts);
    }
    AR_TRY(ar_layout_packed(o, p->ndim, p->shape, p->dim, block, p->blocks, rank / copies, parts));
    o->replica = rank % copies;
    o->replicas = copies;
    return AR_OK;
}

/* --- stages ------------------------------------------------------------------------------------------------------- */

bool ari_placing_staged(const ari_placing *p, const ar_parallel *parallel, size_t layers, int place)
{
    if (p->layer != SIZE_MAX)
        return ari_stage_rank_of_layer(parallel, layers, p->layer) == place;
    return (p->first && place == 0) || (p->last && place == ari_extent(parallel, ARI_CUTS_LAYERS) - 1);
}

/* --- stacked experts ---------------------------------------------------------------------------------------------- */

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
    if (!param_place_of(&at, c, name) || (ndim != 2 && !interleaved) || !ari_part_in_layer(c, at.part->role, at.layer))
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

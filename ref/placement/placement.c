/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/placement.h"

#include <stdio.h>
#include <string.h>

#include "ref/core/tensor_private.h"
#include "ref/core/text.h"
#include "ref/placement/placement_private.h"

/* --- texts -------------------------------------------------------------------------------------------------------- */

/* Spellings of a placement: the first is used for output, the others are accepted as input. "S(" and "Shard(" are
 * followed by a number. */
static const struct {
    const char *word;
    ar_placement_kind kind;
} spellings[] = {
    {"R", AR_REPLICATE},           {"Replicate()", AR_REPLICATE},
    {"I", AR_INVARIANT},           {"Invariant()", AR_INVARIANT},
    {"P(sum)", AR_PARTIAL_SUM},    {"Partial(sum)", AR_PARTIAL_SUM},
    {"Partial()", AR_PARTIAL_SUM}, {"P", AR_PARTIAL_SUM},
    {"P(max)", AR_PARTIAL_MAX},    {"Partial(max)", AR_PARTIAL_MAX},
};
static const char *const shards[] = {"S(dim=", "S(", "Shard(dim=", "Shard("};

enum { MOST_DIGITS = 3 };

const char *ari_placement_name(char text[AR_PLACEMENT_TEXT], ar_placement p)
{
    snprintf(text, AR_PLACEMENT_TEXT, "?");
    if (p.kind == AR_SHARD)
        snprintf(text, AR_PLACEMENT_TEXT, "S(%d)", p.dim);
    for (size_t i = sizeof spellings / sizeof *spellings; i-- > 0;) {
        if (spellings[i].kind == p.kind)
            snprintf(text, AR_PLACEMENT_TEXT, "%s", spellings[i].word);
    }
    return text;
}

/* Reads a number followed by ")" and nothing else, such as "-1)". */
static bool read_dim(int *dim, const char *text, size_t n)
{
    const size_t sign = n > 0 && text[0] == '-';
    int value = 0;
    if (n < sign + 2 || n > sign + 1 + MOST_DIGITS || text[n - 1] != ')')
        return false;
    for (size_t i = sign; i + 1 < n; i++) {
        if (text[i] < '0' || text[i] > '9')
            return false;
        value = value * 10 + (text[i] - '0');
    }
    *dim = sign ? -value : value;
    return true;
}

static ar_status parse_word(ar_placement *p, const char *text, size_t n)
{
    for (size_t i = 0; i < sizeof spellings / sizeof *spellings; i++) {
        if (strlen(spellings[i].word) == n && memcmp(spellings[i].word, text, n) == 0) {
            *p = (ar_placement){.kind = spellings[i].kind};
            return AR_OK;
        }
    }
    for (size_t i = 0; i < sizeof shards / sizeof *shards; i++) {
        const size_t begun = strlen(shards[i]);
        int dim = 0;
        if (n > begun && memcmp(shards[i], text, begun) == 0 && read_dim(&dim, text + begun, n - begun)) {
            *p = (ar_placement){.kind = AR_SHARD, .dim = dim};
            return AR_OK;
        }
    }
    char shown[64];
    snprintf(shown, sizeof shown, "%.*s", n < 40 ? (int)n : 40, text);
    return ar_error_set(AR_ERR_ARG,
                        "'%s' is not a placement; R, I, S(dim), P(sum) and P(max) are, or Replicate(), Shard(dim=1), "
                        "Partial(sum)",
                        ARI_SHOW(shown));
}

/* Removes spaces at both ends of [*text, *text + *n). */
static void trim(const char **text, size_t *n)
{
    static const char blank[] = " \t\r\n";
    while (*n > 0 && strchr(blank, **text))
        (*text)++, (*n)--;
    while (*n > 0 && strchr(blank, (*text)[*n - 1]))
        (*n)--;
}

ar_status ari_placement_read(ar_placement *p, const char *text)
{
    size_t n = strlen(text);
    trim(&text, &n);
    return parse_word(p, text, n);
}

const char *ari_placements_text(char *text, size_t cap, const ar_placement *p, int n)
{
    ari_text t = ari_text_in(text, cap);
    char name[AR_PLACEMENT_TEXT];
    for (int i = 0; i < n; i++)
        ari_say(&t, "%s%s", i ? ", " : "[", ari_placement_name(name, p[i]));
    ari_say(&t, n ? "]" : "[]");
    return text;
}

ar_status ar_placements_parse(ar_placement *p, int n, const char *text)
{
    ar_placement read[AR_MESH_DIMS] = {{0}};
    const char *const input = text;
    size_t remaining = strlen(text);
    int count = 0;
    trim(&text, &remaining);
    /* "(Shard(dim=0),)" is a list, while "Shard(dim=0)" is a member. */
    if (remaining >= 2 &&
        ((text[0] == '[' && text[remaining - 1] == ']') || (text[0] == '(' && text[remaining - 1] == ')'))) {
        text++, remaining -= 2;
        trim(&text, &remaining);
        if (remaining > 0 && text[remaining - 1] == ',')
            remaining--;
    }
    for (; remaining > 0; count++) {
        const char *comma = memchr(text, ',', remaining), *word = text;
        size_t length = comma ? (size_t)(comma - text) : remaining;
        text += length + (comma != NULL);
        remaining -= length + (comma != NULL);
        trim(&word, &length);
        ar_placement placement;
        AR_TRY(parse_word(&placement, word, length));
        if (count < AR_MESH_DIMS)
            read[count] = placement;
        if (comma && remaining == 0)
            return parse_word(&placement, "", 0);
    }
    if (count != n)
        return ar_error_set(AR_ERR_ARG, "'%s' has %d placements, expected one for each of the mesh's %d dimensions",
                            ARI_SHOW(input), count, n);
    for (int i = 0; i < n; i++)
        p[i] = read[i];
    return AR_OK;
}

/* --- of a tensor -------------------------------------------------------------------------------------------------- */

/* The dimension that a shard of a tensor of `ndim` cuts. */
static int dim_of(ar_placement p, int ndim)
{
    return p.dim < 0 ? p.dim + ndim : p.dim;
}

ar_status ari_placement_check(ar_placement p, int ndim)
{
    char text[AR_PLACEMENT_TEXT];
    if ((unsigned)p.kind >= AR_PLACEMENT_KINDS)
        return ar_error_set(AR_ERR_ARG, "%d is not a kind of placement; 0 to %d are", (int)p.kind,
                            AR_PLACEMENT_KINDS - 1);
    if (p.kind != AR_SHARD || (dim_of(p, ndim) >= 0 && dim_of(p, ndim) < ndim))
        return AR_OK;
    if (ndim == 0)
        return ar_error_set(AR_ERR_ARG, "%s of a tensor without dimensions; a scalar cannot be cut",
                            ari_placement_name(text, p));
    return ar_error_set(AR_ERR_ARG, "%s of a tensor of %d dimensions; %d to %d are possible",
                        ari_placement_name(text, p), ndim, -ndim, ndim - 1);
}

bool ari_placement_same(ar_placement a, ar_placement b, int ndim)
{
    return a.kind == b.kind && (a.kind != AR_SHARD || dim_of(a, ndim) == dim_of(b, ndim));
}

ar_status ari_placement_gradient(ar_placement *g, ar_placement p)
{
    static const ar_placement_kind gradient_kinds[AR_PLACEMENT_KINDS] = {[AR_REPLICATE] = AR_PARTIAL_SUM,
                                                                         [AR_INVARIANT] = AR_INVARIANT,
                                                                         [AR_SHARD] = AR_SHARD,
                                                                         [AR_PARTIAL_SUM] = AR_REPLICATE};
    if (p.kind == AR_PARTIAL_MAX || (unsigned)p.kind >= AR_PLACEMENT_KINDS)
        return ar_error_set(AR_ERR_UNSUPPORTED,
                            "a maximum over ranks is not a linear map, so a P(max) has no gradient to place; keep "
                            "maxima out of the backward pass");
    *g = (ar_placement){gradient_kinds[p.kind], p.dim};
    return AR_OK;
}

/* Cuts [start, start + extent) of dimension `dim` for coordinate `coord` of a dimension of the mesh. */
static ar_status cut(size_t *start, size_t *extent, const ar_mesh_dim *mesh_dim, int coord, int dim, bool uneven)
{
    size_t offset = 0, count = 0;
    if (!uneven && *extent % (size_t)mesh_dim->size != 0)
        return ar_error_set(AR_ERR_INDIVISIBLE,
                            "dimension %d has %zu elements, which the %d ranks of '%s' do not divide; use a multiple "
                            "of %d",
                            dim, *extent, mesh_dim->size, mesh_dim->name, mesh_dim->size);
    ari_split_uneven(*extent, mesh_dim->size, coord, &offset, &count);
    *start += offset;
    *extent = count;
    return AR_OK;
}

ar_status ar_placements_region(size_t *start, size_t *extent, const ar_mesh *mesh, const int *coords,
                               const ar_placement *p, int ndim, const size_t *shape, bool uneven)
{
    size_t offset[AR_MAX_DIMS] = {0}, count[AR_MAX_DIMS] = {0};
    if (ndim < 0 || ndim > AR_MAX_DIMS)
        return ar_error_set(AR_ERR_ARG, "a tensor has 0 to %d dimensions, not %d", AR_MAX_DIMS, ndim);
    for (int d = 0; d < ndim; d++)
        count[d] = shape[d];
    for (int m = 0; m < mesh->ndim; m++) {
        AR_TRY(ari_placement_check(p[m], ndim));
        if (coords[m] < 0 || coords[m] >= mesh->dim[m].size)
            return ar_error_set(AR_ERR_ARG, "coordinate %d along '%s' of %d ranks", coords[m], mesh->dim[m].name,
                                mesh->dim[m].size);
        const int d = dim_of(p[m], ndim);
        if (p[m].kind == AR_SHARD)
            AR_TRY(cut(&offset[d], &count[d], &mesh->dim[m], coords[m], d, uneven));
    }
    for (int d = 0; d < ndim; d++) {
        if (start)
            start[d] = offset[d];
        extent[d] = count[d];
    }
    return AR_OK;
}

ar_status ari_placements_layout(ar_layout *o, const ar_mesh *mesh, const int *coords, const ar_placement *p, int ndim,
                                const size_t *shape, bool uneven)
{
    ar_layout layout = {.ndim = ndim, .replicas = 1};
    ar_box box = {{0}, {0}, {0}};
    AR_TRY(ar_placements_region(box.global, box.extent, mesh, coords, p, ndim, shape, uneven));
    bool empty = false, cut_here = false;
    for (int m = 0; m < mesh->ndim; m++) {
        const bool copies = p[m].kind == AR_REPLICATE || p[m].kind == AR_INVARIANT;
        cut_here |= p[m].kind == AR_SHARD;
        layout.replica = copies ? layout.replica * mesh->dim[m].size + coords[m] : layout.replica;
        layout.replicas *= copies ? mesh->dim[m].size : 1;
    }
    for (int d = 0; d < ndim; d++) {
        layout.shape[d] = shape[d];
        empty |= box.extent[d] == 0;
    }
    if (!empty || !cut_here)
        layout.box[layout.nbox++] = box;
    *o = layout;
    return AR_OK;
}

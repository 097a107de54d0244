/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/models/param_list.h"

#include <stdio.h>

#include "ref/models/family.h"

typedef struct walk {
    const ar_config *config;
    ar_status (*visit)(void *user, const char *name, int ndim, const size_t *shape);
    void *user;
} walk;

/* The weight in its stored orientation, then the bias. block: "model.layers.0.", or "". */
static ar_status visit_part(const walk *w, const ari_family_part *p, const char *block)
{
    const ari_part_kind *k = ari_part_kind_of(p->role);
    const bool transposed = k->form == ARI_LINEAR && ari_family_of(w->config->arch)->transposed;
    const size_t out = ari_extent_of(w->config, k->out), in = ari_extent_of(w->config, k->in);
    const size_t shape[2] = {transposed ? in : out, transposed ? out : in};
    char name[160];
    snprintf(name, sizeof name, "%s%s.weight", block, p->path);
    AR_TRY(w->visit(w->user, name, k->form == ARI_NORM ? 1 : 2, shape));
    if (!ari_part_has_bias(w->config, p->role))
        return AR_OK;
    snprintf(name, sizeof name, "%s%s.bias", block, p->path);
    return w->visit(w->user, name, 1, &out);
}

static ar_status visit_section(const walk *w, ari_section section, const char *block)
{
    for (const ari_family_part *p = ari_family_of(w->config->arch)->part; p->path; p++) {
        if (ari_section_of(p->role) == section && ari_part_present(w->config, p->role))
            AR_TRY(visit_part(w, p, block));
    }
    return AR_OK;
}

ar_status ari_param_list(const ar_config *c,
                         ar_status (*visit)(void *user, const char *name, int ndim, const size_t *shape), void *user)
{
    const walk w = {c, visit, user};
    AR_TRY(visit_section(&w, ARI_BEFORE_BLOCKS, ""));
    for (size_t i = 0; i < c->layers; i++) {
        char block[64];
        snprintf(block, sizeof block, "%s.%zu.", ari_family_of(c->arch)->blocks, i);
        AR_TRY(visit_section(&w, ARI_IN_BLOCKS, block));
    }
    return visit_section(&w, ARI_AFTER_BLOCKS, "");
}

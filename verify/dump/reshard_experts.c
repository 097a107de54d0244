/* SPDX-License-Identifier: Apache-2.0 */
/* Tensors of the input by the config's names and shapes: those that hold the experts of a layer together (placement.h), or
 * their optimizer state, become one for each parameter, whose boxes are cut out of theirs. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/text.h"
#include "verify/dump/dump.h"
#include "verify/dump/reshard.h"

/* A parameter, and where it is by its other name. */
typedef struct other_name {
    ari_stacked at; /* its name first: the key */
    char name[160];
    int ndim;
    size_t shape[2];
} other_name;

typedef struct other_names {
    ari_rs *r;
    other_name *list; /* by the other name, the arena's */
    size_t count, capacity;
} other_names;

static ar_status add_other(void *user, const char *name, int ndim, const size_t *shape)
{
    other_names *o = user;
    ari_stacked at;
    if (!ari_stacked_of(&at, &o->r->config, name, ndim, shape))
        return AR_OK;
    AR_TRY(ARI_GROW_IN(&o->r->arena, &o->list, &o->capacity, o->count, "the list of parameters"));
    other_name *one = &o->list[o->count++];
    *one = (other_name){.at = at, .ndim = ndim, .shape = {shape[0], shape[1]}};
    snprintf(one->name, sizeof one->name, "%s", name);
    return AR_OK;
}

/* The first of those that a tensor's name begins with; what follows goes to *rest, and how many there are to *n. */
static const other_name *others_of(const other_names *o, const char *name, const char **rest, size_t *n)
{
    other_name wanted;
    const other_name *found = NULL;
    size_t length = strlen(name);
    for (*rest = ""; !found && length > 0 && length < sizeof wanted.at.name;) {
        snprintf(wanted.at.name, sizeof wanted.at.name, "%.*s", (int)length, name);
        found = bsearch(&wanted, o->list, o->count, sizeof *o->list, ari_by_text);
        *rest = name + length;
        while (!found && length > 0 && name[--length] != '.' && name[length] != ':')
            continue;
    }
    if (!found)
        return NULL;
    while (found > o->list && ari_by_text(found - 1, found) == 0)
        found--;
    for (*n = 1; found + *n < o->list + o->count && ari_by_text(found + *n, found) == 0;)
        ++*n;
    return found;
}

/* --- taking apart ------------------------------------------------------------------------------------------------- */

typedef struct unstacking {
    other_names names;
    size_t stacked; /* tensors that hold several parameters */
} unstacking;

static ar_status cuts_of(void *user, const ar_dump_tensor *t, ari_tensor_cuts *cuts)
{
    unstacking *u = user;
    const char *rest;
    size_t n = 0;
    const other_name *first = others_of(&u->names, t->name, &rest, &n);
    if (!first)
        return AR_OK;
    if (!ari_same_extents(t->ndim, t->shape, first->at.ndim, first->at.shape))
        return rest[0] == '\0' ? ari_rs_wrong_shape(t, first->at.ndim, first->at.shape) : AR_OK;
    for (const other_name *o = first; o < first + n; o++) {
        AR_TRY(ari_tensor_cuts_add(cuts, t, o->name, rest));
        if (o->at.ndim > o->ndim)
            ari_tensor_cut_expert(&cuts->cut[cuts->n - 1], o->at.ndim, o->at.expert, o->at.row, o->shape[0],
                                  o->at.step[0]);
    }
    u->stacked += n > 1;
    return AR_OK;
}

ar_status ari_rs_unstack(ari_rs *r)
{
    unstacking u = {.names.r = r};
    other_names *o = &u.names;
    AR_TRY(ari_param_list(&r->config, add_other, o));
    ARI_SORT(o->list, o->count, ari_by_text);
    if (o->count > 0)
        AR_TRY(ari_dump_take_apart(r->dump, cuts_of, &u));
    r->stacked = u.stacked;
    return AR_OK;
}

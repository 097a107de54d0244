/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/reference/use_names.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/context.h"
#include "ref/core/size.h"

struct ari_use {
    char name[160];
    char pass;
    size_t start; /* of its first row in the full tensor */
    int times;
};

static struct ari_use *find(ari_use_names *n, const ar_tap_event *e, size_t start)
{
    for (size_t i = 0; i < n->count; i++) {
        struct ari_use *u = &n->use[i];
        if (u->pass == e->pass && u->start == start && strcmp(u->name, e->name) == 0)
            return u;
    }
    return NULL;
}

static ar_status pass_on(void *user, const ar_tap_event *e)
{
    ari_use_names *n = user;
    const size_t start = e->layout->nbox > 0 && e->layout->ndim > 0 ? e->layout->box[0].global[0] : 0;
    if (e->step != n->step)
        n->count = 0;
    n->step = e->step;
    struct ari_use *u = find(n, e, start);
    if (!u) {
        AR_TRY(ari_grow(&n->use, &n->capacity, n->count, sizeof *n->use, "names of tensors"));
        u = &n->use[n->count++];
        *u = (struct ari_use){.pass = e->pass, .start = start};
        snprintf(u->name, sizeof u->name, "%s", e->name);
    }
    if (++u->times == 1)
        return n->tap(n->tap_user, e);
    char name[sizeof u->name + 24];
    ar_tap_event again = *e;
    snprintf(name, sizeof name, "%s (use %d)", e->name, u->times);
    again.name = name;
    return n->tap(n->tap_user, &again);
}

void ari_use_names_begin(ari_use_names *n, ar_ctx *ctx)
{
    *n = (ari_use_names){.tap = ctx->tap, .tap_user = ctx->tap_user};
    if (!n->tap)
        return;
    ctx->tap = pass_on;
    ctx->tap_user = n;
}

void ari_use_names_end(ari_use_names *n, ar_ctx *ctx)
{
    ctx->tap = n->tap;
    ctx->tap_user = n->tap_user;
    free(n->use);
    n->use = NULL;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/models/model.h"

#include <stdio.h>
#include <stdlib.h>

#include "ref/core/size.h"
#include "ref/layers/parts.h"
#include "ref/models/family.h"
#include "ref/numerics/philox.h"

static int by_key(const void *a, const void *b)
{
    const uint64_t x = ((const ari_random_stream *)a)->key, y = ((const ari_random_stream *)b)->key;
    return x < y ? -1 : x > y;
}

ar_status ari_streams_distinct(ari_random_stream *s, size_t n)
{
    if (n > 1)
        qsort(s, n, sizeof *s, by_key);
    for (size_t i = 1; i < n; i++) {
        if (s[i].key == s[i - 1].key)
            return ar_error_set(AR_ERR_UNSUPPORTED, "'%s' and '%s' draw the same random numbers; use another seed",
                                s[i - 1].name, s[i].name);
    }
    return AR_OK;
}

typedef struct list {
    ari_random_stream *streams; /* the streams; NULL: they are only counted */
    size_t n;
    uint64_t seed;
} list;

static void put_name(list *l, const char *name)
{
    if (l->streams) {
        l->streams[l->n].key = ari_stream_key(l->seed, name);
        snprintf(l->streams[l->n].name, sizeof l->streams->name, "%s", name);
    }
    l->n++;
}

static ar_status put_param(void *user, const char *name, int ndim, const size_t *shape)
{
    (void)ndim, (void)shape;
    put_name(user, name);
    return AR_OK;
}

static ar_status put_all(list *l, const ar_config *c)
{
    const ari_family *f = ari_family_of(c->arch);
    const char *const dropout_paths[3][2] = {
        {f->attention, ARI_DROPPED_PROBS}, {f->attention, ARI_DROPPED_ATTENTION}, {f->mlp, ARI_DROPPED_MLP}};
    char name[160];
    l->n = 0;
    AR_TRY(ari_param_list(c, put_param, l));
    if (c->learned_positions)
        put_name(l, f->embedded);
    for (size_t i = 0; i < ar_config_blocks(c); i++) {
        for (size_t k = 0; k < 3; k++) {
            snprintf(name, sizeof name, "%s.%zu.%s.%s", f->blocks, i, dropout_paths[k][0], dropout_paths[k][1]);
            put_name(l, name);
        }
    }
    return AR_OK;
}

ar_status ari_streams_check(const ar_config *c, uint64_t seed)
{
    ARI_OWNED ari_random_stream *streams = NULL;
    list l = {.seed = seed};
    AR_TRY(put_all(&l, c));
    AR_TRY(ARI_ALLOC(&streams, l.n, "names of random streams"));
    l.streams = streams;
    AR_TRY(put_all(&l, c));
    return ari_streams_distinct(l.streams, l.n);
}

/* SPDX-License-Identifier: Apache-2.0 */
/* The order of samples. A dump may say of each step which samples it had, as a number for each by what the model was
 * given. Where both dumps had the same ones in another order, as loaders deal them to ranks in different ways, tensors
 * by sample are read in the reference's order. */
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/size.h"
#include "ref/core/text.h"
#include "ref/io/json.h"
#include "verify/dumps/verify_impl.h"

typedef struct numbered {
    long long digest;
    size_t place;
} numbered;

static int by_digest(const void *a, const void *b)
{
    const numbered *x = a, *y = b;
    ARI_ASCENDING(x->digest, y->digest);
    return x->place < y->place ? -1 : x->place > y->place;
}

static ar_status sort_digests(numbered **sorted, const json_t *list, ari_arena *arena)
{
    const size_t n = json_array_size(list);
    AR_TRY(ARI_TAKE(sorted, arena, n, "samples of a step"));
    for (size_t i = 0; i < n; i++)
        (*sorted)[i] = (numbered){json_integer_value(json_array_get(list, i)), i};
    qsort(*sorted, n, sizeof **sorted, by_digest);
    return AR_OK;
}

/* Fills s->place if the two lists have the same digests in another order. */
static ar_status compare_order(ari_sample_order *s, const json_t *reference, const json_t *other, ari_arena *arena)
{
    numbered *a = NULL, *b = NULL;
    const size_t n = json_array_size(reference);
    bool moved = false;
    if (n == 0 || json_array_size(other) != n)
        return AR_OK;
    AR_TRY(sort_digests(&a, reference, arena));
    AR_TRY(sort_digests(&b, other, arena));
    for (size_t i = 0; i < n; i++) {
        if (a[i].digest != b[i].digest)
            return AR_OK;
        moved = moved || a[i].place != b[i].place;
    }
    if (!moved)
        return AR_OK;
    AR_TRY(ARI_TAKE(&s->place, arena, n, "samples of a step"));
    for (size_t i = 0; i < n; i++)
        s->place[b[i].place] = a[i].place;
    s->samples = n;
    return AR_OK;
}

static ar_status learn_orders(ari_verifying *v, const json_t *reference, const json_t *other)
{
    const char *step;
    json_t *list;
    AR_TRY(ARI_TAKE(&v->order, &v->arena, json_object_size(reference), "orders of samples"));
    json_object_foreach((json_t *)(uintptr_t)reference, step, list)
    {
        ari_sample_order s = {.step = atoi(step)};
        AR_TRY(compare_order(&s, list, json_object_get(other, step), &v->arena));
        if (s.place)
            v->order[v->orders++] = s;
    }
    return AR_OK;
}

ar_status ari_verify_samples(ari_verifying *v)
{
    json_t *said[2] = {NULL, NULL};
    ar_status st = AR_OK;
    for (int k = 0; k < 2 && st == AR_OK; k++) {
        const char *text = ar_dump_metadata(v->dump[k], "anyrank.samples");
        if (text)
            st = ari_json_parse(&said[k], text, strlen(text), ar_dump_path(v->dump[k]));
    }
    if (st == AR_OK && said[0] && said[1])
        st = learn_orders(v, said[0], said[1]);
    json_decref(said[0]);
    json_decref(said[1]);
    return st;
}

ar_status ari_verify_reorder(ari_verifying *v, ari_sides *s, char pass, int step)
{
    const ar_dump_tensor *t = s->of[1];
    const ari_sample_order *found = NULL;
    for (size_t i = 0; i < v->orders && !found; i++)
        found = v->order[i].step == step ? &v->order[i] : NULL;
    if (!found || !t || !s->of[0] || !strchr("fb", pass) || t->sample_rows == 0 || t->ndim == 0 ||
        t->shape[0] != found->samples * t->sample_rows)
        return AR_OK;
    ari_sample *reordered = NULL;
    AR_TRY(ARI_TAKE(&reordered, &v->arena, 1, "pairs of tensors"));
    AR_TRY(ari_reordered_init(reordered, t, found->place, &v->arena));
    s->of[1] = &reordered->tensor;
    v->report->reordered++;
    return AR_OK;
}

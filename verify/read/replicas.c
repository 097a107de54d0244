/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/tensor_private.h"
#include "ref/io/safetensors_private.h"
#include "verify/read/dump.h"
#include "verify/read/dump_private.h"

/* One copy of a box. */
typedef struct copy {
    const ar_dump_part *part;
    const ar_dump_box *box;
    size_t start; /* index of its first element, which differs between boxes that are not copies of each other */
} copy;

typedef struct pair {
    const ar_dump_tensor *t;
    const copy *copies[2];
    const ari_dump_run *run; /* run of the first copy, while the second copy's runs are visited */
    size_t first_index, different;
    ar_dump_differs differs; /* NULL: by bits */
    void *user;
    size_t drift;
} pair;

static int compare_copies(const void *a, const void *b)
{
    const copy *x = a, *y = b;
    ARI_ASCENDING(x->start, y->start);
    ARI_ASCENDING(x->box->replica, y->box->replica);
    return (x->part > y->part) - (x->part < y->part);
}

/* --- two copies --------------------------------------------------------------------------------------------------- */
static void add_difference(pair *p, size_t index)
{
    p->first_index = p->different == 0 || index < p->first_index ? index : p->first_index;
    p->different++;
}

static ar_status compare_run(void *user, const ari_dump_run *b)
{
    pair *p = user;
    const size_t bytes = ar_dtype_bytes(p->t->dtype);
    const ari_dump_run *a = p->run;
    const char *x = a->data + (b->full - a->full) * a->step;
    if (a->step == bytes && b->step == bytes && memcmp(x, b->data, b->count * bytes) == 0)
        return AR_OK;
    for (size_t i = 0; i < b->count; i++) {
        const char *u = x + i * a->step, *v = b->data + i * b->step;
        if (memcmp(u, v, bytes) == 0)
            continue;
        if (p->differs == NULL || p->differs(p->user, u, v))
            add_difference(p, b->full + i);
        else
            p->drift++;
    }
    return AR_OK;
}

static ar_status compare_with_run(void *user, const ari_dump_run *a)
{
    pair *p = user;
    p->run = a;
    return ari_dump_each_run(p->t, p->copies[1]->part, p->copies[1]->box, a->full, a->count, compare_run, p);
}

/* Compares elements smaller than a byte, `bits` apart. Only whole tensors have such elements. */
static void compare_bits(pair *p, const unsigned char *x, const unsigned char *y, size_t count, size_t bits)
{
    for (size_t i = 0; i < count; i++)
        for (size_t b = i * bits; b < (i + 1) * bits; b++)
            if (((x[b / 8] ^ y[b / 8]) >> (b % 8) & 1) != 0) {
                add_difference(p, i);
                break;
            }
}

static ar_status compare_pair(pair *p)
{
    const size_t count = ari_dump_box_count(p->t->ndim, p->copies[0]->box), bits = ari_dtype_bits(p->t->dtype);
    const char *x = ari_dump_box_data(p->t, p->copies[0]->part, p->copies[0]->box),
               *y = ari_dump_box_data(p->t, p->copies[1]->part, p->copies[1]->box);
    p->different = 0;
    if (x != NULL && y != NULL && memcmp(x, y, count * bits / 8) == 0)
        return AR_OK;
    if (ar_dtype_bytes(p->t->dtype) > 0)
        return ari_dump_each_run(p->t, p->copies[0]->part, p->copies[0]->box, 0, p->t->count, compare_with_run, p);
    if (x == NULL || y == NULL)
        return ar_error_set(AR_ERR_DTYPE, "tensor '%s' is %s: parts of a tensor need elements of whole bytes",
                            p->t->name, ar_dtype_name(p->t->dtype));
    compare_bits(p, (const unsigned char *)x, (const unsigned char *)y, count, bits);
    return AR_OK;
}

/* --- all copies --------------------------------------------------------------------------------------------------- */
typedef struct value {
    ar_dtype dtype;
    double x;
} value;

static ar_status keep_value(void *user, const ari_dump_run *run)
{
    value *v = user;
    return ari_values_to_f64(v->dtype, run->data, 1, &v->x);
}

static ar_status describe_pair(const pair *p, ar_dump_disagreement *out)
{
    *out = (ar_dump_disagreement){.tensor = p->t,
                                  .index = p->first_index,
                                  .elements = p->different,
                                  .count = ari_dump_box_count(p->t->ndim, p->copies[0]->box)};
    for (int k = 0; k < 2; k++) {
        value v = {p->t->dtype, NAN};
        out->ranks[k] = p->copies[k]->part->rank;
        if (ar_dtype_bytes(v.dtype) > 0 && v.dtype != AR_C64)
            AR_TRY(ari_dump_each_run(p->t, p->copies[k]->part, p->copies[k]->box, p->first_index, 1, keep_value, &v));
        out->value[k] = v.x;
    }
    return AR_OK;
}

static size_t list_copies(const ar_dump_tensor *t, copy *list)
{
    size_t n = 0;
    for (size_t i = 0; i < t->parts; i++)
        for (size_t k = 0; k < t->part[i].boxes; k++) {
            const ar_dump_box *b = &t->part[i].box[k];
            size_t start = 0;
            for (int j = 0; j < t->ndim; j++)
                start = start * t->shape[j] + b->global[j];
            if (b->replicas > 1)
                list[n++] = (copy){&t->part[i], b, start};
        }
    return n;
}

/* Compares the copies of one box. If ranks hold summands, each copy has the same number of them, and corresponding
 * summands are compared. */
static ar_status compare_group(pair *p, const copy *list, size_t n, bool *found, ar_dump_disagreement *out)
{
    const size_t terms = n / (size_t)list->box->replicas;
    for (size_t i = terms; i < n && !*found; i++) {
        p->copies[0] = &list[i % terms];
        p->copies[1] = &list[i];
        AR_TRY(compare_pair(p));
        *found = p->different > 0;
        if (*found)
            return describe_pair(p, out);
    }
    return AR_OK;
}

ar_status ar_dump_replicas(const ar_dump_tensor *t, bool *found, ar_dump_disagreement *out)
{
    size_t drift = 0;
    return ari_dump_replicas_by(t, NULL, NULL, found, out, &drift);
}

ar_status ari_dump_replicas_by(const ar_dump_tensor *t, ar_dump_differs differs, void *user, bool *found,
                               ar_dump_disagreement *out, size_t *drift)
{
    ar_status st = AR_OK;
    pair p = {.t = t, .differs = differs, .user = user};
    ARI_OWNED copy *list = NULL;
    size_t max_copies = 0;
    *found = false;
    *drift = 0;
    for (size_t i = 0; i < t->parts; i++)
        max_copies += t->part[i].replicas > 1 ? t->part[i].boxes : 0;
    if (max_copies == 0)
        return AR_OK;
    AR_TRY(ARI_ALLOC(&list, max_copies, "copies of a tensor"));
    const size_t n = list_copies(t, list);
    ARI_SORT(list, n, compare_copies);
    for (size_t i = 0, group_size = 0; i < n && st == AR_OK && !*found; i += group_size) {
        for (group_size = 1; i + group_size < n && list[i + group_size].start == list[i].start;)
            group_size++;
        st = compare_group(&p, &list[i], group_size, found, out);
    }
    *drift = p.drift;
    return st;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include <jansson.h>

#include "dump/placement.h"
#include "ref/core/out.h"
#include "ref/io/json.h"

/* What a rank's file says of its tensors, written as ari_placement_parse reads it. Without memory jansson makes NULL
 * of a value and refuses to put a NULL into another: the error is told once, at the end. */

/* PyTorch wants an offset for each. */
static json_t *saved_offsets(const ari_placed *t)
{
    return json_pack("{s:o}", "saved_offsets", ari_json_sizes(t->offset, (size_t)t->ndim));
}

/* The dimensions of the mesh that it is to be summed over. */
static json_t *partial_over(const ari_placement *p, const ari_placed *t)
{
    json_t *list = json_array();
    size_t n = 0;
    for (size_t i = 0; i < p->dims; i++)
        if ((t->partial_over >> i & 1u) != 0) {
            json_array_append_new(list, json_string(p->mesh[i].name));
            n++;
        }
    if (n == json_array_size(list))
        return list;
    json_decref(list);
    return NULL;
}

static json_t *own_tensor(const ari_placement *p, const ari_placed *t)
{
    json_t *o = json_object();
    int failed = json_object_set_new(o, "shape", ari_json_sizes(t->shape, (size_t)t->ndim));
    if (t->replicas > 1) {
        failed |= json_object_set_new(o, "replica", json_integer(t->replica));
        failed |= json_object_set_new(o, "replicas", json_integer(t->replicas));
    }
    if (t->partial)
        failed |= json_object_set_new(o, "partial", partial_over(p, t));
    if (failed == 0)
        return o;
    json_decref(o);
    return NULL;
}

static json_t *mesh(const ari_placement *p)
{
    json_t *list = json_array();
    for (size_t i = 0; i < p->dims; i++)
        json_array_append_new(list, json_pack("[s, i]", p->mesh[i].name, p->mesh[i].size));
    return list;
}

static json_t *coordinates(const ari_placement *p)
{
    json_t *list = json_array();
    for (size_t i = 0; i < p->dims; i++)
        json_array_append_new(list, json_integer(p->at[i]));
    return list;
}

static json_t *whole_text(const ari_placement *p)
{
    json_t *o = json_object(), *tensors = json_object(), *order = json_array();
    int failed = json_object_set_new(o, "version", json_integer(1));
    failed |= json_object_set_new(o, "rank", json_integer(p->rank));
    failed |= json_object_set_new(o, "world", json_integer(p->world));
    if (p->dims > 0) {
        failed |= json_object_set_new(o, "mesh", mesh(p));
        failed |= json_object_set_new(o, "at", coordinates(p));
    }
    for (size_t i = 0; i < p->tensors; i++)
        failed |= json_object_set_new(tensors, p->tensor[i].name, own_tensor(p, &p->tensor[i]));
    failed |= json_object_set_new(o, "tensors", tensors);
    for (size_t i = 0; i < p->ordered; i++)
        failed |= json_array_append_new(order, json_string(p->order[i]));
    if (p->ordered > 0)
        failed |= json_object_set_new(o, "order", order);
    else
        json_decref(order);
    if (failed == 0)
        return o;
    json_decref(o);
    return NULL;
}

static json_t *dcp_text(const ari_placement *p)
{
    json_t *o = json_object();
    int failed = 0;
    for (size_t i = 0; i < p->tensors; i++)
        failed |= json_object_set_new(o, p->tensor[i].name, saved_offsets(&p->tensor[i]));
    if (failed == 0)
        return o;
    json_decref(o);
    return NULL;
}

static ar_status print(char **gives, json_t *value)
{
    *gives = value ? json_dumps(value, JSON_COMPACT) : NULL;
    json_decref(value);
    return *gives ? AR_OK : ar_error_set(AR_ERR_MEMORY, "no memory for a rank's placement");
}

ar_status ari_placement_text(char **dcp, char **own, const ari_placement *p)
{
    *own = NULL;
    AR_TRY(print(dcp, dcp_text(p)));
    return print(own, whole_text(p));
}

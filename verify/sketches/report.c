/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/io/json.h"
#include "verify/sketches/sketches.h"

static const char *const states[] = {"same", "different", "shape", "dtype", "missing", "unexpected", "replicas"};

static json_t *row_json(const ari_sketch_row *row)
{
    json_t *o = json_pack("{ss si ss ss si sb}", "tensor", row->name, "step", row->step, "state", states[row->state],
                          "unjudged", row->unjudged, "differing_rank", row->differing, "lost_gradient",
                          (int)row->lost_gradient);
    const ar_sketch *a = row->side[0] != NULL ? row->side[0]->sketch : NULL;
    if (o == NULL || a == NULL || row->side[1] == NULL || row->side[1]->sketch == NULL || row->state == AR_VERIFY_SHAPE)
        return o;
    const ar_sketch_difference *d = &row->d;
    json_object_set_new(o, "shape", ari_json_sizes(a->shape, (size_t)a->ndim));
    json_object_set_new(o, "norm", ari_json_number(d->norm));
    json_object_set_new(o, "norm_error", ari_json_number(d->norm_error));
    json_object_set_new(o, "norm_reference", ari_json_number(d->norm_a));
    json_object_set_new(o, "allowed", ari_json_number(row->allowed.norm));
    json_object_set_new(o, "factor", ari_json_number(d->factor));
    json_object_set_new(o, "factor_left", ari_json_number(d->factor_left));
    json_object_set_new(o, "blocks", json_integer((json_int_t)d->blocks));
    json_object_set_new(
        o, "block",
        json_pack("[II]", (json_int_t)row->first_element, (json_int_t)(row->first_element + row->elements)));
    json_object_set_new(o, "block_share", ari_json_number(d->block_share));
    json_object_set_new(o, "rows", json_integer((json_int_t)d->rows));
    return o;
}

static json_t *list_json(const ari_step_list *steps)
{
    json_t *list = json_array();
    for (size_t i = 0; i < steps->count && list != NULL; i++)
        json_array_append_new(list, json_integer(steps->step[i]));
    return list;
}

json_t *ari_sketch_report_json(const ari_sketch_report *r, const ar_verify_options *o)
{
    json_t *rows = json_array(), *first_row = r->first_row < r->rows ? row_json(&r->row[r->first_row]) : json_null();
    for (size_t i = 0; i < r->rows && rows != NULL; i++) {
        const ari_sketch_row *row = &r->row[i];
        if (row->state != AR_VERIFY_SAME || (row->unjudged[0] != '\0' && !row->left_out))
            json_array_append_new(rows, row_json(row));
    }
    const char *result = r->different > 0 ? "different" : r->unjudged > 0 ? "unjudged" : "same";
    json_t *steps = json_pack("{sI so so s[oo]}", "common", (json_int_t)r->common_steps, "only_reference",
                              list_json(&r->alone[0]), "only_other", list_json(&r->alone[1]), "incomplete",
                              list_json(&r->incomplete[0]), list_json(&r->incomplete[1]));
    return json_pack("{ss ss ss sb so sI s[ss] sI sI sI sI sI s[II] so so}", "result", result, "reference",
                     o->reference, "other", o->other, "sketches", 1, "steps", steps, "tensors_renamed",
                     (json_int_t)r->renamed, "wrappers", r->wrappers[0], r->wrappers[1], "tensors",
                     (json_int_t)(r->rows - r->left_out), "tensors_different", (json_int_t)r->different,
                     "tensors_unjudged", (json_int_t)r->unjudged, "tensors_left_out", (json_int_t)r->left_out,
                     "tensors_reordered", (json_int_t)r->reordered, "left_out", (json_int_t)r->skipped[0],
                     (json_int_t)r->skipped[1], "first", first_row, "rows", rows);
}

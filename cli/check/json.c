/* SPDX-License-Identifier: Apache-2.0 */
/* Writes the stable JSON of a check, whose fields check.md lists. */

#include "ref/io/json.h"
#include "cli/check/check.h"
#include "cli/shared/command.h"
#include "ref/core/device_private.h"
#include "ref/core/size.h"
#include "sim/sim_private.h"
#include "verify/run/cluster_run.h"
#include "verify/run/run.h"

static const char *const result_names[] = {"same", "mispredicted", "vacuous", "different", "error"};

static json_t *json_difference(const ar_check_run *u)
{
    const ar_first_difference *f = &u->first;
    if (!u->has_difference)
        return json_null();
    return json_pack(
        "{s:i, s:s, s:s, s:i, s:o, s:o, s:o, s:I, s:i, s:o, s:I, s:I, s:s, s:s, s:o, s:s}", "step", f->step, "pass",
        f->pass, "tensor", f->tensor, "layer", f->layer, "index", ari_json_sizes(f->index, (size_t)(f->ndim)),
        "reference", ari_json_number((double)f->reference), "actual", ari_json_number((double)f->actual), "ulp",
        (json_int_t)f->ulp, "rank", f->rank, "local_index", ari_json_sizes(f->local_index, (size_t)(f->local_ndim)),
        "elements", (json_int_t)f->elements, "elements_different", (json_int_t)f->elements_different, "pattern",
        f->pattern, "hint", f->hint, "cause", f->cause[0] ? json_string(f->cause) : json_null(), "look_at", f->look);
}

static json_t *json_error(const ar_check_run *u)
{
    if (!u->error)
        return json_null();
    json_t *ranks = json_array();
    for (int r = 0; u->reports && r < ar_parallel_world(&u->parallel); r++) {
        const ar_sim_rank_report *p = &u->reports[r];
        json_array_append_new(ranks, json_pack("{s:i, s:s, s:s, s:s, s:f}", "rank", p->rank, "status", p->status,
                                               "last", p->last, "current", p->current, "waiting_s", p->waiting_s));
    }
    return json_pack("{s:o, s:o}", "message", ari_json_text(u->error), "ranks", ranks);
}

static json_t *json_collectives(const ar_check_run *u)
{
    json_t *o = json_object();
    for (size_t i = 0; i < ARI_COLLECTIVE_KINDS; i++) {
        if (u->calls[i])
            json_object_set_new(o, ari_collective_kind[i], json_integer((json_int_t)u->calls[i]));
    }
    return o;
}

static json_t *json_memory(const ar_rank_memory *m)
{
    json_t *o = json_object();
#define PUT(field, json, title) json_object_set_new(o, json, json_integer((json_int_t)m->field));
    AR_RANK_MEMORY_TABLE(PUT)
#undef PUT
    return o;
}

/* Returns the loss of each step; an empty list for a run that ended with an error before its first loss. */
static json_t *json_loss(const ar_check_report *r, const float *loss)
{
    return ari_json_floats(loss, loss ? (size_t)ari_at_least_one(r->steps) : 0);
}

static json_t *json_bytes(const ari_checked *c, const ar_check_run *u)
{
    json_t *predicted = c->module ? json_null() : json_integer((json_int_t)u->bytes_predicted);
    json_t *bf16 = u->bytes_bf16 > 0 ? json_integer((json_int_t)u->bytes_bf16) : json_null();
    return json_pack("{s:I, s:o, s:I, s:o}", "counted", (json_int_t)u->bytes_counted, "predicted", predicted,
                     "per_rank_max", (json_int_t)u->bytes_per_rank_max, "bf16", bf16);
}

static json_t *json_run(const ari_checked *c, const ar_check_run *u)
{
    const ar_check_report *r = c->report;
    json_t *o = json_object();
    json_object_set_new(o, "layout", ari_layout_json(&u->parallel, r->batch + r->padding, ari_layout_of_run));
    json_object_set_new(o, "result", json_string(result_names[u->result]));
    json_object_set_new(o, "passed", json_boolean(ar_check_passes(r, u->result)));
    json_object_set_new(o, "tensors", json_integer((json_int_t)u->tensors));
    json_object_set_new(o, "tensors_different", json_integer((json_int_t)u->tensors_different));
    json_object_set_new(o, "elements", json_integer((json_int_t)u->elements));
    json_object_set_new(o, "elements_different", json_integer((json_int_t)u->elements_different));
    json_object_set_new(o, "max_ulp", json_integer((json_int_t)u->max_ulp));
    if (r->numerics == AR_NUMERICS_NATIVE) {
        json_object_set_new(o, "max_ratio", ari_json_number(u->max_ratio));
        json_object_set_new(o, "max_ratio_tensor", json_string(u->ratio_tensor));
    }
    json_object_set_new(o, "bytes", json_bytes(c, u));
    json_object_set_new(o, "collectives", json_collectives(u));
    json_object_set_new(o, "call_difference", ari_json_text_or_null(u->call_difference));
    json_object_set_new(o, "call_cause", u->call_cause ? json_string(u->call_cause) : json_null());
    json_object_set_new(o, "peak_bytes_per_rank", json_memory(&u->memory));
    json_object_set_new(o, "predicted_bytes_per_rank",
                        u->has_memory_predicted ? json_memory(&u->memory_predicted) : json_null());
    json_object_set_new(o, "unpredicted", u->unpredicted ? json_string(u->unpredicted) : json_null());
    json_object_set_new(o, "memory_difference",
                        u->memory_difference[0] ? json_string(u->memory_difference) : json_null());
    json_object_set_new(o, "seconds", ari_json_number(u->seconds));
    json_object_set_new(o, "loss", json_loss(r, u->loss));
    json_object_set_new(o, "weights_hash", json_string(u->weights_hash));
    json_object_set_new(o, "gradients_hash", json_string(u->gradients_hash));
    json_object_set_new(o, "outputs_hash", ari_json_text_or_null(u->outputs_hash));
    json_object_set_new(o, "shapes", json_integer((json_int_t)u->shapes));
    json_object_set_new(o, "shape_difference", ari_json_text_or_null(u->shape_difference));
    if (u->has_predicted)
        json_object_set_new(o, "predicted", ari_predicted_json(&u->predicted));
    if (u->schedules > 0)
        json_object_set_new(
            o, "schedules",
            json_pack("{s:I, s:I}", "run", (json_int_t)u->schedules, "last_seed", (json_int_t)u->schedule_seed));
    if (u->dump[0])
        json_object_set_new(o, "dump", ari_json_text(u->dump));
    json_object_set_new(o, "first_difference", json_difference(u));
    json_object_set_new(o, "error", json_error(u));
    return o;
}

static json_t *json_gradcheck(const ar_check_report *r)
{
    const ar_gradcheck *g = &r->gradcheck;
    if (!r->has_gradcheck)
        return json_null();
    json_t *rows = json_array();
    for (size_t i = 0; i < g->rows; i++)
        json_array_append_new(rows, json_pack("{s:f, s:o, s:s}", "step", g->row[i].step, "max_relative_error",
                                              ari_json_number(g->row[i].max_relative_error), "worst_tensor",
                                              g->row[i].worst_tensor));
    return json_pack("{s:I, s:o, s:s, s:b, s:I, s:I, s:I, s:o}", "elements", (json_int_t)g->elements,
                     "max_relative_error", ari_json_number(g->max_relative_error), "worst_tensor", g->worst_tensor,
                     "ok", g->ok, "parameters", (json_int_t)g->parameters, "batch", (json_int_t)g->batch, "seq",
                     (json_int_t)g->seq, "rows", rows);
}

static json_t *json_optimizer(const ari_checked *c)
{
    return c->report->steps == 0 ? json_null() : ari_optimizer_json(&c->run.optimizer);
}

static json_t *json_vacuous(const ar_check_vacuous *v)
{
    if (!v->tensor[0])
        return json_null();
    return json_pack("{s:s, s:s, s:i, s:o, s:o, s:I, s:I, s:I}", "tensor", v->tensor, "pass", v->pass, "step", v->step,
                     "index", ari_json_sizes(v->index, (size_t)v->ndim), "value", ari_json_number((double)v->value),
                     "elements", (json_int_t)v->elements, "elements_empty", (json_int_t)v->elements_empty, "tensors",
                     (json_int_t)v->tensors);
}

static json_t *json_model(const ari_checked *c)
{
    const ar_check_report *r = c->report;
    json_t *runs = json_array();
    for (size_t i = 0; i < r->runs; i++)
        json_array_append_new(runs, json_run(c, &r->run[i]));
    if (json_array_size(runs) != r->runs) {
        json_decref(runs);
        return NULL;
    }
    json_t *baseline = json_pack("{s:s, s:s, s:o, s:o, s:o, s:f}", "weights_hash", r->weights_hash, "gradients_hash",
                                 r->gradients_hash, "outputs_hash", ari_json_text_or_null(r->outputs_hash), "loss",
                                 json_loss(r, r->loss), "max_error_vs_f64", ari_json_number(r->max_error_vs_f64),
                                 "seconds", r->baseline_seconds);
    json_t *ddp = json_pack("{s:I, s:s, s:s}", "bucket_bytes", (json_int_t)c->run.ddp.bucket_bytes, "mode",
                            ari_bucket_mode_names[c->run.ddp.mode], "order", ari_bucket_order_names[c->run.ddp.order]);
    json_t *notes = ari_config_notes(NULL, &r->config);
    if (ari_scores_note(r->seq, r->numerics))
        json_array_append_new(notes, json_string(ari_scores_note(r->seq, r->numerics)));
    json_t *model =
        json_pack("{s:o, s:I, s:s, s:I, s:I, s:I, s:I, s:i, s:o, s:f, s:f, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}",
                  "name", ari_json_text(r->config.name), "parameters", (json_int_t)r->parameters, "weights",
                  r->fresh ? "fresh" : "folder", "batch", (json_int_t)r->batch, "seq", (json_int_t)r->seq, "documents",
                  (json_int_t)r->documents, "padding", (json_int_t)r->padding, "steps", r->steps, "optimizer",
                  json_optimizer(c), "clip", c->run.clip, "dropout", c->run.dropout, "ddp", ddp, "first_nan",
                  r->vacuous.tensor[0] ? json_string(r->vacuous.tensor) : json_null(), "vacuous",
                  json_vacuous(&r->vacuous), "baseline", baseline, "gradcheck", json_gradcheck(r), "notes", notes,
                  "dump", ari_json_text_or_null(r->dump), "runs", runs);
    if (r->numerics == AR_NUMERICS_NATIVE)
        json_object_set_new(model, "kinks", json_integer((json_int_t)r->kinks));
    ari_loss_json(model, &c->run.loss);
    if (!c->module)
        json_object_set_new(model, "plan", ari_plan_json(&c->run.plan));
    return model;
}

static int largest_world(const ar_check_report *r)
{
    int world = 1;
    for (size_t i = 0; r && i < r->runs; i++) {
        const int ranks = ar_parallel_world(&r->run[i].parallel);
        world = ranks > world ? ranks : world;
    }
    return world;
}

json_t *ari_check_json(const ari_checked *checked, size_t n)
{
    char hash[65];
    json_t *models = json_array();
    for (size_t i = 0; i < n; i++)
        json_array_append_new(models, json_model(&checked[i]));
    const bool native = n > 0 && checked[0].report->numerics == AR_NUMERICS_NATIVE;
    json_t *o = ari_json_begin("check");
    json_object_set_new(o, "numerics", json_string(native ? "native" : "exact"));
    if (native)
        json_object_set_new(o, "precision", json_string(ari_precision_name(checked[0].report->precision)));
    if (n > 0)
        ari_device_json(o, &checked[0].run.device);
    ari_transport_json(o, &checked[0].run, largest_world(checked[0].report));
    json_object_set_new(o, "result", json_string(result_names[ari_check_worst(checked, n)]));
    json_object_set_new(o, "hash", ari_check_hash(hash, checked, n) ? json_string(hash) : json_null());
    if (n > 0 && checked[0].has_net_fault) {
        char description[128];
        ari_sim_fault_describe(&checked[0].net_fault, description, sizeof description);
        json_object_set_new(o, "net_fault", json_string(description));
    }
    if (n > 0)
        ari_watch_json(o, checked[0].watch);
    json_t *fields = json_array_size(models) == n ? json_pack("{s:O}", "models", models) : NULL;
    json_decref(models);
    return ari_json_merge(o, fields);
}

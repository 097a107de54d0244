/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/check_report.h"

#include <math.h>
#include <string.h>

#include "cli/command.h"
#include "cli/json_text.h"
#include "cli/table.h"
#include "ref/io/json.h"
#include "verify/cluster_run.h"

static const char *const result_names[] = {"same", "different", "error"};

/* --- for people --------------------------------------------------------------------------------------------------- */

static void print_head(FILE *to, const ar_check_report *r)
{
    fprintf(to, "\n%s: %s parameters (%s), %zu sequence%s of %zu token%s, forward + loss + backward, exact numerics\n",
            r->config.name, ARI_COUNT(r->parameters), r->fresh ? "fresh weights" : "weights of the folder", r->batch,
            r->batch == 1 ? "" : "s", r->seq, r->seq == 1 ? "" : "s");
    fprintf(to, "baseline on one rank, independent code: loss %.6f, gradients %.12s, %s", (double)r->loss[0],
            r->gradients_hash, ARI_SECONDS(r->baseline_seconds));
    if (!isnan(r->max_error_vs_f64))
        fprintf(to, "; worst error against binary64 %.1e of a gradient's largest element", r->max_error_vs_f64);
    fprintf(to, "\n");
    if (r->config.config_dropout > 0.0)
        fprintf(to, "note: the config's dropout of %g is ignored\n", r->config.config_dropout);
    if (r->config.vocab < 256)
        fprintf(to, "note: bytes of the text are taken modulo the vocabulary of %zu\n", r->config.vocab);
    if (r->nan_tensor[0])
        fprintf(to, "note: the first tensor that holds a NaN is %s\n", r->nan_tensor);
}

static ar_status print_rows(FILE *to, const ar_check_report *r)
{
    static const ari_column columns[] = {{"layout", ARI_LEFT},     {"tensors", ARI_RIGHT},   {"elements", ARI_RIGHT},
                                         {"different", ARI_RIGHT}, {"worst ulp", ARI_RIGHT}, {"bytes moved", ARI_RIGHT},
                                         {"predicted", ARI_RIGHT}, {"gradients", ARI_LEFT},  {"time", ARI_RIGHT},
                                         {"result", ARI_LEFT}};
    ari_table *t = NULL;
    AR_TRY(ari_table_create(&t, columns, sizeof columns / sizeof *columns));
    for (size_t i = 0; i < r->runs; i++) {
        const ar_check_run *u = &r->run[i];
        ari_table_cell(t, "tp=%d", u->parallel.tp);
        ari_table_cell(t, "%zu", u->tensors);
        ari_table_cell(t, "%s", ARI_COUNT(u->elements));
        ari_table_cell(t, "%s", ARI_COUNT(u->elements_different));
        ari_table_cell(t, "%s", ARI_COUNT(u->max_ulp));
        ari_table_cell(t, "%s", ARI_COUNT(u->bytes_counted));
        ari_table_cell(t, "%s", u->bytes_counted == u->bytes_predicted ? "the same" : ARI_COUNT(u->bytes_predicted));
        ari_table_cell(t, "%.12s", u->gradients_hash);
        ari_table_cell(t, "%s", ARI_SECONDS(u->seconds));
        ari_table_cell(t, "%s",
                       u->result == AR_CHECK_SAME    ? "same bits"
                       : u->result == AR_CHECK_ERROR ? "ERROR"
                                                     : "DIFFERENT");
    }
    const ar_status st = ari_table_print(t, to, 2);
    ari_table_destroy(t);
    return st;
}

static void print_index(FILE *to, int ndim, const size_t *index)
{
    fputc('[', to);
    for (int d = 0; d < ndim; d++)
        fprintf(to, "%s%zu", d ? ", " : "", index[d]);
    fputc(']', to);
}

static void print_difference(FILE *to, const ar_check_run *u)
{
    const ar_first_difference *f = &u->first;
    fprintf(to, "\n  tp=%d: the first tensor that differs is %s\n", u->parallel.tp, f->tensor);
    fprintf(to, "    where     step %d, %s", f->step,
            strcmp(f->pass, "init") == 0      ? "initial values"
            : strcmp(f->pass, "forward") == 0 ? "forward pass"
                                              : "backward pass");
    if (f->layer >= 0)
        fprintf(to, ", layer %d", f->layer);
    fprintf(to, "; element ");
    print_index(to, f->ndim, f->index);
    fprintf(to, " = ");
    print_index(to, f->local_ndim, f->local_index);
    fprintf(to, " of rank %d\n", f->rank);
    fprintf(to, "    values    %.9g on one rank, %.9g here (%s ulp)\n", (double)f->reference, (double)f->actual,
            ARI_COUNT(f->ulp));
    fprintf(to, "    how many  %s of %s elements; %zu of %zu tensors differ in all\n", ARI_COUNT(f->elements_different),
            ARI_COUNT(f->elements), u->tensors_different, u->tensors);
    fprintf(to, "    pattern   %s\n", f->pattern);
    if (f->hint[0])
        fprintf(to, "    hint      %s\n", f->hint);
}

ar_status ari_check_print(FILE *to, const ar_check_report *r)
{
    print_head(to, r);
    AR_TRY(print_rows(to, r));
    for (size_t i = 0; i < r->runs; i++) {
        const ar_check_run *u = &r->run[i];
        if (u->error)
            fprintf(to, "\n  tp=%d: the run ended in an error\n%s\n", u->parallel.tp, u->error);
        if (u->has_difference)
            print_difference(to, u);
        if (!u->error && u->bytes_counted != u->bytes_predicted)
            fprintf(to,
                    "\n  tp=%d: %s bytes were moved between ranks, the layout predicts %s: a collective is missing or "
                    "one too many\n",
                    u->parallel.tp, ARI_COUNT(u->bytes_counted), ARI_COUNT(u->bytes_predicted));
    }
    fflush(to);
    return AR_OK;
}

void ari_check_print_verdict(FILE *to, ar_check_report *const *reports, size_t n, ar_fault fault)
{
    size_t runs = 0, different = 0, errors = 0;
    const char *nan_tensor = NULL;
    for (size_t i = 0; i < n; i++) {
        if (reports[i]->nan_tensor[0])
            nan_tensor = reports[i]->nan_tensor;
        for (size_t k = 0; k < reports[i]->runs; k++) {
            runs++;
            different += reports[i]->run[k].result == AR_CHECK_DIFFERENT;
            errors += reports[i]->run[k].result == AR_CHECK_ERROR;
        }
    }
    fprintf(to, "\n");
    if (fault != AR_FAULT_NONE)
        fprintf(to, "injected: %s (%s)%s\n", ar_fault_name(fault), ar_fault_text(fault),
                different + errors ? "" : "; it changed nothing in these layouts");
    if (nan_tensor)
        fprintf(to, "NaN on one rank already, first in %s: what is computed from it says nothing\n", nan_tensor);
    const char *plural = runs == 1 ? "" : "s";
    if (errors)
        fprintf(to, "check: %zu of %zu run%s ended in an ERROR, %zu DIFFERENT\n", errors, runs, plural, different);
    else if (different)
        fprintf(to, "check: DIFFERENT in %zu of %zu run%s\n", different, runs, plural);
    else if (runs == 1)
        fprintf(to, "check: the same bits: every tensor equals the one-rank baseline\n");
    else
        fprintf(to, "check: the same bits in all %zu runs: every tensor of every layout equals the one-rank baseline\n",
                runs);
}

/* --- for machines ------------------------------------------------------------------------------------------------- */

static json_t *json_index(int ndim, const size_t *index)
{
    json_t *a = json_array();
    for (int d = 0; d < ndim; d++)
        json_array_append_new(a, json_integer((json_int_t)index[d]));
    return a;
}

static json_t *json_difference(const ar_check_run *u)
{
    const ar_first_difference *f = &u->first;
    if (!u->has_difference)
        return json_null();
    return json_pack("{s:i, s:s, s:s, s:i, s:o, s:o, s:o, s:I, s:i, s:o, s:I, s:I, s:s, s:s}", "step", f->step, "pass",
                     f->pass, "tensor", f->tensor, "layer", f->layer, "index", json_index(f->ndim, f->index),
                     "reference", ari_json_number((double)f->reference), "actual", ari_json_number((double)f->actual),
                     "ulp", (json_int_t)f->ulp, "rank", f->rank, "local_index",
                     json_index(f->local_ndim, f->local_index), "elements", (json_int_t)f->elements,
                     "elements_different", (json_int_t)f->elements_different, "pattern", f->pattern, "hint", f->hint);
}

static json_t *json_error(const ar_check_run *u)
{
    if (!u->error)
        return json_null();
    json_t *ranks = json_array();
    for (int r = 0; u->reports && r < u->parallel.tp; r++) {
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

static json_t *json_layout(const ar_check_report *r, const ar_check_run *u)
{
    return json_pack("{s:i, s:i, s:i, s:i, s:i, s:b, s:i, s:i, s:[I]}", "world", u->parallel.tp, "tp", u->parallel.tp,
                     "dp", 1, "cp", 1, "pp", 1, "sp", 0, "zero", 0, "micro_batches", 1, "samples_per_rank",
                     (json_int_t)r->batch);
}

/* Measured where memory is given out; what this version does not have takes nothing. */
static json_t *json_memory(const ar_check_run *u)
{
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I}", "weights", (json_int_t)u->weights_bytes, "gradients",
                     (json_int_t)u->gradients_bytes, "optimizer", (json_int_t)0, "activations_stored",
                     (json_int_t)u->stored_bytes, "activations_peak", (json_int_t)u->peak_bytes, "buckets",
                     (json_int_t)0);
}

static json_t *json_run(const ar_check_report *r, const ar_check_run *u)
{
    json_t *o = json_object();
    json_object_set_new(o, "layout", json_layout(r, u));
    json_object_set_new(o, "result", json_string(result_names[u->result]));
    json_object_set_new(o, "tensors", json_integer((json_int_t)u->tensors));
    json_object_set_new(o, "tensors_different", json_integer((json_int_t)u->tensors_different));
    json_object_set_new(o, "elements", json_integer((json_int_t)u->elements));
    json_object_set_new(o, "elements_different", json_integer((json_int_t)u->elements_different));
    json_object_set_new(o, "max_ulp", json_integer((json_int_t)u->max_ulp));
    json_object_set_new(o, "bytes",
                        json_pack("{s:I, s:I, s:I}", "counted", (json_int_t)u->bytes_counted, "predicted",
                                  (json_int_t)u->bytes_predicted, "per_rank_max", (json_int_t)u->bytes_per_rank_max));
    json_object_set_new(o, "collectives", json_collectives(u));
    json_object_set_new(o, "peak_bytes_per_rank", json_memory(u));
    json_object_set_new(o, "seconds", ari_json_number(u->seconds));
    json_object_set_new(o, "loss", json_pack("[o]", ari_json_number((double)(u->loss ? u->loss[0] : 0.0f))));
    json_object_set_new(o, "weights_hash", json_string(u->weights_hash));
    json_object_set_new(o, "gradients_hash", json_string(u->gradients_hash));
    json_object_set_new(o, "first_difference", json_difference(u));
    json_object_set_new(o, "error", json_error(u));
    return o;
}

static json_t *json_model(const ar_check_report *r)
{
    json_t *runs = json_array();
    for (size_t i = 0; i < r->runs; i++)
        json_array_append_new(runs, json_run(r, &r->run[i]));
    if (json_array_size(runs) != r->runs) {
        json_decref(runs);
        return NULL;
    }
    json_t *baseline = json_pack("{s:s, s:s, s:[o], s:o, s:f}", "weights_hash", r->weights_hash, "gradients_hash",
                                 r->gradients_hash, "loss", ari_json_number((double)r->loss[0]), "max_error_vs_f64",
                                 ari_json_number(r->max_error_vs_f64), "seconds", r->baseline_seconds);
    return json_pack("{s:o, s:I, s:s, s:I, s:I, s:o, s:o, s:n, s:o}", "name", ari_json_text(r->config.name),
                     "parameters", (json_int_t)r->parameters, "weights", r->fresh ? "fresh" : "folder", "batch",
                     (json_int_t)r->batch, "seq", (json_int_t)r->seq, "first_nan",
                     r->nan_tensor[0] ? json_string(r->nan_tensor) : json_null(), "baseline", baseline, "gradcheck",
                     "runs", runs);
}

json_t *ari_check_json(ar_check_report *const *reports, size_t n)
{
    ar_check_result worst = AR_CHECK_SAME;
    json_t *models = json_array();
    for (size_t i = 0; i < n; i++) {
        worst = reports[i]->result > worst ? reports[i]->result : worst;
        json_array_append_new(models, json_model(reports[i]));
    }
    json_t *o = ari_json_begin("check");
    json_object_set_new(o, "numerics", json_string("exact"));
    json_object_set_new(o, "device", json_string("cpu"));
    json_object_set_new(o, "result", json_string(result_names[worst]));
    const bool whole = json_array_size(models) == n;
    if (json_object_set_new(o, "models", models) != 0 || !whole) {
        json_decref(o);
        return NULL;
    }
    return o;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/train/train.h"

#include <inttypes.h>
#include <math.h>

#include "cli/shared/command.h"
#include "cli/shared/table.h"
#include "ref/core/context_private.h"
#include "ref/core/device_private.h"
#include "ref/core/size.h"
#include "ref/core/text.h"
#include "ref/io/json.h"
#include "ref/models/parallel_private.h"
#include "verify/run/checkpoint_private.h"

/* --- the head ----------------------------------------------------------------------------------------------------- */

/* "layout dp=2 tp=2 sp, 4 ranks: groups of 2 ranks share out the 8 sequences; ..." */
static void print_layout(FILE *to, const ar_training_options *o)
{
    const ar_parallel *p = &o->run.parallel;
    const int world = ar_parallel_world(p);
    const char *before = ": ";
    fprintf(to, "layout %s, %d rank%s", ARI_LAYOUT(p, o->run.batch), world, ARI_PLURAL(world));
    if (p->pp > 1) {
        fprintf(to, "%s%d %s each hold some of the layers, as %d stages", before, p->pp,
                p->dp > 1 || p->cp > 1 || p->tp > 1 ? "groups" : "ranks", ari_parallel_stages(p));
        before = "; ";
    }
    if (p->dp > 1) {
        if (p->tp > 1)
            fprintf(to, "%sgroups of %d ranks share out the sequences", before, p->tp);
        else
            fprintf(to, "%sthe ranks share out the sequences", before);
        before = "; ";
    }
    if (p->cp > 1) {
        fprintf(to, "%s%d %s share each sequence", before, p->cp, p->tp > 1 ? "groups" : "ranks");
        if (p->zigzag && p->cp_inner > 1)
            fprintf(to, ", each %d of them a chunk from its beginning and one from its end", p->cp_inner);
        else if (p->zigzag)
            fprintf(to, ", each with a chunk from its beginning and one from its end");
        before = "; ";
    }
    if (p->tp > 1) {
        fprintf(to, "%seach of %d ranks holds a slice of every matrix%s", before, p->tp,
                p->sp ? ", and between the matrices a part of every sequence" : "");
        before = "; ";
    }
    if (p->micro_batches > 1) {
        fprintf(to, "%sa rank goes through its sequences in %d pieces", before, p->micro_batches);
        before = "; ";
    }
    if (p->zero > 0)
        fprintf(to, "%seach keeps its share of the optimizer's state%s", before,
                p->zero == 1   ? ""
                : p->zero == 2 ? " and the gradients"
                               : ", the gradients and the weights");
    fprintf(to, "\n");
    ari_plan_print(to, &o->run.plan);
    ari_ranks_print(to, &o->run, world);
}

static const char *origin(const ar_training_report *r, const ar_training_options *o)
{
    return o->resume ? "checkpoint" : r->fresh ? "fresh" : "folder";
}

void ari_train_print_head(FILE *to, const ar_training_report *r, const ar_training_options *o)
{
    const char *weights = o->resume ? "the checkpoint's weights" : r->fresh ? "fresh weights" : "weights of the folder";
    fprintf(to, "%s: %s parameters (%s), %s numerics\n", r->config.name, ARI_COUNT(r->parameters), weights,
            ari_numerics_names[o->run.numerics]);
    fprintf(to, "data %s: %s tokens, %s window%s of %zu; %.3g epoch%s%s%s\n", ARI_SHOW(r->data_path),
            ARI_COUNT(r->data_tokens), ARI_COUNT(r->windows), ARI_PLURAL(r->windows), o->run.seq, r->epochs,
            ARI_PLURAL(r->epochs), o->in_order ? ", in order" : "", o->packing.enabled ? ", packed" : "");
    fprintf(to, "%" PRIu64 " step%s of %zu sequence%s, ", o->run.steps, ARI_PLURAL(o->run.steps), o->run.batch,
            ARI_PLURAL(o->run.batch));
    ari_step_print(to, &o->run);
    ari_storage_print(to, o->run.precision, o->run.storage);
    if (o->scale_loss)
        fprintf(to, ", loss times %g%s", o->scaling.scale, o->scaling.dynamic ? " at first" : "");
    fprintf(to, "\n");
    print_layout(to, o);
    if (o->resume)
        fprintf(to, "resumed after step %" PRIu64 " from %s\n", r->resumed_steps,
                ARI_SHOW(ari_checkpoint_path(o->resume)));
    if (r->note[0])
        fprintf(to, "note: %s\n", r->note);
    ari_dropout_note(to, &r->config, &o->run);
    fprintf(to, "\n  %8s  %10s  %10s  %10s  %10s\n", "step", "loss", "norm", "lr", "tokens/s");
}

/* --- steps -------------------------------------------------------------------------------------------------------- */

void ari_train_print_step(FILE *to, const ar_training_step *s, double tokens_per_second)
{
    char norm[ARI_NUMBER] = "-";
    if (s->norm > 0.0f)
        snprintf(norm, sizeof norm, "%.4f", (double)s->norm);
    fprintf(to, "  %8" PRIu64 "  %10.6f  %10s  %10.4g  %10.0f%s\n", s->step, (double)s->loss, norm, s->lr,
            tokens_per_second, s->skipped ? "  no update: the gradients overflow" : "");
}

/* --- the end ------------------------------------------------------------------------------------------------------ */

static double tokens_per_second(const ar_training_report *r, const ar_training_options *o)
{
    const double tokens = (double)(r->steps - r->resumed_steps) * (double)o->run.batch * (double)o->run.seq;
    return r->seconds > 0 ? tokens / r->seconds : 0;
}

/* The loss of the first known step. */
static double first_loss(const ar_training_report *r)
{
    uint64_t i = 0;
    while (i + 1 < r->steps && !isfinite(r->loss[i]))
        i++;
    return (double)r->loss[i];
}

static void print_going_on(FILE *to, const ar_training_report *r, const ar_training_options *o)
{
    fprintf(to, "stopped after step %" PRIu64 " of %" PRIu64 "; ", r->steps, o->run.steps);
    if (r->checkpoint[0])
        fprintf(to, "to go on, under any layout: anyrank train --resume %s --save %s\n", ARI_SHOW(o->save),
                ARI_SHOW(o->save));
    else if (o->resume && r->steps == r->resumed_steps)
        fprintf(to, "the checkpoint that it began with is the newest\n");
    else
        fprintf(to, "%s\n", o->save ? "nothing was saved" : "without --save DIR there is nothing to go on with");
}

/* Bytes count whole messages: one that is missing shows. */
static const char *predicted(const ar_training_report *r)
{
    if (r->bytes_differ)
        return ": NOT what the layout predicts";
    return r->bytes_predicted == 0 ? "" : ", as predicted";
}

void ari_train_print_end(FILE *to, const ar_training_report *r, const ar_training_options *o)
{
    const uint64_t taken = r->steps - r->resumed_steps;
    fprintf(to, "\n");
    if (taken == 0)
        fprintf(to, "no step was taken%s\n",
                r->steps == o->run.steps ? ": the checkpoint has all of them behind it" : "");
    else
        fprintf(to, "loss %.6f -> %.6f; %" PRIu64 " step%s in %s, %.0f tokens/s\n", first_loss(r),
                (double)r->loss[r->steps - 1], taken, ARI_PLURAL(taken), ARI_SECONDS(r->seconds),
                tokens_per_second(r, o));
    if (taken > 0 && ar_parallel_world(&o->run.parallel) > 1)
        fprintf(to, "%s moved between ranks, all together%s\n", ARI_BYTES(r->bytes), predicted(r));
    if (o->verify_every > 0)
        fprintf(to, "gradients and copies verified in %" PRIu64 " step%s%s%s\n", r->verified, ARI_PLURAL(r->verified),
                r->warning[0] ? "; a warning: " : "", r->warning);
    if (r->end == AR_TRAINING_STOPPED)
        print_going_on(to, r, o);
    else if (r->checkpoint[0])
        fprintf(to, "saved as %s\n", ARI_SHOW(r->checkpoint));
    if (!r->weights_hash[0])
        return;
    fprintf(to, "weights after step %" PRIu64 ": %s, ", r->steps, r->weights_hash);
    if (r->copies_differ)
        fprintf(to, "of the lowest ranks: others hold other copies\n");
    else if (o->run.fault)
        fprintf(to, "with %s switched on\n", o->run.fault);
    else
        fprintf(to, "%s\n",
                o->run.numerics == AR_NUMERICS_EXACT ? "the same for every layout"
                                                     : "for this layout only (native numerics)");
}

/* --- JSON --------------------------------------------------------------------------------------------------------- */

static json_t *json_rates(const ar_training_report *r)
{
    json_t *a = json_array();
    for (uint64_t i = r->resumed_steps; i < r->steps; i++)
        json_array_append_new(a, ari_json_number(r->lr[i]));
    return a;
}

static json_t *json_data(const ar_training_report *r, const ar_training_options *o)
{
    const bool separated = o->packing.enabled && o->packing.separator != AR_NO_SEPARATOR;
    return json_pack("{s:o, s:I, s:I, s:f, s:b, s:b, s:o}", "path", ari_json_text(r->data_path), "tokens",
                     (json_int_t)r->data_tokens, "windows", (json_int_t)r->windows, "epochs", r->epochs, "in_order",
                     o->in_order, "packed", o->packing.enabled, "separator",
                     separated ? json_integer((json_int_t)o->packing.separator) : json_null());
}

static const char *result_name(const ar_training_report *r)
{
    static const char *const end_names[] = {"done", "stopped", "diverged", "wrong"};
    return r->copies_differ || r->bytes_differ ? "different" : end_names[r->end];
}

static void json_course(json_t *j, const ar_training_report *r, const ar_training_options *o)
{
    json_object_set_new(j, "first_step", json_integer((json_int_t)r->resumed_steps + 1));
    json_object_set_new(j, "steps", json_integer((json_int_t)r->steps));
    json_object_set_new(j, "steps_in_all", json_integer((json_int_t)o->run.steps));
    json_object_set_new(j, "loss", ari_json_floats(r->loss, (size_t)r->steps));
    json_object_set_new(
        j, "gradient_norms",
        ari_json_floats(r->norm + r->resumed_steps, o->run.clip > 0 ? (size_t)(r->steps - r->resumed_steps) : 0));
    json_object_set_new(j, "lr", json_rates(r));
    json_object_set_new(j, "seconds", ari_json_number(r->seconds));
    json_object_set_new(j, "tokens_per_second", ari_json_number(tokens_per_second(r, o)));
    json_object_set_new(j, "verified_steps", json_integer((json_int_t)r->verified));
    json_object_set_new(j, "warning", ari_json_text_or_null(r->warning));
    json_object_set_new(
        j, "bytes",
        json_pack("{s:I, s:I}", "counted", (json_int_t)r->bytes, "predicted", (json_int_t)r->bytes_predicted));
}

json_t *ari_train_json(const ar_training_report *r, const ar_training_options *o, const ari_watch *watch)
{
    json_t *j = ari_json_begin("train");
    json_object_set_new(j, "result", json_string(result_name(r)));
    json_object_set_new(j, "numerics", json_string(ari_numerics_names[o->run.numerics]));
    ari_device_json(j, &o->run.device);
    ari_transport_json(j, &o->run, ar_parallel_world(&o->run.parallel));
    json_object_set_new(j, "model", ari_json_text(r->config.name));
    json_object_set_new(j, "parameters", json_integer((json_int_t)r->parameters));
    json_object_set_new(j, "weights", json_string(origin(r, o)));
    json_object_set_new(j, "data", json_data(r, o));
    json_object_set_new(j, "layout", ari_layout_json(&o->run.parallel, o->run.batch, ari_layout_of_run));
    json_object_set_new(j, "plan", ari_plan_json(&o->run.plan));
    json_object_set_new(j, "batch", json_integer((json_int_t)o->run.batch));
    json_object_set_new(j, "seq", json_integer((json_int_t)o->run.seq));
    json_object_set_new(j, "optimizer", ari_optimizer_json(&o->run.optimizer));
    json_object_set_new(j, "clip", json_real(o->run.clip));
    json_object_set_new(j, "dropout", json_real(o->run.dropout));
    ari_loss_json(j, &o->run.loss);
    json_object_set_new(j, "precision", json_string(ari_precision_name(o->run.precision)));
    json_object_set_new(j, "storage",
                        json_string(ari_matrix_dtype(o->run.precision, o->run.storage) == AR_BF16 ? "bf16" : "f32"));
    json_object_set_new(j, "loss_scale", o->scale_loss ? json_real(o->scaling.scale) : json_null());
    json_object_set_new(j, "seed", json_integer((json_int_t)o->run.seed));
    json_course(j, r, o);
    json_object_set_new(j, "weights_hash", ari_json_text_or_null(r->weights_hash));
    json_object_set_new(j, "checkpoint", ari_json_text_or_null(r->checkpoint));
    json_object_set_new(j, "note", ari_json_text_or_null(r->note));
    json_object_set_new(j, "notes", ari_config_notes(NULL, &r->config));
    ari_watch_json(j, watch);
    if (r->has_predicted)
        json_object_set_new(j, "predicted", ari_predicted_json(&r->predicted));
    return ari_json_merge(j, json_pack("{s:o}", "message", ari_json_text_or_null(r->message)));
}

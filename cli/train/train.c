/* SPDX-License-Identifier: Apache-2.0 */
/* anyrank train: reads options and prints a line per step. The library (run/) does the training. */
#include <inttypes.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "anyrank/checkpoint.h"
#include "anyrank/train.h"
#include "cli/shared/progress.h"
#include "cli/shared/table.h"
#include "cli/train/train.h"
#include "ref/core/fault_private.h"
#include "verify/faults/fault_case.h"
#include "verify/run/run.h"
#include "verify/run/train_rank.h"
#include "verify/run/training_private.h"

/* --- what makes no sense ------------------------------------------------------------------------------------------ */

/* Refuses contradictory options, and files that cannot be written, before any work. Errors: AR_ERR_ARG,
 * AR_ERR_UNSUPPORTED, AR_ERR_IO. */
static ar_status check_values(const ari_train_values *v)
{
    if (!v->r.run.model && !v->resume)
        return ar_error_set(AR_ERR_ARG, "give a MODEL, or --resume DIR; anyrank train --help tells what each is");
    if (!v->o.save && (v->save_every > 0 || v->o.max_checkpoints > 0))
        return ar_error_set(AR_ERR_ARG, "--%s is about the checkpoints of --save: give --save DIR too",
                            v->save_every > 0 ? "save-every" : "keep");
    if ((int)v->o.data_format >= 0 && !v->o.data)
        return ar_error_set(AR_ERR_ARG, "--data-format is that of --data: give --data FILE too");
    AR_TRY(ari_transport_check(&v->transport, v->watch.cluster ? "cluster" : v->watch.trace ? "trace" : NULL));
    return ari_layout_check(&v->r);
}

/* --- the options of a run ----------------------------------------------------------------------------------------- */

static ar_status fits(ari_estimate *e, const ar_training_options *o, const ar_config *c)
{
    const uint64_t behind = o->resume ? ar_checkpoint_state_of(o->resume)->step : 0;
    const uint64_t remaining_steps = o->run.steps > behind ? o->run.steps - behind : 1;
    ari_estimate_case size = {.run = o->run,
                              .config = c,
                              .parallel = &o->run.parallel,
                              .layouts = 1,
                              .alone = true,
                              .saves = o->save != NULL};
    size.run.steps = remaining_steps;
    AR_TRY(ari_estimate_check(e, &size));
    return ari_estimate_fits(e);
}

/* Checks that need the model's config. */
static ar_status set_plan(ari_train_values *v, ari_estimate *e)
{
    ar_training_options *o = &v->o;
    char folder[512];
    ar_config c;
    AR_TRY(ari_train_config(&c, folder, sizeof folder, o));
    AR_TRY(ari_estimate_layers(&c));
    AR_TRY(ari_layout_load(&v->r, &o->run));
    AR_TRY(ar_run_check(&o->run, &c));
    AR_TRY(ari_run_check_targets(&o->run, &c));
    bool read = o->resume != NULL;
    if (!read && o->run.fault)
        AR_TRY(ari_weights_exist(&read, folder));
    AR_TRY(ari_fault_case_check(&o->run, o->run.plan.mlp_order, &c, !read, o->packing.enabled));
    return fits(e, o, &c);
}

/* Parses "none", "dynamic", or a number S. */
static ar_status set_scaling(ar_training_options *o, const char *text)
{
    char *end = NULL;
    const bool dynamic = strcmp(text, "dynamic") == 0;
    o->scale_loss = strcmp(text, "none") != 0;
    if (!o->scale_loss)
        return AR_OK;
    o->scaling = ar_loss_scaling_defaults(dynamic);
    if (dynamic)
        return AR_OK;
    o->scaling.scale = strtod(text, &end);
    if (end == text || *end != '\0' || !(o->scaling.scale >= 1.0 && o->scaling.scale <= 0x1p126))
        return ar_error_set(AR_ERR_ARG, "--loss-scale: got '%s', expected none, dynamic, or a number from 1 to 2^126",
                            ARI_SHOW(text));
    return AR_OK;
}

static ar_status set_numerics(ari_train_values *v)
{
    ar_training_options *o = &v->o;
    if (v->storage >= 0)
        o->run.storage = v->storage == 1 ? AR_BF16 : AR_F32;
    AR_TRY(ari_precision_check(o->run.precision, o->run.numerics));
    if (v->loss_scale)
        AR_TRY(set_scaling(o, v->loss_scale));
    const bool narrow = o->run.storage == AR_BF16 && o->run.precision != AR_PRECISION_BF16;
    if (o->run.numerics == AR_NUMERICS_EXACT && (narrow || o->scale_loss))
        return ar_error_set(AR_ERR_ARG, "--%s: exact numerics have none, give --numerics native too, or --%s",
                            o->scale_loss ? "loss-scale" : "storage bf16",
                            o->scale_loss ? "loss-scale none" : "storage f32");
    return AR_OK;
}

/* Completes the options of a run that starts, or that resumes from checkpoint c (borrowed; NULL: starts), and estimates
 * its time and memory. Afterwards v->o is complete. Errors: AR_ERR_ARG, those of reading the model's config, and too
 * little memory. */
static ar_status complete(ari_train_values *v, ari_estimate *e, ar_checkpoint *c)
{
    ar_training_options *o = &v->o;
    const bool has_data = o->data != NULL;
    *o = ar_training_defaults();
    if (c)
        ari_training_resume(o, c);
    if (has_data) /* the checkpoint's format belongs to its own data */
        o->data_format = AR_DATA_AUTO;
    if (v->steps > 0)
        o->run.steps = (uint64_t)v->steps;
    AR_TRY(ari_run_reparse(&v->r, &o->run, &ari_train_spec, v));
    if (o->packing.separator != AR_NO_SEPARATOR && !o->packing.enabled)
        return ar_error_set(AR_ERR_ARG, "--separator ends the documents of --pack: give --pack too");
    o->run = ari_run_of(&v->r, &v->common);
    o->save_every = (uint64_t)v->save_every;
    o->stop_after = (uint64_t)v->stop_after;
    o->verify_every = (uint64_t)v->verify_every;
    AR_TRY(set_numerics(v));
    o->run.fault = v->r.inject;
    AR_TRY(ari_fault_known(o->run.fault));
    return set_plan(v, e);
}

/* --- signals ------------------------------------------------------------------------------------------------------ */

/* read by the ranks' threads; without a lock, because a signal handler writes it */
static atomic_int caught_signal;

static const int caught_signals[] = {SIGINT, SIGTERM, SIGHUP};

/* Handles a signal: the first one ends the run after the current step, and a second one of any kind ends the
 * process. */
static void catch_once(int number)
{
    atomic_store(&caught_signal, number);
    for (size_t i = 0; i < sizeof caught_signals / sizeof *caught_signals; i++)
        signal(caught_signals[i], SIG_DFL);
}

/* A signal that the parent ignores stays ignored, as with nohup and background jobs. */
static void catch_signals(void)
{
    for (size_t i = 0; i < sizeof caught_signals / sizeof *caught_signals; i++) {
        struct sigaction old, caught = {.sa_handler = catch_once, .sa_flags = SA_RESTART};
        if (sigaction(caught_signals[i], NULL, &old) == 0 && old.sa_handler != SIG_IGN)
            sigaction(caught_signals[i], &caught, NULL);
    }
}

/* --- listening ---------------------------------------------------------------------------------------------------- */

typedef struct listener {
    const ar_training_options *o;
    const ari_estimate *estimate;
    ari_progress progress;
    bool quiet, text;
    uint64_t every;      /* steps from line to line */
    uint64_t start_step; /* steps before this run */
    uint64_t tokens;     /* since the last line */
    double seconds;
    double first_seconds; /* seconds of the first steps, after which the estimate is printed */
} listener;

static uint64_t last_step(const ar_training_options *o)
{
    return o->stop_after > 0 && o->stop_after < o->run.steps ? o->stop_after : o->run.steps;
}

/* Returns the number of steps between two printed lines: a round number that gives at most 40 lines. */
static uint64_t lines_every(uint64_t steps)
{
    static const uint64_t nice[] = {1, 2, 5};
    enum { MOST_LINES = 40 };
    for (uint64_t power = 1;; power *= 10) {
        for (size_t i = 0; i < sizeof nice / sizeof *nice; i++) {
            if (steps / (nice[i] * power) <= MOST_LINES)
                return nice[i] * power;
        }
    }
}

static void began(void *user, const ar_training_report *r)
{
    listener *l = user;
    const ar_training_options *o = l->o;
    const uint64_t final_step = last_step(o);
    if (l->every == 0)
        l->every = lines_every(final_step > r->resumed_steps ? final_step - r->resumed_steps : 1);
    l->start_step = r->resumed_steps;
    ari_progress_clear(&l->progress);
    if (!l->quiet)
        json_decref(ari_config_notes(stderr, &r->config));
    if (!l->text)
        return;
    ari_train_print_head(stdout, r, o);
    fflush(stdout);
}

static bool has_line(const listener *l, uint64_t step)
{
    return step == l->start_step + 1 || step == l->o->run.steps || step == l->o->stop_after || step % l->every == 0;
}

/* Prints how long all steps will take if that is long. It waits for a few steps because the first one is slower. */
static void announce(listener *l, const ar_training_step *s)
{
    enum { STEPS = 4, LONG_SECONDS = 30 };
    const uint64_t step_count = s->step - l->start_step;
    if (step_count > 1 && step_count <= STEPS)
        l->first_seconds += s->seconds;
    const double remaining_seconds = (double)(last_step(l->o) - s->step) * l->first_seconds / (STEPS - 1);
    if (step_count != STEPS || l->quiet || remaining_seconds < LONG_SECONDS)
        return;
    ari_progress_clear(&l->progress);
    fprintf(stderr, "anyrank train: this will take about %s more, and at most %s of memory\n",
            ARI_SECONDS(remaining_seconds), ARI_BYTES(l->estimate->bytes));
}

static void stepped(void *user, const ar_training_step *s)
{
    listener *l = user;
    char label[96];
    announce(l, s);
    l->tokens += s->tokens;
    l->seconds += s->seconds;
    if (l->text && has_line(l, s->step)) {
        ari_progress_clear(&l->progress);
        ari_train_print_step(stdout, s, l->seconds > 0 ? (double)l->tokens / l->seconds : 0);
        fflush(stdout);
        l->tokens = 0;
        l->seconds = 0;
    }
    snprintf(label, sizeof label, "step %" PRIu64 " of %" PRIu64 ", loss %.4f", s->step, l->o->run.steps,
             (double)s->loss);
    ari_progress_update(&l->progress, (double)s->step / (double)l->o->run.steps, label);
}

static void saved(void *user, const ar_training_save *s)
{
    listener *l = user;
    ari_progress_clear(&l->progress);
    if (s->error)
        fprintf(stderr, "anyrank train: step %" PRIu64 " was not saved: %s\n", s->step, s->error);
}

static bool stopped(void *user)
{
    (void)user;
    return atomic_load(&caught_signal) != 0;
}

/* --- the run ------------------------------------------------------------------------------------------------------ */

/* Reports the training. If one file cannot be written, the others still are. */
static ar_status report_training(const ar_training_report *r, const ari_train_values *v, const ari_watch *watch)
{
    const ar_training_options *o = &v->o;
    const bool text = ari_prints_text(&v->common);
    const ar_status traced = ari_watch_write(watch, r->config.name, &o->run.parallel, o->run.batch);
    if (text && r->has_predicted)
        AR_TRY(ari_predicted_print(stdout, watch, &o->run.parallel, o->run.batch, &r->predicted));
    if (text && traced == AR_OK)
        ari_watch_print(stdout, watch);
    if (text)
        ari_train_print_end(stdout, r, o);
    AR_TRY(ari_json_end(ari_train_json(r, o, watch), &v->common));
    return traced;
}

/* The run's result as a status and an exit code. */
static ar_status verdict(const ar_training_report *r, int *exit_code)
{
    if (r->end == AR_TRAINING_DIVERGED)
        return ar_error_set(AR_ERR_DATA, "%s", r->message);
    if (r->copies_differ || r->bytes_differ || r->end == AR_TRAINING_WRONG) {
        fflush(stdout);
        fprintf(stderr, "anyrank train: %s\n", r->message);
        *exit_code = ARI_EXIT_DIFFERENT;
        return AR_OK;
    }
    if (r->save_failed)
        return ar_error_set(AR_ERR_IO, "the last checkpoint was not written: %s", r->message);
    const int number = atomic_load(&caught_signal);
    if (r->end == AR_TRAINING_STOPPED && number != 0)
        *exit_code = 128 + number; /* as a shell reports a process that the signal ended */
    return AR_OK;
}

static ar_status train_model(ari_train_values *v, ar_checkpoint *resume, const ari_watch *watch, int *exit_code)
{
    ar_training_options *o = &v->o;
    ar_training_report *r = NULL;
    ari_estimate e;
    AR_TRY(complete(v, &e, resume));
    listener l = {.o = o,
                  .estimate = &e,
                  .quiet = v->common.quiet,
                  .text = ari_prints_text(&v->common),
                  .every = (uint64_t)v->log_every};
    ari_watch_run(&o->run, watch);
    o->listener = (ar_training_listener){.begin = began, .step = stepped, .save = saved, .stop = stopped, .user = &l};
    ari_progress_begin(&l.progress, &v->common);
    ar_status st = ar_train_run(&r, o);
    ari_progress_end(&l.progress);
    ar_status reported = AR_OK;
    if (st == AR_OK && ari_transport_reports(v->common.process))
        reported = report_training(r, v, watch);
    if (st == AR_OK)
        st = verdict(r, exit_code);
    st = st == AR_OK ? reported : st;
    ar_training_report_destroy(r);
    return st;
}

ar_status ari_command_train(void *values, int *exit_code)
{
    ari_train_values *v = values;
    ari_watch watch = {0};
    ar_checkpoint *resume = NULL;
    ar_status st = AR_OK;
    catch_signals();
    AR_TRY(check_values(v));
    AR_TRY_TO(done, st, ari_transport_begin(&v->common, &v->transport, &ari_train_spec, v->r.timeout, false));
    AR_TRY_TO(done, st, ari_watch_begin(&watch, &v->watch));
    if (v->resume)
        AR_TRY_TO(done, st, ar_checkpoint_open(&resume, v->resume));
    st = train_model(v, resume, &watch, exit_code);
done:
    ari_layout_unload(&v->o.run);
    ar_checkpoint_close(resume);
    ari_watch_fini(&watch);
    return st;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* anyrank train: options in, a line a step out. What a run does is the library's (run/). */
#include <inttypes.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>

#include "cli/options/subcommand.h"
#include "cli/shared/progress.h"
#include "cli/shared/table.h"
#include "cli/train/train.h"

/* --- signals ------------------------------------------------------------------------------------------------------ */

/* Read by the ranks' threads; without a lock, so that a handler may write it. */
static atomic_int caught_signal;

/* The first one ends the run after its step; a second one, of either kind, ends the process. */
static void catch_once(int number)
{
    atomic_store(&caught_signal, number);
    signal(SIGINT, SIG_DFL);
    signal(SIGTERM, SIG_DFL);
}

/* A signal that the parent ignores stays ignored: nohup, and jobs in the background. */
static void catch_signals(void)
{
    static const int numbers[] = {SIGINT, SIGTERM};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        struct sigaction old, caught = {.sa_handler = catch_once, .sa_flags = SA_RESTART};
        if (sigaction(numbers[i], NULL, &old) == 0 && old.sa_handler != SIG_IGN)
            sigaction(numbers[i], &caught, NULL);
    }
}

/* --- listening ---------------------------------------------------------------------------------------------------- */

typedef struct listener {
    const ar_training_options *o;
    const ari_estimate *estimate;
    ari_progress progress;
    bool quiet, text;
    uint64_t every;  /* steps from line to line */
    uint64_t first;  /* steps before this run */
    uint64_t tokens; /* since the last line */
    double seconds;
    double first_seconds; /* of the steps that the announcement waits for */
} listener;

static uint64_t last_step(const ar_training_options *o)
{
    return o->stop_after > 0 && o->stop_after < o->run.steps ? o->stop_after : o->run.steps;
}

static void began(void *user, const ar_training_report *r)
{
    listener *l = user;
    const ar_training_options *o = l->o;
    const uint64_t last = last_step(o);
    if (l->every == 0)
        l->every = ari_train_log_every(last > r->first ? last - r->first : 1);
    l->first = r->first;
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
    return step == l->first + 1 || step == l->o->run.steps || step == l->o->stop_after || step % l->every == 0;
}

/* After a few steps, of which the first is slower than others: what all will take, where that is long. */
static void announce(listener *l, const ar_training_step *s)
{
    enum { STEPS = 4, LONG_SECONDS = 30 };
    const uint64_t taken = s->step - l->first;
    if (taken > 1 && taken <= STEPS)
        l->first_seconds += s->seconds;
    const double ahead = (double)(last_step(l->o) - s->step) * l->first_seconds / (STEPS - 1);
    if (taken != STEPS || l->quiet || ahead < LONG_SECONDS)
        return;
    ari_progress_clear(&l->progress);
    fprintf(stderr, "anyrank train: this will take about %s more, and at most %s of memory\n", ARI_SECONDS(ahead),
            ARI_BYTES(l->estimate->bytes));
}

static void stepped(void *user, const ar_training_step *s)
{
    listener *l = user;
    char what[96];
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
    snprintf(what, sizeof what, "step %" PRIu64 " of %" PRIu64 ", loss %.4f", s->step, l->o->run.steps,
             (double)s->loss);
    ari_progress_update(&l->progress, (double)s->step / (double)l->o->run.steps, what);
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

/* Files first: what is printed last is that all went well. */
static ar_status report(const ar_training_report *r, const ari_train_values *v, const ari_watch *watch)
{
    const ar_training_options *o = &v->o;
    const bool text = ari_wants_text(&v->common);
    const char *plot = v->plot && r->steps > 0 ? v->plot : NULL;
    if (plot)
        AR_TRY(ar_training_plot(r, o, plot));
    AR_TRY(ari_watch_write(watch, r->config.name, &o->run.parallel, o->run.batch));
    if (text && r->has_predicted)
        AR_TRY(ari_predicted_print(stdout, watch, &o->run.parallel, o->run.batch, &r->predicted));
    if (text) {
        ari_watch_print(stdout, watch);
        ari_train_print_end(stdout, r, o);
    }
    return ari_json_end(ari_train_json(r, o, watch, plot), &v->common);
}

/* What the run came to. */
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
        *exit_code = 128 + number; /* as a shell tells of a process that the signal ended */
    return AR_OK;
}

static ar_status train(ari_train_values *v, ar_checkpoint *resume, const ari_watch *watch, int *exit_code)
{
    ar_training_options *o = &v->o;
    ar_training_report *r = NULL;
    ari_estimate e;
    AR_TRY(ari_train_values_complete(v, &e, resume));
    listener l = {.o = o,
                  .estimate = &e,
                  .quiet = v->common.quiet,
                  .text = ari_wants_text(&v->common),
                  .every = (uint64_t)v->log_every};
    ari_watch_run(&o->run, watch);
    o->listener = (ar_training_listener){.begin = began, .step = stepped, .save = saved, .stop = stopped, .user = &l};
    ari_progress_begin(&l.progress, &v->common);
    ar_status st = ar_train_run(&r, o);
    ari_progress_end(&l.progress);
    if (st == AR_OK && ari_transport_reports(v->common.process))
        st = report(r, v, watch);
    if (st == AR_OK)
        st = verdict(r, exit_code);
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
    AR_TRY(ari_train_values_check(v));
    AR_TRY_TO(done, st,
              ari_transport_begin(&v->common.process, &v->transport, &ari_train_spec, v, v->r.timeout, false));
    AR_TRY_TO(done, st, ari_watch_begin(&watch, &v->watch));
    if (v->resume)
        AR_TRY_TO(done, st, ar_checkpoint_open(&resume, v->resume));
    st = train(v, resume, &watch, exit_code);
done:
    ari_layout_unload(&v->o.run);
    ar_checkpoint_close(resume);
    ari_watch_fini(&watch);
    return st;
}

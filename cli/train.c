/* SPDX-License-Identifier: Apache-2.0 */
/* anyrank train: options in, a line a step out. What a run does is the library's (run/). */
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "anyrank/training.h"
#include "cli/command.h"
#include "cli/main.h"
#include "cli/progress.h"
#include "cli/train_options.h"
#include "cli/train_report.h"
#include "verify/estimate.h"

/* --- signals ------------------------------------------------------------------------------------------------------ */

static volatile sig_atomic_t caught_signal;

/* The first one ends the run after its step; a second one, of either kind, ends the process. */
static void catch_once(int number)
{
    caught_signal = number;
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
    ari_progress progress;
    bool text;
    uint64_t every;  /* steps from line to line */
    uint64_t tokens; /* since the last line */
    double seconds;
} listener;

static void began(void *user, const ar_training_report *r)
{
    listener *l = user;
    const uint64_t last = l->o->stop_after > 0 && l->o->stop_after < l->o->steps ? l->o->stop_after : l->o->steps;
    if (l->every == 0)
        l->every = ari_train_log_every(last > r->first ? last - r->first : 1);
    if (l->text) {
        ari_train_print_head(stdout, r, l->o);
        ari_train_print_columns(stdout);
        fflush(stdout);
    }
}

static void stepped(void *user, const ar_training_step *s)
{
    listener *l = user;
    char what[96];
    l->tokens += s->tokens;
    l->seconds += s->seconds;
    if (l->text && (s->step == 1 || s->step == s->steps || s->step % l->every == 0)) {
        ari_progress_clear(&l->progress);
        ari_train_print_step(stdout, s, l->seconds > 0 ? (double)l->tokens / l->seconds : 0);
        fflush(stdout);
        l->tokens = 0;
        l->seconds = 0;
    }
    snprintf(what, sizeof what, "step %llu of %llu, loss %.4f", (unsigned long long)s->step,
             (unsigned long long)s->steps, (double)s->loss);
    ari_progress_update(&l->progress, (double)s->step / (double)s->steps, what);
}

static bool stopped(void *user)
{
    (void)user;
    return caught_signal != 0;
}

/* --- the run ------------------------------------------------------------------------------------------------------ */

static ar_status finish(const ar_training_report *r, const ar_training_options *o, const ari_train_values *v,
                        const ari_watch *watch)
{
    char layout[ARI_LAYOUT_TEXT], title[256];
    snprintf(title, sizeof title, "%s, %s", r->config.name, ari_layout_text(layout, &o->parallel, o->batch));
    AR_TRY(ari_watch_write(watch, title));
    if (ari_wants_text(&v->common)) {
        ari_watch_print(stdout, watch);
        ari_train_print_end(stdout, r, o);
    }
    return ari_json_end(ari_train_json(r, o, watch), &v->common);
}

static ar_status run_watched(const ari_train_values *v, const ari_watch *watch)
{
    ar_training_options o;
    ar_training_report *r = NULL;
    AR_TRY(ari_train_values_options(&o, v));
    listener l = {.o = &o, .text = ari_wants_text(&v->common), .every = (uint64_t)v->log_every};
    o.cluster = ari_watch_cluster(watch);
    o.trace = watch->trace;
    o.begin = began;
    o.step = stepped;
    o.stop = stopped;
    o.user = &l;
    ari_progress_begin(&l.progress, v->common.quiet);
    ar_status st = ar_train_run(&r, &o);
    ari_progress_end(&l.progress);
    if (st == AR_OK)
        st = finish(r, &o, v, watch);
    if (st == AR_OK && r->end == AR_TRAINING_DIVERGED)
        st = ar_error_set(AR_ERR_DATA, "%s", r->message);
    ar_training_report_destroy(r);
    return st;
}

static ar_status run(const ari_train_values *v)
{
    ari_watch watch = {0};
    ar_status st = ari_watch_begin(&watch, &v->watch, &v->common);
    if (st == AR_OK)
        st = run_watched(v, &watch);
    ari_watch_fini(&watch);
    return st;
}

int ari_command_train(int argc, char **argv)
{
    ari_train_values v = ari_train_values_defaults();
    int exit_code = ARI_EXIT_SAME;
    if (!ari_args_begin(&ari_train_spec, argc, argv, &v, &exit_code))
        return exit_code;
    catch_signals();
    const ar_status st = run(&v);
    if (st != AR_OK) {
        ari_print_error("train", st);
        return ari_exit_code(st);
    }
    return caught_signal != 0 ? 128 + (int)caught_signal : ARI_EXIT_SAME;
}

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <jansson.h>
#include <stdio.h>

#include "anyrank/training.h"
#include "cli/options/args.h"
#include "cli/options/run.h"
#include "cli/options/transport.h"
#include "verify/plan/estimate.h"

/* Options of `anyrank train`. 0, -1 and NULL: not given. */
typedef struct ari_train_values {
    ari_common common;
    ar_training_options o; /* all options except the run; data_format -1: not given */
    ari_run_values r;      /* seed ARI_NOT_GIVEN, numerics -1 */
    ari_transport_values transport;
    ari_watch_values watch;
    const char *resume, *loss_scale;
    int steps, save_every, stop_after, verify_every, log_every, storage;
} ari_train_values;

/** The run itself. */
ar_status ari_command_train(void *values, int *exit_code);

/* A training run for people, and as JSON. */

/** Prints model, data, steps, layout and their consequences, before the first step. */
void ari_train_print_head(FILE *to, const ar_training_report *r, const ar_training_options *o);
/** Prints one line; tokens_per_second: since the preceding line. */
void ari_train_print_step(FILE *to, const ar_training_step *s, double tokens_per_second);
/** Prints losses and time, how to resume a stopped run, and as the last line the hash of the weights. */
void ari_train_print_end(FILE *to, const ar_training_report *r, const ar_training_options *o);
/** Returns the result as JSON, a new reference; NULL if memory is short. */
json_t *ari_train_json(const ar_training_report *r, const ar_training_options *o, const ari_watch *watch);

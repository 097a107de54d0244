/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CLI_TRAIN_REPORT_H
#define ARI_CLI_TRAIN_REPORT_H

#include <jansson.h>
#include <stdio.h>

#include "anyrank/training.h"
#include "cli/watch.h"

/* A training run for people, and as JSON. */

/** Model, data, steps, layout and what it means: before the first step. */
void ari_train_print_head(FILE *to, const ar_training_report *r, const ar_training_options *o);
/** One line; tokens_per_second of the steps since the line before. */
void ari_train_print_step(FILE *to, const ar_training_step *s, double tokens_per_second);
/** Every how many of `steps` steps there is a line: a round number that makes at most 40 lines. */
uint64_t ari_train_log_every(uint64_t steps);
/** Losses and time; how to go on where the run was stopped; the hash of the weights as the last line. */
void ari_train_print_end(FILE *to, const ar_training_report *r, const ar_training_options *o);
/** The result; plot NULL: none was drawn. Gives; NULL without memory. */
json_t *ari_train_json(const ar_training_report *r, const ar_training_options *o, const ari_watch *watch,
                       const char *plot);

#endif

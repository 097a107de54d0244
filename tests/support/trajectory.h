/* SPDX-License-Identifier: Apache-2.0 */
/* Whole training runs: the baseline's weights after many steps on real text, and those of layouts that are to have the
 * same. */
#pragma once

#include <stdio.h>

#include "anyrank/training.h"

typedef struct trajectory_layout {
    ar_parallel parallel;
    size_t bucket_bytes;
    ar_bucket_mode mode;
} trajectory_layout;

/** AdamW with warm-up and cosine, no decay for norms and biases, clipping, dropout, on the bundled text. `model`: path
 *  of a config. */
ar_training_options trajectory_options(const char *model, uint64_t steps);
/** Writes a small model's config into the build tree and gives its path (static storage): layers of "llama"
 *  (grouped queries, gated MLP) or "gpt2" (learned positions, tied, fused q|k|v). NULL where it cannot be written. */
const char *trajectory_model(const char *model_type, int layers);
/** The hash of the weights that the baseline has after the options' steps, from the loader's batches. */
AR_NODISCARD ar_status trajectory_baseline(char hash[65], float *loss, const ar_training_options *o);
/** The hash under one layout. */
AR_NODISCARD ar_status trajectory_run(char hash[65], float *loss, const ar_training_options *o,
                                      const trajectory_layout *l);
/** The same with a stop after `stop` steps under one layout, and the rest under another, from the checkpoint in
 * `folder`. */
AR_NODISCARD ar_status trajectory_resumed(char hash[65], const ar_training_options *o, const trajectory_layout *first,
                                          uint64_t stop, const trajectory_layout *then, const char *folder);

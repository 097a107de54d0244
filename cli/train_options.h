/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CLI_TRAIN_OPTIONS_H
#define ARI_CLI_TRAIN_OPTIONS_H

#include "anyrank/training.h"
#include "cli/args.h"
#include "cli/layout.h"
#include "cli/watch.h"

/* What `anyrank train` is asked for. 0, -1, NaN and NULL: not given. */
typedef struct ari_train_values {
    ari_common common;
    const char *model, *data, *plot, *inject;
    ari_layout_values layout;
    ari_watch_values watch;
    int steps, stop_after, log_every, optimizer;
    size_t batch, seq;
    double lr, clip, dropout;
} ari_train_values;

extern const ari_args_spec ari_train_spec;

/** Nothing given. */
ari_train_values ari_train_values_defaults(void);
/** The options of a run. Errors: AR_ERR_ARG, AR_ERR_UNSUPPORTED, those of reading the model's config. */
AR_NODISCARD ar_status ari_train_values_options(ar_training_options *o, const ari_train_values *v);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_TRAINING_H
#define ANYRANK_TRAINING_H

#include "anyrank/checkpoint.h"
#include "anyrank/config.h"
#include "anyrank/run.h"
#include "anyrank/train.h"

AR_BEGIN_DECLS

/* A complete training run on N ranks: data, steps, checkpoints, and a final hash of the weights, which in exact
 * numerics is the same for every parallel layout. */

typedef struct ar_training_report ar_training_report;

/** Results of a training step, equal on all ranks. */
typedef struct ar_training_step {
    uint64_t step;  /* 1, 2, ..; counted from the start of the run, across checkpoints */
    float loss;     /* of the global batch, before the update */
    float norm;     /* gradient norm before clipping; 0 without clipping */
    double lr;      /* learning rate of this step */
    bool skipped;   /* dynamic loss scaling skipped the update and lowered its scale */
    size_t tokens;  /* tokens processed by all ranks together */
    double seconds; /* wall time of the step */
} ar_training_step;
/** Result of writing a checkpoint. Training continues if it failed. */
typedef struct ar_training_save {
    uint64_t step;      /* steps done */
    const char *folder; /* of the checkpoint; NULL: writing failed */
    const char *error;  /* message; NULL: no error */
} ar_training_save;

/** Callbacks of a training run, called one at a time on rank 0's thread; each may be NULL. */
typedef struct ar_training_listener {
    void (*begin)(void *user, const ar_training_report *r); /* before the first step, after model and data were read */
    void (*step)(void *user, const ar_training_step *s);    /* after each step */
    void (*save)(void *user, const ar_training_save *s);    /* after each attempt to write a checkpoint */
    bool (*stop)(void *user); /* before each step (in every process, if ranks are processes); true ends training */
    void *user;               /* first argument of the callbacks */
} ar_training_listener;

/** Options of a training run. */
typedef struct ar_training_options {
    ar_run run; /* model: with its weights if it has any, else fresh ones; with `resume` NULL means the checkpoint's
                   model. steps: total, including those before the checkpoint. seed: at most INT64_MAX */
    const ar_module_case *module; /* a user's module to train instead of a model, on its own batches; then run.model,
                                     plan, batch, seq and the data options are ignored. Borrowed. NULL: none */
    const char *data;             /* path of the training data; NULL: the bundled text */
    ar_data_format data_format;
    bool in_order;           /* samples are not shuffled */
    ar_packing packing;      /* packing of documents into samples */
    bool scale_loss;         /* turns on loss scaling, in native numerics */
    ar_loss_scaling scaling; /* its state before the first step */
    ar_checkpoint *resume;   /* checkpoint to continue from, under any layout; borrowed; NULL: starts at step 1 */
    const char *save;        /* folder for checkpoints, of which one is written at the end; NULL: none */
    uint64_t save_every;     /* K: also writes one in steps K, 2K, ..; 0: only at the end */
    size_t max_checkpoints;  /* number of newest checkpoints to keep; 0: all */
    uint64_t stop_after;     /* stops after this step, like listener.stop; 0: no such stop */
    uint64_t verify_every;   /* K: in steps K, 2K, .. verifies gradients, and copies of weights and optimizer state,
                                across ranks before the update (ar_train_options.verify); 0: never */
    ar_training_listener listener;
} ar_training_options;
/** Returns default options: 100 steps of AdamW with PyTorch's defaults on 8 sequences of 64 tokens, gradients clipped
 *  at norm 1, one rank, no packing. The caller sets run.model. */
ar_training_options ar_training_defaults(void);

/* Why training ended. `steps` is that of the report. */
typedef enum ar_training_end {
    AR_TRAINING_DONE,     /* all steps are done */
    AR_TRAINING_STOPPED,  /* listener.stop or stop_after */
    AR_TRAINING_DIVERGED, /* loss or gradient norm of step `steps` + 1 is not finite */
    AR_TRAINING_WRONG     /* the verification (verify_every) failed in step `steps` + 1, which changed no weight */
} ar_training_end;

/** Report of a training run. */
struct ar_training_report {
    ar_config config;
    char folder[512];  /* of the model */
    bool fresh;        /* weights were initialised randomly, not read from files */
    size_t parameters; /* elements of all parameters */
    char data_path[512];
    size_t data_tokens, windows; /* tokens of the data; samples of seq tokens in an epoch */
    double epochs;               /* number of epochs in run.steps steps */
    char note[512];              /* which options differ from the checkpoint's and change the weights; "": none */
    uint64_t resumed_steps;      /* steps done before this run, in the checkpoint */
    uint64_t steps;              /* steps done in total */
    float *loss;                 /* [steps], from step 1 on; NaN if the checkpoint does not store it */
    float *norm;                 /* [steps], ar_training_step.norm; NaN for the first `resumed_steps` steps */
    double *lr;                  /* [steps], learning rates by the options' schedule */
    double seconds;              /* time of this run's steps */
    uint64_t bytes;              /* bytes moved between ranks by this run, all ranks together */
    uint64_t routed;             /* number of token rows among them that expert-parallel ranks sent to each other */
    uint64_t bytes_predicted;    /* predicted from config, layout and `routed`; 0: not predicted (loss scaling,
                                    divergence, a module with verify_every or listener.stop) */
    bool has_predicted;          /* `predicted` is set: a cluster was given */
    ar_trace_summary predicted;  /* times by the cluster's virtual clock */
    char weights_hash[65];       /* SHA-256 after `steps` steps; "" if training diverged or the verification failed */
    char checkpoint[600];        /* folder of the last checkpoint written; "": none */
    bool save_failed;            /* the last attempt to write a checkpoint failed */
    bool copies_differ;          /* ranks that should hold equal weights do not: a bug */
    bool bytes_differ;           /* bytes != bytes_predicted: a collective is missing or superfluous */
    ar_training_end end;
    char message[512]; /* describes the first of save_failed, copies_differ, bytes_differ and a premature end; "":
                          none */
    uint64_t verified; /* number of steps that passed the verification */
    char warning[300]; /* the verification's first warning; "": none */
};

/** Runs a training run. Returns AR_OK with a report also if training was stopped, diverged or could not write
 *  checkpoints; its `end` and `save_failed` say so. Earlier checkpoints of a diverged run are kept. The caller releases
 *  *out with ar_training_report_destroy. Errors: those of reading model and data; of invalid layouts and options, as in
 *  ar_check; AR_ERR_ARG (resuming with other data, batch, seq or seed than the checkpoint's, or with fewer steps than
 *  it has done); AR_ERR_IO (another process uses the checkpoint folder); those of the ranks. */
AR_NODISCARD ar_status ar_train_run(ar_training_report **out, const ar_training_options *o);
/** Frees a report. Accepts NULL. */
void ar_training_report_destroy(ar_training_report *r);

AR_END_DECLS
#endif

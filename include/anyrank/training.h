/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_TRAINING_H
#define ANYRANK_TRAINING_H

#include "anyrank/checkpoint.h"
#include "anyrank/run.h"
#include "anyrank/train.h"

AR_BEGIN_DECLS

/* A whole training run on N simulated ranks: data, steps, checkpoints, and a hash of the weights at the end, which in
 * the exact numerics is the same for every layout. */

typedef struct ar_training_report ar_training_report;

/** Results of a step: the same on all ranks. */
typedef struct ar_training_step {
    uint64_t step; /* 1, 2, ... since the start of the run, also after a checkpoint */
    float loss;    /* before the update */
    float norm;    /* of the gradients before clipping; 0 without clipping */
    double lr;     /* of this step */
    bool skipped;  /* no weight was changed: dynamic loss scaling, whose scale falls */
    size_t tokens; /* that went through the model, all ranks together */
    double seconds;
} ar_training_step;
/** A checkpoint that was written, or why it was not: training goes on. */
typedef struct ar_training_save {
    uint64_t step;
    const char *folder; /* NULL: it failed */
    const char *error;  /* NULL: it did not */
} ar_training_save;

/** Who is told, on rank 0's thread, one call at a time; NULL: nobody. */
typedef struct ar_training_listener {
    void (*begin)(void *user, const ar_training_report *r); /* everything is read; the first step comes next */
    void (*step)(void *user, const ar_training_step *s);
    void (*save)(void *user, const ar_training_save *s);
    bool (*stop)(void *user); /* asked before each step, of processes in each: true ends all ranks in good order */
    void *user;
} ar_training_listener;

typedef struct ar_training_options {
    ar_run run; /* model: its weights, or fresh ones where it has none; NULL with `resume`: the checkpoint's own.
                         steps: in all, those before the checkpoint included. seed: at most INT64_MAX */
    const ar_module_case *module; /* trained in place of a model, on its own batches; of run, model, plan, batch and seq
                                     are not looked at, nor is the data. Borrowed. NULL: the model */
    const char *data;             /* as ari_data_open; NULL: the project's own text */
    ar_data_format data_format;
    bool in_order;           /* the data's windows are not shuffled */
    ar_packing packing;      /* how windows are made of documents */
    bool scale_loss;         /* native numerics: with `scaling` */
    ar_loss_scaling scaling; /* as the first step finds it */
    ar_checkpoint *resume;   /* goes on from there, under whatever layout; NULL: from the start. Borrowed */
    const char *save;        /* folder of checkpoints: one at the end; NULL: none */
    uint64_t save_every;     /* and one every so many steps; 0: none but at the end */
    size_t keep;             /* how many of them stay; 0: all */
    uint64_t stop_after;     /* ends after this step as `stop` would; 0: nowhere */
    uint64_t verify_every;   /* in steps K, 2K, ... gradients, copies of the weights and of the optimizer's state are
                                verified before the update (ar_train_options.verify); 0: never */
    ar_training_listener listener;
} ar_training_options;
/** 100 steps of AdamW on 8 sequences of 64 tokens, clipped at 1, on one rank, with PyTorch's defaults. No model, and
 *  windows that are not packed. */
ar_training_options ar_training_defaults(void);

typedef enum ar_training_end {
    AR_TRAINING_DONE,     /* all steps */
    AR_TRAINING_STOPPED,  /* by stop or stop_after */
    AR_TRAINING_DIVERGED, /* the loss or the gradient norm of the step after `steps` is not finite */
    AR_TRAINING_WRONG     /* what was verified in the step after `steps` is not right; no weight was changed by it */
} ar_training_end;

struct ar_training_report {
    ar_config config;
    char folder[512];  /* of the model */
    bool fresh;        /* weights made here, not read */
    size_t parameters; /* elements */
    char data_path[512];
    size_t data_tokens, windows; /* an epoch is all windows of seq tokens once */
    double epochs;               /* that `steps` of the options go through */
    char note[512];              /* resumed with options that change the weights: which; else "" */
    uint64_t first;              /* steps that lay behind when this run began: the checkpoint's */
    uint64_t steps;              /* taken in all */
    float *loss;                 /* [steps], of step 1 on; NaN where the checkpoint does not tell */
    float *norm;                 /* [steps], as in ar_training_step; NaN up to `first` */
    double *lr;                  /* [steps], of the options' schedule */
    double seconds;              /* of this run's steps */
    uint64_t bytes;              /* moved between ranks by this run, all ranks together */
    uint64_t routed;             /* rows of tokens that expert-parallel ranks have sent each other, of those bytes */
    uint64_t
        bytes_predicted; /* what config and layout say of it, and of tokens `routed`; 0 where they do not: loss scaling, a run
                                    that diverged, a module that is verified or asked to stop */
    bool has_predicted;         /* with a cluster */
    ar_trace_summary predicted; /* by the virtual clock */
    char weights_hash[65];      /* after `steps` steps; "" where training diverged or was found wrong */
    char checkpoint[600];       /* the last one written; "" if none */
    bool save_failed;           /* the last one that was to be written was not */
    bool copies_differ;         /* ranks hold other weights than others do, which nothing but a mistake explains */
    bool bytes_differ;          /* `bytes` is not what was predicted: a collective is missing, or one too many */
    ar_training_end end;
    char message[512]; /* of these four, the first that is so; else "" */
    uint64_t verified; /* steps in which verify_every found no error */
    char warning[300]; /* the first of what it found that is none; "" */
};

/** Trains. Gives the report also where the run was stopped or diverged, and where checkpoints could not be written; its
 *  `end` tells. What a run that diverges has saved before stays. Errors: those of reading model and data, illegal
 *  layouts and options (as ar_check), AR_ERR_ARG (resumed with other data, batch, seq or seed than before; steps that
 *  the checkpoint has already passed), those of ari_checkpoint_writer_create, and of the ranks. */
AR_NODISCARD ar_status ar_train_run(ar_training_report **out, const ar_training_options *o);
/** Accepts NULL. */
void ar_training_report_destroy(ar_training_report *r);

AR_END_DECLS
#endif

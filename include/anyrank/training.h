/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_TRAINING_H
#define ANYRANK_TRAINING_H

#include "anyrank/ddp.h"
#include "anyrank/optimizer.h"
#include "anyrank/parallel.h"
#include "anyrank/sim.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A whole training run on N simulated ranks: data, steps, checkpoints, and a hash of the weights at the end, which in
 * the exact numerics is the same for every layout. */

/** What a step told, on rank 0; the same on all. */
typedef struct ar_training_step {
    uint64_t step;  /* 1, 2, ... since the start of the run, before any checkpoint */
    uint64_t steps; /* that the run shall have */
    float loss;     /* before the update */
    float norm;     /* of the gradients before clipping; 0 without clipping */
    double lr;      /* of this step */
    size_t tokens;  /* that went through the model, all ranks together */
    double seconds;
} ar_training_step;

typedef struct ar_training_report ar_training_report;

typedef struct ar_training_options {
    const char *model; /* folder, .json file or bundled name; its weights, or fresh ones where it has none */
    const char *data;  /* one byte one token; NULL: the project's own text */
    uint64_t steps;    /* in all, those before the checkpoint included */
    size_t batch, seq; /* of a step, all ranks together: sequences, tokens of each */
    ar_optimizer_options optimizer;
    double clip;    /* largest gradient norm; 0: none */
    double dropout; /* probability; 0: none */
    ar_parallel parallel;
    ar_plan plan;
    ar_ddp_options ddp; /* how gradients are summed over dp; its `zero` comes from the layout */
    ar_numerics numerics;
    uint64_t seed; /* of fresh weights, of the order of the data, of dropout */
    ar_fault fault;
    uint64_t stop_after; /* end after this step, as an interruption would; 0: nowhere */
    ar_sim_algorithm algorithm;
    int threads;                   /* of the whole process; 0: the machine's cores */
    uint64_t timeout_ns;           /* longest wait of a rank for another; 0: 60 s */
    const ar_sim_cluster *cluster; /* what it would take there: virtual time. NULL: none. Borrowed */
    ar_trace *trace;               /* records the run; NULL: nothing does. Borrowed */
    /* Listeners, on rank 0's thread, one call at a time; NULL: nobody. begin: when everything is read, before the first
     * step. stop: asked before each step; true ends the run in good order, on all ranks. */
    void (*begin)(void *user, const ar_training_report *r);
    void (*step)(void *user, const ar_training_step *s);
    bool (*stop)(void *user);
    void *user;
} ar_training_options;
/** 100 steps of AdamW on 8 sequences of 64 tokens, clipped at 1, on one rank, with PyTorch's defaults. No model. */
ar_training_options ar_training_defaults(void);

typedef enum ar_training_end {
    AR_TRAINING_DONE,    /* all steps */
    AR_TRAINING_STOPPED, /* by stop or stop_after */
    AR_TRAINING_DIVERGED /* the loss or the gradient norm of step `steps` + 1 is not finite: `message` */
} ar_training_end;

struct ar_training_report {
    ar_config config;
    char folder[512];  /* of the model */
    bool fresh;        /* weights made here, not read */
    size_t parameters; /* elements */
    size_t data_tokens;
    uint64_t first;             /* steps that lay behind when this run began: the checkpoint's */
    uint64_t steps;             /* taken in all */
    float *loss;                /* [steps], of step 1 on */
    float *norm;                /* [steps]; 0 without clipping */
    double *lr;                 /* [steps] */
    double seconds;             /* of this run's steps */
    uint64_t bytes;             /* moved between ranks by this run, all ranks together */
    bool has_predicted;         /* with a cluster */
    ar_trace_summary predicted; /* by the virtual clock */
    char weights_hash[65];
    ar_training_end end;
    char message[512];
};

/** Trains. Gives the report also where the run was stopped or diverged; its `end` tells. Errors: those of reading model
 *  and data, illegal layouts and options (as ar_check), and of the ranks. */
AR_NODISCARD ar_status ar_train_run(ar_training_report **gives, const ar_training_options *o);
/** Accepts NULL. */
void ar_training_report_destroy(ar_training_report *r);

#ifdef __cplusplus
}
#endif
#endif

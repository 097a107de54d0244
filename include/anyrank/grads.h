/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_GRADS_H
#define ANYRANK_GRADS_H

#include "anyrank/config.h"
#include "anyrank/run.h"
#include "anyrank/sensitivity.h"

AR_BEGIN_DECLS

/* One forward and backward pass on given inputs on N simulated ranks, with outputs and gradients written to safetensors
 * files: reference values for other implementations. It runs a model, or a single transformer block. */
typedef struct ar_grads_options {
    ar_run run; /* model: NULL with `block`, whose layout may have tp only. batch, seq, steps, clip and dropout must be
                   0 (batch and seq are the input's), storage fp32, ranks threads. fault: one with an effect in a
                   forward or backward pass */
    const char *block;    /* folder with case.json and inputs.safetensors of a single block; NULL: a model is run */
    const char *input;    /* safetensors file: input_ids [b, s], optionally attention_mask, labels. NULL with `block` */
    const char *out;      /* output folder, created if missing; NULL with `logprobs` */
    const char *logprobs; /* output file for log-probabilities of a model's labels, computed by forward passes; then
                             nothing else is written. Needs no fault, trace, label smoothing and z-loss. NULL: none */
    bool logits;          /* with logprobs: the file also contains each label's logit */
    bool binary64;    /* with logprobs: computed in binary64 (AR_MODE_F64 of the baseline), which needs one CPU rank,
                         exact numerics, precision F32 */
    bool stacked;     /* grads.safetensors has the names and shapes that transformers 5 uses in memory for experts,
                         gate_up_proj [E, 2F, h] and down_proj [E, h, F], instead of a tensor for each expert */
    bool per_rank;    /* also writes out/ranks, a dump with a file for each rank's part */
    bool activations; /* also writes out/activations.safetensors with all tensors of models.md (out/ranks has them
                         too) */
    bool sensitivity; /* also writes out/allowed.safetensors: how much rounding alone may change each tensor */
    ar_sensitivity sensitivity_of;                                    /* the arithmetic whose rounding that is */
    void (*progress)(void *user, double fraction, const char *phase); /* progress of the sensitivity; NULL: none */
    void *progress_user;                                              /* first argument of progress */
} ar_grads_options;

/** Results of ar_grads. */
typedef struct ar_grads_result {
    ar_config config;           /* of the model; all zero with `block` */
    float loss;                 /* 0 with `block`; with `logprobs` minus the mean log-probability */
    char note[5][320];          /* remarks on surprising properties of the input; "": unused */
    bool fresh;                 /* the model has no weights; they were initialised from the seed */
    double seconds;             /* wall time */
    bool has_predicted;         /* `predicted` is set: a cluster was given */
    ar_trace_summary predicted; /* times by the cluster's virtual clock */
    uint64_t bytes;             /* bytes moved between ranks, all ranks together */
    size_t batch;               /* samples of the input */
    size_t tensors;             /* number of outputs and gradients */
    size_t activations;         /* tensors in activations.safetensors */
    char outputs_hash[65];      /* SHA-256 of outputs and gradients */
    char file[5][600]; /* paths written, "" if not: [0] outputs (or block, or log-probabilities), [1] gradients, [2]
                          activations, [3] folder of the ranks' files, [4] allowed.safetensors */
} ar_grads_result;

/** Runs the forward and backward pass and writes the files:
 *    model:  out/outputs.safetensors: logits [b,s,V], loss [1], hidden_states.i [b,s,h] (0: output of the embedding; i:
 *            output of block i-1, the last one after the final norm); out/grads.safetensors: the gradient of every
 *            parameter, with Hugging Face names and shapes
 *    block:  out/block.safetensors: y, dx, d<parameter>
 *  In exact numerics these files have the same bytes for every layout. out/model.json describes the run (pytorch.md),
 *  unless the folder has another program's. With per_rank, out/ranks has a file for each rank with its weights,
 *  gradients and outputs under the names of models.md; it replaces only such a folder of an earlier run. With
 *  sensitivity, out/allowed.safetensors has an F64 for each tensor of these files and of models.md (numerics.md,
 *  section 7). With logprobs, for each sequence (a row or document without padding) and each position t >= 1 with label
 *  x (without labels: the token id): logprob_t = fl32(z_(t-1)[x] - lse(z_(t-1))), a natural logarithm, with lse as in
 *  the cross-entropy (numerics.md, section 4); with binary64 nothing is rounded to fp32. anyrank-grads(1) lists the
 *  file's tensors. Files are written atomically. Errors: those of reading model and input, by name; AR_ERR_ARG (a fault
 *  without effect in this run); AR_ERR_IO. */
AR_NODISCARD ar_status ar_grads(ar_grads_result *result, const ar_grads_options *o);

AR_END_DECLS
#endif

/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_GRADS_H
#define ANYRANK_GRADS_H

#include "anyrank/model.h"
#include "anyrank/run.h"
#include "anyrank/sensitivity.h"

AR_BEGIN_DECLS

/* One forward and backward on given inputs, on N simulated ranks; outputs and gradients as safetensors files. */
typedef struct ar_grads_options {
    ar_run run; /* model: NULL with `block`, whose layout is tp alone. batch and seq are the input's, 0 here, as are
                   steps, clip and dropout; storage fp32, ranks that are threads. fault: one that acts in a forward or
                   backward pass of such a run */
    const char *block;    /* folder with case.json and inputs.safetensors of a single block; NULL with a model */
    const char *input;    /* safetensors: input_ids [b, s]; optional attention_mask, labels. Not with `block` */
    const char *out;      /* folder, made if it is not there; NULL with `logprobs` */
    const char *logprobs; /* a safetensors file of log-probabilities, by forward passes alone, in place of all else;
                             NULL: none. A model's, without a fault, a trace, label smoothing or z-loss */
    bool logits;          /* it has the logits of each label too */
    bool binary64; /* its numbers in AR_MODE_F64 of the baseline: one rank of the CPU, exact numerics, precision f32 */
    bool stacked;  /* grads.safetensors has the names and shapes of transformers 5 in memory: of each layer's experts
                      gate_up_proj [E, 2F, h] and down_proj [E, h, F], where checkpoints have a tensor of each expert */
    bool per_rank; /* out/ranks: what each rank holds, as a dump of ranks */
    bool activations; /* out/activations.safetensors: every tensor of models.md; the ranks' files have them too */
    bool sensitivity; /* out/allowed.safetensors: what rounding alone may change in each tensor */
    ar_sensitivity sensitivity_of;                                    /* in which arithmetic */
    void (*progress)(void *user, double fraction, const char *phase); /* of the sensitivity; NULL: nobody listens */
    void *progress_user;
} ar_grads_options;

typedef struct ar_grads_result {
    ar_config config;  /* as it was read; with `block` all zero */
    float loss;        /* 0 with `block`; minus the mean of log-probabilities */
    char note[4][320]; /* what somebody may not expect of the input; "" */
    bool fresh;        /* the folder has no weights: they were drawn by the seed */
    double seconds;
    bool has_predicted;         /* with a cluster */
    ar_trace_summary predicted; /* by the virtual clock */
    uint64_t bytes;             /* moved between ranks, all ranks together */
    size_t batch;               /* samples of the input */
    size_t tensors;             /* of outputs and gradients */
    size_t activations;         /* tensors of activations.safetensors */
    char outputs_hash[65];      /* over outputs and gradients */
    char file[5][600]; /* what was written: outputs and gradients, or a block or log-probabilities and ""; activations,
                          or ""; the folder of the ranks' files, or ""; allowances, or "" */
} ar_grads_result;

/** Model: out/outputs.safetensors (logits [b,s,V], loss [1], hidden_states.i [b,s,h]: 0 the embedding's output, i the
 *  output of block i-1, the last one after the final norm) and out/grads.safetensors (every parameter, Hugging Face
 * names and shapes). Block: out/block.safetensors (y, dx, d<parameter>). In the exact numerics these are the same bytes
 * for every layout. Beside them model.json says what the run was (pytorch.md), unless there is another's. With
 * per_rank, out/ranks holds a file of each rank with its weights, gradients and outputs under the names of models.md;
 * it replaces the ranks of an earlier run, and no folder that holds anything else. With sensitivity, out/allowed.safetensors holds an F64 for each tensor of these files and of models.md
 * (numerics.md, section 7). Errors: everything wrong with the inputs, by name; AR_ERR_ARG (a fault that could not
 * matter in this run); AR_ERR_IO. A file that could not be written whole does not appear.
 *  With logprobs, of each sequence, a row or a document without its padding, at its own length: logprob_t =
 *  fl32(z_(t-1)[x] - lse(z_(t-1))), natural logarithms, of the label x of place t >= 1, or the id without labels, with
 *  lse as in the cross-entropy (numerics.md, section 4). In binary64 nothing is rounded to fp32. The file's tensors:
 *  anyrank-grads(1). */
AR_NODISCARD ar_status ar_grads(ar_grads_result *result, const ar_grads_options *o);

AR_END_DECLS
#endif

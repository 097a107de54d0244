/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_GRADS_H
#define ANYRANK_GRADS_H

#include "anyrank/ddp.h"
#include "anyrank/model.h"
#include "anyrank/parallel.h"
#include "anyrank/sim.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One forward and backward on given inputs, on N simulated ranks; outputs and gradients as safetensors files. */
typedef struct ar_grads_options {
    const char *model;    /* folder or bundled name; NULL with `block` */
    const char *block;    /* folder with case.json and inputs.safetensors of a single block; NULL with `model` */
    const char *input;    /* safetensors: input_ids [b, s]; optional attention_mask, labels. Not with `block` */
    const char *out;      /* folder, made if it is not there */
    ar_parallel parallel; /* of a block: tp alone */
    ar_ddp_options ddp; /* how gradients are summed over dp; its `zero` comes from the layout. {0}: one bucket for each
                           parameter */
    ar_numerics numerics;
    ar_fault fault; /* one that acts in a forward or backward pass of such a run */
    uint64_t seed;  /* of fresh weights, where the model's folder has none */
    ar_mlp_order mlp_order;
    ar_sim_algorithm algorithm;
    int threads;                   /* of the whole process; 0: the machine's cores */
    uint64_t timeout_ns;           /* 0: 60 s */
    const ar_sim_cluster *cluster; /* what it would take there: virtual time. NULL: none. Borrowed */
    ar_trace *trace;               /* records the run; NULL: nothing does. Borrowed */
} ar_grads_options;

typedef struct ar_grads_result {
    float loss; /* 0 with `block` */
    double seconds;
    bool has_predicted;         /* with a cluster */
    ar_trace_summary predicted; /* by the virtual clock */
    uint64_t bytes;             /* moved between ranks, all ranks together */
    size_t batch;               /* samples of the input */
    size_t tensors;
    char outputs_hash[65]; /* over everything written */
    char file[2][600];     /* what was written; "" if only one file */
} ar_grads_result;

/** Model: out/outputs.safetensors (logits [b,s,V], loss [1], hidden_states.i [b,s,h]: 0 the embedding's output, i the
 *  output of block i-1, the last one after the final norm) and out/grads.safetensors (every parameter, Hugging Face
 * names and shapes). Block: out/block.safetensors (y, dx, d<parameter>). In the exact numerics these are the same bytes
 * for every layout. Errors: everything wrong
 * with the inputs, by name; AR_ERR_ARG (a fault that could not matter in this run); AR_ERR_IO. A file that could not be
 * written whole does not appear. */
AR_NODISCARD ar_status ar_grads(ar_grads_result *result, const ar_grads_options *o);

#ifdef __cplusplus
}
#endif
#endif

/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_SIM_PLAN_BYTES_IMPL_H
#define ARI_SIM_PLAN_BYTES_IMPL_H

#include "sim/plan/bytes.h"

/* A sum of bytes over one kind of group. A ring over N ranks moves, all ranks of a group together, (N-1)*D bytes for a
 * reduce-scatter, an all-gather or a broadcast of D bytes, and twice that for an all-reduce. The first overflow stays
 * in `st`, and what is counted after it means nothing. */
typedef struct ari_byte_tally {
    size_t links; /* N - 1, times the groups that move at once */
    size_t bytes;
    ar_status st;
} ari_byte_tally;

/** a*b and a+b; 0 after an overflow. */
size_t ari_tally_mul(ari_byte_tally *t, size_t a, size_t b);
size_t ari_tally_add(ari_byte_tally *t, size_t a, size_t b);
/** Once round the ring: a reduce-scatter, an all-gather or a broadcast of `elements` of `width` bytes in full
 *  length. */
void ari_tally_pass(ari_byte_tally *t, size_t elements, size_t width);
/** Twice round it. */
void ari_tally_all_reduce(ari_byte_tally *t, size_t elements, size_t width);

/* What decides the bytes of a step, worked out once from a case. */
typedef struct ari_step_shape {
    const ar_config *config;
    bool packed; /* q, k and v are one parameter */
    bool head;   /* an LM head and a cross-entropy; without, the loss sums the output */
    bool exact, backward, sp, keep_gathered;
    size_t matrix; /* bytes of an element of a matrix, and of its gradient in native numerics */
    size_t tp;
    size_t samples, seq, tokens; /* of the global batch: what each group of tp ranks moves adds up to what one would */
    size_t replicas;             /* ranks that hold copies of one KV head */
} ari_step_shape;

/* The traffic of the layers over tp, in three sums: exponents of weights, exchanged once for every version of them;
 * everything that comes with the tokens of a step; and what is folded over the replicas of KV heads. */
typedef struct ari_layer_tally {
    const ari_step_shape *shape;
    ari_byte_tally weights, tokens, replicas;
} ari_layer_tally;

void ari_count_embedding(ari_layer_tally *t);
void ari_count_block(ari_layer_tally *t, ar_mlp_order order);
void ari_count_head(ari_layer_tally *t);

/* Elements of parameters, summed over the ranks of a group of tp. */
typedef struct ari_param_elements {
    size_t held;           /* that its ranks hold: a replicated one counts on each of them */
    size_t held_vectors;   /* of them, those of norms and biases */
    size_t spread;         /* of one rank, those whose gradient's terms are spread over tp */
    size_t spread_vectors; /* of them, the same */
    size_t params;         /* no elements: the tensors of one rank */
} ari_param_elements;

/** Errors: AR_ERR_OVERFLOW. */
AR_NODISCARD ar_status ari_count_params(ari_param_elements *n, const ari_step_shape *s, const ar_plan *plan);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_VERIFY_GRADS_BLOCK_CASE_H
#define ARI_VERIFY_GRADS_BLOCK_CASE_H

#include "anyrank/baseline.h"
#include "anyrank/batch.h"
#include "anyrank/model.h"
#include "verify/grads/gather.h"

/* A single transformer block with given inputs: a folder with case.json (batch, seq, hidden, heads, kv_heads, ffn,
 * causal, eps, activation) and inputs.safetensors (x, dy [b, s, h]; ln1_weight, ln1_bias, wq, wk, wv, wo, ln2_weight,
 * ln2_bias, w1, b1, w2, b2; weights [out, in]). It is layer 0 of a stack. */
typedef struct ari_block_case {
    ar_config config;
    ar_batch batch; /* sizes only */
    ar_plan plan;
    float *values[16]; /* x, dy, then the parameters, in a fixed order */
} ari_block_case;

AR_NODISCARD ar_status ari_block_case_load(ari_block_case *b, const char *folder);
void ari_block_case_fini(ari_block_case *b);
/** Wants y, dx and d<parameter> in file 0. */
AR_NODISCARD ar_status ari_block_case_want(const ari_block_case *b, ari_gatherer *g);
/** The baseline's run of it as `o` says; its weights are the case's. Errors: those of ar_baseline_block. */
AR_NODISCARD ar_status ari_block_case_baseline(const ari_block_case *b, const ar_baseline_options *o);
/** Forward and backward on one rank; user: the case. Collective. */
AR_NODISCARD ar_status ari_block_case_run(void *user, ar_ctx *ctx);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_BATCH_H
#define ANYRANK_BATCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "anyrank/status.h"

AR_BEGIN_DECLS

#define AR_IGNORE_INDEX (-100)
#define AR_SAMPLE_DIMS 3
#define AR_MAX_MTP 8 /* further tokens that a model predicts */

/** One batch on the host. Borrows its arrays. b = batch, s = seq. A sample is one row. */
typedef struct ar_batch {
    size_t batch, seq;
    const int64_t *input_ids;    /* [b, s], each in [0, vocab) */
    const int64_t *labels;       /* [b, s] or NULL: input_ids. Position s predicts labels[s+1]; AR_IGNORE_INDEX and the
                                    last position of each document are left out. Of a classifier (loss.h): the
                                    classes, one for each row of logits, not shifted */
    const int64_t *position_ids; /* [b, s], each in [0, the model's positions), or NULL: 0 .. s-1 in every row, or from
                                    0 in every document. Of rotary and learned positions; masks and windows go by the
                                    place in the row */
    const int32_t *documents;    /* [b, s], or NULL: each row is one. The number of the document that a position belongs
                                    to: 0, 1, .. in every row. Attention stays inside a document, and its last
                                    position predicts nothing */
    bool targets_cross;          /* but it does: the next document's first label, as a model of transformers does */
    const uint8_t *padding_mask; /* [b, s] of 0 (masked key) and 1, or NULL */
    const float *additive_mask;  /* [mask_batch, mask_heads, s, s], or NULL; -inf masks, NaN and +inf are errors */
    size_t mask_batch;           /* b or 1 */
    size_t mask_heads;           /* heads or 1 */
    /* Position of these rows in the global batch, whose samples data parallelism and micro-batches share out. */
    size_t global_batch; /* samples of it; 0: these rows are all of it, and the two below are not looked at */
    size_t first_sample; /* index of row 0 in it */
    size_t targets;      /* T, its target tokens: what every loss and gradient is divided by */
    size_t mtp_targets[AR_MAX_MTP]; /* the same of ari_batch_roll by 1, 2, .. */
    size_t longest;                 /* ari_batch_longest of it; 0: of these rows */
    size_t tokens;                  /* ari_batch_tokens of it; 0: of these rows */
    /* Fields of a module whose input is numbers, not ids; zero elsewhere. */
    const float *input; /* [b, the shape of a sample], or NULL */
    int sample_ndim;    /* 1 .. AR_SAMPLE_DIMS */
    size_t sample_shape[AR_SAMPLE_DIMS];
    const float *target; /* [b, target_width]: what a regression should give, or NULL */
    size_t target_width;
} ar_batch;

/* What is balanced of a model with experts: a sequence's tokens, the step's whole batch, or this over all layers. */
typedef enum ar_balance {
    AR_BALANCE_NONE,
    AR_BALANCE_SEQUENCE,
    AR_BALANCE_BATCH,
    AR_BALANCE_LAYERS,
    AR_BALANCES
} ar_balance;
/** Losses of the routers, added to the loss. Of a layer with E
 *  experts, k of them for each token, softmax p [T, E], and n_i tokens that go to expert i, counted without a gradient:
 *
 *    sequence  mean over the sequences of  a*E/(k*S^2) * sum over i of n_i * sum over t of p_ti      S: its tokens
 *              (DeepSeek-AI 2024, arXiv:2412.19437, equations 17 to 20)
 *    batch     a*E/(k*T^2) * sum over i of n_i * sum over t of p_ti      T: tokens of the step's whole batch
 *              (Fedus et al. 2021, arXiv:2101.03961, equation 4, as Qiu et al. 2025, arXiv:2501.11873, take it)
 *    layers    a*E/(L*T)^2 * sum over i of n_i * sum over t of p_ti      both sums over the model's L layers with experts
 *              (load_balancing_loss_func of transformers)
 *    z-loss    z * mean over t of lse_t^2 (Zoph et al. 2022, arXiv:2202.08906, equation 5)
 *
 *  Those are of routers of a softmax. Of one of sigmoids (ar_route_scores), after each step that changes weights,
 *
 *    bias      b_i = fl32(b_i + u*sign(sum n - E*n_i)), n_i the tokens of the step's whole batch that went to expert i
 *              (DeepSeek-AI 2024, section 2.1.2; sign(mean n - n_i) in integers)
 *
 *  Masked tokens (padding_mask) are left out of all of it. The scope is a sequence or the step, never a micro-batch or a
 *  rank, so that no layout changes it; for `batch` and `layers` a step goes forward twice, first to count. */
typedef struct ar_router_losses {
    ar_balance balance;
    double balance_weight; /* a: finite, from 0 */
    double z_loss;         /* z: finite, from 0 */
    double bias_update;    /* u: finite, from 0 */
} ar_router_losses;

/** Options of the softmax cross-entropy. The loss of a token with the logits z of V classes and the label y is
 *    loss = (1 - e)*(lse - z_y) + e*(lse - mean over v of z_v) + c*lse^2,  lse = log(sum over v of exp(z_v)),
 *  and that of the batch the mean over its T targets, so dz_v = (p_v*(1 + 2*c*lse) - (1 - e)*[v = y] - e/V)/T, p =
 *  softmax(z). All zero: the cross-entropy alone. numerics.md, section 4, has the roundings. Sources: e: Szegedy et al.
 *  2016, arXiv:1512.00567, section 7, as in PyTorch's cross_entropy(label_smoothing=e).
 *           c: Chowdhery et al. 2022 (PaLM), arXiv:2204.02311, section 5, where it is 1e-4. */
typedef struct ar_loss_options {
    double label_smoothing; /* e: from 0 to below 1 */
    double z_loss;          /* c: finite, from 0 */
    ar_router_losses router;
} ar_loss_options;

AR_END_DECLS
#endif

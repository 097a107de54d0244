/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_BATCH_H
#define ANYRANK_BATCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "anyrank/status.h"

AR_BEGIN_DECLS

#define AR_IGNORE_INDEX (-100) /* a label that does not count, as in PyTorch */
#define AR_SAMPLE_DIMS 3       /* most dimensions of a sample of numbers */
#define AR_MAX_MTP 8           /* most depths of multi-token prediction (MTP); depth k predicts token i + k + 1 */

/** A batch of samples in host memory: the global batch of a step, or some of its rows. It does not own its arrays. b =
 *  batch, s = seq in the shapes. A sample (a sequence of tokens, or a tensor of numbers) is one row. */
typedef struct ar_batch {
    size_t batch, seq;           /* samples; tokens of each sample */
    const int64_t *input_ids;    /* token ids [b, s], each in [0, vocab) */
    const int64_t *labels;       /* [b, s]; NULL: input_ids. Position i predicts labels[i+1]; labels of AR_IGNORE_INDEX
                                    and the last position of each document do not count. For a classifier (loss.h): one
                                    class for each row of logits, not shifted */
    const int64_t *position_ids; /* [b, s], each in [0, max_positions); NULL: 0, 1, .. from the start of each row, or of
                                    each document where documents is set. Rotary and learned positions use them; masks
                                    and sliding windows use the index in the row */
    const int32_t *documents;    /* [b, s]: number 0, 1, .. of the packed document, within its row, that each position
                                    belongs to; NULL: each row is one document. Attention does not cross documents, and
                                    a document's last position predicts nothing */
    bool targets_cross;          /* a document's last position predicts the next document's first label, as
                                    transformers' models do */
    const uint8_t *padding_mask; /* [b, s]: 0 masks the position as a key, 1 does not; NULL: no padding */
    const float *additive_mask;  /* [mask_batch, mask_heads, s, s], added to scores; -inf masks; NaN, +inf: errors;
                                    NULL: none */
    size_t mask_batch;           /* b or 1 */
    size_t mask_heads;           /* query heads or 1 */
    /* Where these rows are in the step's global batch, of which each rank and micro-batch has some rows. */
    size_t global_batch; /* samples of the global batch; 0: these rows; first_sample and targets are then ignored */
    size_t first_sample; /* index of row 0 in the global batch */
    size_t distinct;     /* samples of the global batch of which those after them are copies, one after the other, with
                            the same random numbers; 0: all of it */
    size_t targets;      /* T, the number of targets of the global batch, by which loss and gradients are divided */
    size_t mtp_targets[AR_MAX_MTP]; /* [k-1]: the number of targets that multi-token prediction has at depth k */
    size_t longest; /* 1 + the largest position id of the global batch, for RoPE frequencies that depend on the length;
                       0: computed from these rows */
    size_t tokens;  /* tokens of the global batch that padding_mask does not mask; 0: computed from these rows */
    /* For modules whose input is numbers instead of token ids; zero otherwise. */
    const float *input;                  /* [b, sample_shape..]; NULL: none */
    int sample_ndim;                     /* 1 .. AR_SAMPLE_DIMS */
    size_t sample_shape[AR_SAMPLE_DIMS]; /* of one sample; [sample_ndim] */
    const float *target;                 /* [b, target_width]: regression targets; NULL: none */
    size_t target_width;                 /* regression targets of a sample */
} ar_batch;

/* The auxiliary load-balancing loss of a mixture-of-experts router, by the tokens that its mean is over. */
typedef enum ar_balance {
    AR_BALANCE_NONE,     /* no balancing loss */
    AR_BALANCE_SEQUENCE, /* each sequence, each layer by itself */
    AR_BALANCE_BATCH,    /* the step's global batch, each layer by itself */
    AR_BALANCE_LAYERS,   /* the step's global batch, all layers together */
    AR_BALANCES
} ar_balance;
/** Options of the auxiliary losses of mixture-of-experts routers, which are added to the loss. A layer has E experts, k
 *  of them for each token; p [T, E] is the router's softmax, n_i the number of tokens routed to expert i, a constant
 *  for the gradient. For routers with softmax scores:
 *
 *    sequence  mean over the sequences of  a*E/(k*S^2) * sum over i of n_i * sum over t of p_ti      S: tokens of each
 *              (DeepSeek-AI 2024, arXiv:2412.19437, equations 17 to 20)
 *    batch     a*E/(k*T^2) * sum over i of n_i * sum over t of p_ti      T: tokens of the global batch
 *              (Fedus et al. 2021, arXiv:2101.03961, equation 4, over the global batch: Qiu et al. 2025,
 *              arXiv:2501.11873)
 *    layers    a*E/(L*T)^2 * sum over i of n_i * sum over t of p_ti      both sums also over the L layers with experts
 *              (load_balancing_loss_func of transformers)
 *    z-loss    z * mean over t of lse_t^2 (Zoph et al. 2022, arXiv:2202.08906, equation 5)
 *
 *  A router with sigmoid scores (ar_route_scores) has no such loss. After each step that updates weights its bias
 *  becomes
 *
 *    bias      b_i = fl32(b_i + u*sign(sum n - E*n_i)), n_i the tokens of the global batch that went to expert i
 *              (DeepSeek-AI 2024, section 2.1.2; sign(mean n - n_i) in integers)
 *
 *  Tokens that padding_mask masks do not count. All means are over a sequence or the global batch, never over a
 *  micro-batch or a rank's rows, so that the parallel layout does not change the loss. For `batch` and `layers` each
 *  step runs the forward pass twice: the first pass counts n_i. */
typedef struct ar_router_losses {
    ar_balance balance;    /* the balancing loss */
    double balance_weight; /* a: finite, >= 0 */
    double z_loss;         /* z: finite, >= 0 */
    double bias_update;    /* u: finite, >= 0 */
} ar_router_losses;

/** Options of the softmax cross-entropy. The loss of a token with logits z [V] and label y is
 *    loss = (1 - e)*(lse - z_y) + e*(lse - mean over v of z_v) + c*lse^2,  lse = log(sum over v of exp(z_v)),
 *  and the batch's loss is the mean over its T targets, so dz_v = (p_v*(1 + 2*c*lse) - (1 - e)*[v = y] - e/V)/T, p =
 *  softmax(z). All zero: plain cross-entropy. numerics.md, section 4, has the roundings. Sources: e: Szegedy et al.
 *  2016, arXiv:1512.00567, section 7, as in PyTorch's cross_entropy(label_smoothing=e).
 *           c: Chowdhery et al. 2022 (PaLM), arXiv:2204.02311, section 5, where it is 1e-4. */
typedef struct ar_loss_options {
    double label_smoothing;  /* e: in [0, 1) */
    double z_loss;           /* c: finite, >= 0 */
    ar_router_losses router; /* of models with experts */
} ar_loss_options;

AR_END_DECLS
#endif

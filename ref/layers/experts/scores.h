/* SPDX-License-Identifier: Apache-2.0 */
/* Scores of a router from its logits: a softmax's probabilities, or with groups (ar_route_scores) probabilities or
 * sigmoids, and the bias by which it chooses. */
#pragma once

#include "ref/layers/experts/balance.h"

/* Choices for the tokens of a pass: p [tokens, experts], and the experts and weights of the slots [tokens, k]. */
typedef struct ari_chosen {
    const ar_tensor *p, *expert, *weight;
} ari_chosen;

typedef struct ari_scores {
    ar_param bias; /* [E], frozen; without a device if a softmax router has no bias */
    ar_route_rule rule;
    const ari_balance *tokens; /* balance of the same router, which knows the tokens that count; borrowed */
    int64_t *counts;           /* [E] number of the step's tokens that went to each expert; NULL: the bias is
                                  constant. Owned */
} ari_scores;

/** Initialises a router's scores. name: of the module with the router; balance: of the same router, borrowed. Errors:
 *  AR_ERR_ARG (groups that do not fit E or k; losses, which need a softmax), those of ar_param_init. */
AR_NODISCARD ar_status ari_scores_init(ari_scores *s, ar_ctx *ctx, const ar_experts_options *o, const char *name,
                                       const ari_balance *balance);
void ari_scores_fini(ari_scores *s);
/** Puts the bias at out[at] if there is room. Returns how many there are. */
size_t ari_scores_params(ari_scores *s, ar_param **out, size_t cap, size_t index);
/** Computes `chosen` from the logits z, and for a softmax lse [tokens] unless its data is NULL. Errors: those of the
 *  device. */
AR_NODISCARD ar_status ari_scores_route(const ari_scores *s, ar_ctx *ctx, const ari_chosen *chosen,
                                        const ar_tensor *lse, const ar_tensor *z);
/** Writes dz from g, the gradient of the weights. Errors: those of the device. */
AR_NODISCARD ar_status ari_scores_backward(const ari_scores *s, ar_ctx *ctx, const ar_tensor *dz,
                                           const ari_chosen *chosen, const ar_tensor *g);
/** Counts the tokens of t that are not padding by their chosen experts. Counts only in the step's own forward passes,
 *  not in recomputed ones.
 *  Errors: those of the device, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_scores_count(ari_scores *s, ar_ctx *ctx, const ari_chosen *chosen,
                                        const ari_routed_tokens *t);

/* Functions for all expert modules below a module. */
/** The counts become zero. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_scores_zero(ar_module *m);
/** Updates the biases (ar_router_losses) from the counts after a step has changed the weights, zeroes the counts, and
 *  taps each bias. Collective over the context's groups. Errors: AR_ERR_MEMORY, those of the device and the
 *  communicators. */
AR_NODISCARD ar_status ari_scores_update(ar_module *m, ar_ctx *ctx);

/** Returns the scores of an expert module; NULL: another module, or a router without bias. */
ari_scores *ari_experts_scores(ar_module *m);

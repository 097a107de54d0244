/* SPDX-License-Identifier: Apache-2.0 */
/* Losses of a router (ar_router_losses): gradients of its logits from the number of tokens per expert and from the size
 * of the logits. */
#pragma once

#include "ref/layers/parts.h"

typedef struct ari_balance {
    ar_router_losses losses;
    size_t experts, per_token;
    bool spread;      /* the tensor-parallel ranks route different tokens */
    const char *name; /* name of the router; borrowed */
    int64_t *counts;  /* [experts]: tokens of the step's batch that go to each expert; NULL: counted for each
                         sequence, or not at all; owned */
    bool counted;     /* the counts are those of the running step */
    double divisor;   /* the loss multiplies p by a*E * counts / divisor */
    ar_param sum;     /* sum of the losses' terms, one per token */
} ari_balance;

/* A router's tokens in a pass. */
typedef struct ari_routed_tokens {
    const ar_tensor *expert; /* int32 [tokens, k] on the device */
    const ar_tensor *x;      /* the router's input [.., tokens, hidden] */
    const ar_batch *batch;
} ari_routed_tokens;

/** Initialises a balance. weight: for AR_BALANCE_LAYERS if the context's options balance nothing. b->name, experts,
 *  per_token and spread are set. Errors: AR_ERR_MEMORY, those of ari_loss_init. */
AR_NODISCARD ar_status ari_balance_init(ari_balance *b, ar_ctx *ctx, double weight);
void ari_balance_fini(ari_balance *b);
static inline bool ari_balance_needs_lse(const ari_balance *b)
{
    return b->losses.z_loss > 0.0;
}
/** Computes the losses' terms, and what their backward pass needs, from p [tokens, E] and lse [tokens], which it
 *  releases (data NULL: no z-loss). In a counting pass it counts tokens. Collective over the ranks that share a
 *  sequence. Errors: AR_ERR_ARG (the step should have counted before), those of the device and of the communicator,
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_balance_forward(ari_balance *b, ar_ctx *ctx, ar_saved *saved, const ar_tensor *p,
                                           ar_tensor *lse, const ari_routed_tokens *t);
/** Adds this rank's tokens that are not padding to counts [E], by expert. Errors: those of the device,
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_balance_tally(int64_t *counts, const ari_balance *b, ar_ctx *ctx,
                                         const ari_routed_tokens *t);
/** Adds the losses' gradient to dz. Errors: those of the device. */
AR_NODISCARD ar_status ari_balance_backward(const ari_balance *b, ar_ctx *ctx, ar_saved *saved, const ar_tensor *dz,
                                            const ar_tensor *p, const ari_routed_tokens *t);

/* Functions for all expert modules below a module. */
/** Finds out whether they have losses, count first, and are balanced together. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_balance_routers(ari_routers *r, ar_module *m);
/** Zeroes counts and terms. Errors: AR_ERR_MEMORY, those of the device. */
AR_NODISCARD ar_status ari_balance_zero(ar_module *m, ar_ctx *ctx);
/** Sums the counts over all ranks after a counting pass. Collective over the context's groups, and over its pipeline if
 *  all layers are balanced together. Errors: AR_ERR_MEMORY, AR_ERR_ARG (a layer then has another number of experts),
 *  those of the communicators. */
AR_NODISCARD ar_status ari_balance_share(ar_module *m, ar_ctx *ctx);
/** Computes the losses of all ranks' tokens, layer by layer. Collective over the context's groups, and over its
 *  pipeline if it has one. Errors: those of the device and the communicators, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_balance_value(ar_module *m, ar_ctx *ctx, double *value);

/** Returns the balance of an experts module; NULL: another module. */
ari_balance *ari_experts_balance(ar_module *m);

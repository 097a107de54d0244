/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_VERIFY_DIAGNOSE_REPLAY_EXPERTS_H
#define ARI_VERIFY_DIAGNOSE_REPLAY_EXPERTS_H

/* Experts computed again for the tokens of a probe, from the module's input, the weights of the routes and the experts'
 * own. Experts are gated by silu. */
#include "verify/diagnose/replay/search.h"

enum { ARI_OF_GATE, ARI_OF_UP, ARI_OF_DOWN, ARI_EXPERT_WEIGHTS };
enum { ARI_MOST_EXPERTS = 4096, ARI_MOST_SLOTS = 16, ARI_MOST_WEIGHT = 1 << 22 };

typedef struct ari_expert_slot {
    size_t expert, before; /* before: how many earlier tokens have the expert */
    double weight, share;  /* share: how much of it there is in the other's rows */
    double *y[3];          /* [cols]: what the expert makes of x; of weight * x; with gate and up exchanged */
} ari_expert_slot;

typedef struct ari_experts {
    ari_probe p;
    const ar_dump_tensor *(*of)[ARI_EXPERT_WEIGHTS]; /* [n]: the experts' weights */
    size_t n, width, cols;
    float *x, *weight;            /* [cols]: of the token that is looked at; [rows][n] */
    float *w[ARI_EXPERT_WEIGHTS]; /* of the expert that is looked at */
    double *act;                  /* [width] */
    ari_expert_slot at[ARI_PROBE_TOKENS][ARI_MOST_SLOTS];
    size_t slots[ARI_PROBE_TOKENS];
} ari_experts;

/** y = W2 (silu(W1 (scale x)) * W3 (scale x)); exchanged: W1 and W3 are. x and W are e->x and e->w. */
void ari_expert_run(double *y, ari_experts *e, double scale, bool exchanged);
/** The reference's value of a role, with so many elements, which the other dump has too as far as it has it; else NULL.
 *  Errors: those of reading. */
AR_NODISCARD ar_status ari_right_value(const ar_dump_tensor **t, const ari_case *c, ari_role role, size_t count);
/** Slots that have what an expert makes of another token; x: all tokens. Errors: those of reading, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_look_at_expert_rows(ari_trace *t, ari_experts *e, const ar_dump_tensor *x);

#endif

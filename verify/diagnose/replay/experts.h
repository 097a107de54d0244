/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A mixture of experts computed again for the tokens of a probe, from the module's input and the experts' weights. The
 * weights of a token's experts are the dump's routes; where no dump has these, they are found by least squares over
 * what all experts make of the input, and over a shared expert's output. Experts are gated by silu, gelu, its tanh form
 * or relu, or as GPT-OSS's are. */
#include "verify/diagnose/replay/search.h"

enum { ARI_OF_GATE, ARI_OF_UP, ARI_OF_DOWN, ARI_EXPERT_WEIGHTS };
enum { ARI_MOST_EXPERTS = 4096, ARI_MOST_SLOTS = 16, ARI_MOST_WEIGHT = 1 << 22 };
/* What an expert makes of x; of its weight times x; of x with gate and up exchanged, or read as halves of what has them
 * in turn, or the other way; without its last bias; with another function. */
typedef enum ari_made {
    ARI_OF_INPUT,
    ARI_OF_WEIGHTED,
    ARI_GATED_BY_UP,
    ARI_OF_HALVES,
    ARI_IN_TURN,
    ARI_WITHOUT_BIAS,
    ARI_BY_FUNCTION = 8, /* | ari_gating */
    ARI_TIMES_RANKS = 16 /* times how many ranks share the width out, of ARI_OF_HALVES */
} ari_made;
/* gate*sigmoid(gate)*up; GPT-OSS's differs in all three: the slope 1.702 of the sigmoid, 1 + up, limits of 7. */
typedef enum ari_gating { ARI_SLOPE = 1, ARI_PLUS_ONE = 2, ARI_LIMITED = 4, ARI_OPEN_WEIGHTS = 7 } ari_gating;

/* Parameters of the experts with one name: of all of them, or one of each. */
typedef struct ari_expert_leaf {
    const char *name; /* "w1", "gate_proj.weight" */
    size_t length, n, rows, cols;
    const ar_dump_tensor *of[ARI_MOST_EXPERTS];
} ari_expert_leaf;

/* Which leaf is what, and how it is stored. */
typedef struct ari_expert_form {
    size_t of[ARI_EXPERT_WEIGHTS]; /* gate and up are one leaf where they are packed */
    bool swapped;                  /* up is what its place says is gate */
    bool in_turn;                  /* packed: row by row, not one half after the other */
    bool in_out;                   /* [in, out] */
    unsigned gating;               /* ari_gating */
    size_t function;               /* of gate, ari_activation_of's, where gating is 0 */
} ari_expert_form;

/* How much of an expert's output there is in a token's row, of the reference and of the other dump. */
typedef struct ari_expert_term {
    size_t expert; /* n: the shared one */
    double was, is;
} ari_expert_term;

typedef struct ari_experts {
    ari_probe p;
    float *input;                                                       /* [rows][cols] */
    ari_expert_leaf leaf[ARI_EXPERT_WEIGHTS], bias[ARI_EXPERT_WEIGHTS]; /* biases, where there are any: as many */
    ari_expert_form form;
    size_t leaves, biases, n, width, cols, most;
    float *weight;                     /* [rows][n] of the routes; NULL: no dump has them */
    float *stored[ARI_EXPERT_WEIGHTS]; /* by leaf, of one expert: its weight, and behind that its bias */
    float *w[ARI_EXPERT_WEIGHTS]; /* gate and up [width, cols + 1], down [cols, width + 1]: a row of the weight and its
                                   * bias */
    const float *x;               /* [cols]: a token's input */
    ari_expert_term *term;        /* [tokens][most]: those that the routes choose, or all */
    size_t terms[ARI_PROBE_TOKENS];
    double *y[2];                     /* [tokens][most][cols]: of the input, and another one */
    double *act, *equations, *number; /* [width or cols]; [most + 1][most + 1]; [2][most + 1] */
    double near;                      /* numbers that differ by less than this share are equal */
} ari_experts;

/** The share of squares that right rows may leave where the routes are known: no more than rounding, as of bf16. */
static inline double ari_expert_rounding(const ari_experts *e)
{
    const double relative = e->p.c->relative;
    return fmin(fmax(ARI_REPLAY_EXACT, relative * relative), ARI_REPLAY_BASE);
}
/** True if a token has some of an expert's output: `share` of it, where the reference has `was`. */
bool ari_expert_is_there(const ari_experts *e, double share, double was);
AR_NODISCARD ar_status ari_expert_read(ari_experts *e, size_t expert);
/** y [cols] of e->x and e->w. weight: of the token's. */
void ari_expert_run(double *y, const ari_experts *e, unsigned made, double weight);
/** States what the numbers of the terms show, of which both dumps' rows are sums; true if the routed experts' alone are
 *  others, and nothing is stated. Errors: those of reading, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_look_at_expert_shares(ari_trace *t, bool *others, const ari_experts *e);
/** Experts that have another token's row. Errors: those of reading, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_look_at_expert_rows(ari_trace *t, ari_experts *e);
/** True for a tensor of a module within the case's own. */
bool ari_is_within(const ari_case *c, const ar_dump_tensor *t);

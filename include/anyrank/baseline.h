/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_BASELINE_H
#define ANYRANK_BASELINE_H

#include "anyrank/arch.h"
#include "anyrank/batch.h"
#include "anyrank/optimizer.h"

AR_BEGIN_DECLS

/* The baseline: an independent implementation of the models with plain loops and without sharding, which shares no
 * kernels with the parallel code and serves as its reference. */
/* Arithmetic of the baseline. */
typedef enum ar_number_mode {
    AR_MODE_EXACT, /* exact numerics (numerics.md), for bit-for-bit comparison with parallel runs */
    AR_MODE_FP32,  /* fp32, sums added from first to last */
    AR_MODE_F64    /* binary64; nothing is rounded to fp32, RoPE tables included */
} ar_number_mode;

/** Callback that receives each tensor of a run, in execution order. pass: 'i' initial parameter, 'f' forward, 'b'
 *  backward, 'g' gradient of a parameter, 'c' gradient norm for clipping, 'n' updated parameter, 'm' and 'v' the
 *  optimizer's moments. values: row-major binary64 numbers, valid during the call; in modes EXACT and FP32 they are
 *  fp32 values. Parameters and gradients have Hugging Face names and shapes, activations those of models.md. The run
 *  ends with the returned status if it is not AR_OK. */
typedef ar_status (*ar_baseline_emit)(void *user, const char *name, char pass, int ndim, const size_t *shape,
                                      const double *values);

/** Callback that returns a parameter's initial value by its Hugging Face name: `count` fp32 values, row-major, valid
 *  until the run returns. If it returns NULL the run fails. */
typedef const float *(*ar_baseline_weights)(void *user, const char *name, size_t count);

/** Unit round-offs of the simulated rounding errors of a run with noise (ar_baseline_options.noise_seed), by the kind
 *  of value that is rounded: 2^-24 for fp32, 2^-11 for TF32 and fp16, 2^-8 for bf16; 0: not rounded. A parameter or
 *  operand that is representable with that precision is not changed. */
typedef struct ar_noise_units {
    double weight;  /* parameters, rounded once */
    double operand; /* operands of matrix products */
    double product; /* results of matrix products; gradients of matrices and biases */
    double branch;  /* results of operations between two products: RoPE, scores, probabilities, activations, dropout */
    double stream;  /* results of other operations, embeddings, residual sums, norms, and the gradients of all these */
    double inner;   /* intermediate results: additions of a sum, steps of a norm; the loss, clipping and updates */
} ar_noise_units;

/** Options of ar_baseline_run. */
typedef struct ar_baseline_options {
    ar_number_mode mode;         /* the arithmetic */
    bool bf16;                   /* AR_MODE_EXACT: activations, their gradients and matrices are rounded to bf16 */
    uint64_t seed;               /* of fresh weights and dropout masks */
    ar_baseline_weights weights; /* NULL: weights are initialised from seed and parameter name */
    void *weights_user;          /* first argument of weights */
    ar_baseline_emit emit;       /* NULL: none */
    void *emit_user;             /* first argument of emit, frozen, begin_step, doubt, kink and kink_slope */
    bool forward_only;           /* no backward pass */
    bool
        digests; /* of more than 2,048 keys, probabilities and their gradients are emitted as digests of their rows, [b,
                     heads, queries, 2] (probs_rows); else, as above, not at all */
    double dropout;       /* probability in [0, 1) */
    ar_loss_options loss; /* of models with logits */
    /* Number of training steps; 0: one forward and backward pass without update. With steps > 0 `batch` and `loss` of
     * ar_baseline_run are arrays of `steps`, and each step emits after its gradients "grad_norm" (pass 'c', if clip >
     * 0) and for each parameter, in order of first use, the new value ('n') and the optimizer's moments ('m', 'v'). */
    int steps;
    ar_optimizer_options optimizer; /* with steps > 0 */
    double clip;                    /* largest gradient norm; 0: no clipping */
    /* Callback that returns true if a parameter is frozen in step 1, 2, .. (1 if steps is 0): it then has no gradient,
     * does not count in the gradient norm, and neither it nor its moments are updated. NULL: no parameter is frozen. */
    bool (*frozen)(void *user, const char *name, int step);
    /* Callback before each step 1, 2, .. (1 if steps is 0) and before initial parameters are emitted; NULL: none. */
    void (*begin_step)(void *user, int step);
    /* AR_MODE_F64 only. Not 0: simulates rounding. Wherever an arithmetic with the unit round-offs `noise` would round,
     * a random error within the bound of numerics.md, section 7, is added; the seed determines the errors. */
    uint64_t noise_seed;
    ar_noise_units noise; /* all 0: those of fp32, which rounds neither parameters nor operands */
    /* With noise: callback that returns further possible errors of a parameter's update, [count], one per element,
     * valid until the run returns, or NULL for none; a random fraction of them is added. For Adam, where a gradient of
     * uncertain sign makes an update uncertain. NULL: none. */
    const float *(*doubt)(void *user, const char *name, int step, size_t count);
    /* AR_MODE_F64: callback that returns how far rounding may move the argument x of a function with a kink at 0
     * (ReLU). Elements with |x| up to this distance get their slope from kink_slope; negative: none do. argument,
     * gradient: emitted names of x (pass 'f') and of its gradient ('b'). Called before this gradient is emitted. NULL:
     * none. */
    double (*kink)(void *user, const char *argument, const char *gradient, int step);
    double (*kink_slope)(void *user, size_t element); /* returns the slope to use for this element of the gradient */
    int threads; /* that compute values which do not depend on one another; 0: one. None computes a sum with another */
    bool (*progress)(void *user, double fraction); /* callback between layers; false ends the run; NULL: none */
    void *progress_user;                           /* first argument of progress */
} ar_baseline_options;

/** Runs the forward pass, loss and backward pass of a model on a global batch, or `steps` training steps on as many
 *  batches, and writes the loss of each step to *loss (fp32 values in modes EXACT and FP32; unchanged on error).
 *  Without targets (T = 0) the loss is NaN and gradients are +0. Infinite weights are allowed and may give NaN. Borrows
 *  all arguments until return. Memory: 8 bytes per parameter and per activation, of which probabilities only up to 2,048
 *  tokens, and two operands of a product; training adds 8 bytes per parameter for gradients and 8 (momentum) or 16 (Adam)
 *  for moments.
 *  Threads: several runs may run at once; each calls its callbacks on its own thread. Errors: AR_ERR_ARG (also a
 *  sequence longer than max_positions, invalid optimizer options), AR_ERR_DATA (ids out of range, NaN in weights or
 *  mask, a gradient norm to clip that is not finite; the message names the tensor), AR_ERR_NOT_FOUND (a weight),
 *  AR_ERR_UNSUPPORTED (a config that models.md does not cover), AR_ERR_MEMORY, AR_ERR_OVERFLOW (also more elements than
 *  dropout can number), AR_ERR_ABORTED (progress returned false), the status that emit returned. */
AR_NODISCARD ar_status ar_baseline_run(const ar_config *c, const ar_baseline_options *o, const ar_batch *batch,
                                       double *loss);

AR_END_DECLS
#endif

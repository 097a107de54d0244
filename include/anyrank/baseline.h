/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_BASELINE_H
#define ANYRANK_BASELINE_H

#include "anyrank/batch.h"
#include "anyrank/config.h"
#include "anyrank/optimizer.h"

AR_BEGIN_DECLS

/* The independent, non-parallel baseline: plain loops, no sharding, no threads, no kernels of the product. */
typedef enum ar_number_mode {
    AR_MODE_EXACT, /* every sum an integer sum: what N ranks are compared with, bit for bit */
    AR_MODE_FP32,  /* fp32, sums from first to last */
    AR_MODE_F64    /* binary64 throughout, nothing rounded to fp32 (RoPE's tables included) */
} ar_number_mode;

/** One tensor of a run. pass: 'i' initial parameter, 'f' forward, 'b' backward, 'g' gradient of a parameter, 'c'
 * clipping, 'n' new value of a parameter, 'm' and 'v' the moments behind it. values: row-major binary64, borrowed
 * during the call; in the exact and fp32 modes every value is an fp32 value. Parameters and gradients have the Hugging
 * Face name and shape; activations as models.md lists them. Called in execution order. A status other than AR_OK
 * ends the run with it. */
typedef ar_status (*ar_baseline_emit)(void *user, const char *name, char pass, int ndim, const size_t *shape,
                                      const double *values);

/** Given weights: looked up by Hugging Face name. Returns NULL for a name it does not have (the run then fails), else
 *  `count` fp32 values, row-major, borrowed until the run returns. */
typedef const float *(*ar_baseline_weights)(void *user, const char *name, size_t count);

/** Unit round-offs of the errors that a run with noise makes, by what makes them: 2^-24 in fp32, 2^-11 in TF32 and
 * fp16, 2^-8 in bf16; 0: none. A parameter or an operand that has as few bits already is not touched. */
typedef struct ar_noise_units {
    double weight;  /* parameters, once */
    double operand; /* what enters a product */
    double
        product; /* what leaves one, and what is computed for each parameter from one: gradients of matrices, biases */
    double
        branch; /* results of operations between two products: rotation, scores, probabilities, activation, dropout */
    double
        stream;   /* results of the others: embeddings, residual sums, norms; gradients of these and of their weights */
    double inner; /* within an operation: a sum's additions, a norm's steps; the loss; clipping and updates */
} ar_noise_units;

typedef struct ar_baseline_options {
    ar_number_mode mode;
    bool bf16;     /* AR_MODE_EXACT: activations, matrices and the gradients of the former are bf16 numbers */
    uint64_t seed; /* of fresh weights */
    ar_baseline_weights weights; /* NULL: fresh weights by name */
    void *weights_user;
    ar_baseline_emit emit; /* NULL: nobody listens */
    void *emit_user;
    bool forward_only;
    double dropout;       /* probability, below 1; 0: none. Masks come from `seed` too */
    ar_loss_options loss; /* of a model with logits */
    /* Training. steps 0: one forward and backward, no update. Else that many steps: `batch` and `loss` of
     * ar_baseline_run are arrays of `steps`, and after each step's gradients come the clipping ("grad_norm", pass 'c',
     * where clip is set) and of every parameter, in the order of first use, the new value (pass 'n') and the moments
     * that the optimizer keeps ('m', 'v'). Optimizer options are
     * those that ari_optimizer_check takes. */
    int steps;
    ar_optimizer_options optimizer;
    double clip; /* largest gradient norm; 0: no clipping */
    /* NULL, or whether a parameter is frozen in a step (1, 2, ..; with steps 0: 1): it has no gradient, which the norm
     * does not count, and neither it nor its moments change. Called with emit_user. */
    bool (*frozen)(void *user, const char *name, int step);
    void (*begin_step)(void *user, int step); /* NULL, or called with emit_user before each step: 1, 2, .. (with steps
                                                 0: 1), the first time before the initial parameters */
    /* AR_MODE_F64 only: not 0: every rounding that an arithmetic with these unit round-offs would make is made as a
     * random error of the size that numerics.md, section 7, bounds; another seed, other errors. */
    uint64_t noise_seed;
    ar_noise_units noise; /* all 0: fp32's, which rounds neither parameters nor operands */
    /* With noise: NULL, or how far the update of a step may be off each element of a parameter beside what its own
     * rounding does (Adam's, of a gradient whose sign is in doubt): `count` values or NULL for none, borrowed until the
     * run returns. Each weight is moved by a random part of it. Called with emit_user. */
    const float *(*doubt)(void *user, const char *name, int step, size_t count);
    /* AR_MODE_F64: NULL, or how far the argument of a function with a kink (relu) may be off its value, by the names of
     * the argument (pass 'f') and of its gradient ('b'); negative: no matter how near to the kink. Nearer arguments get
     * their slope from `kink_slope`. Called with emit_user before the gradient is emitted. */
    double (*kink)(void *user, const char *argument, const char *gradient, int step);
    double (*kink_slope)(void *user, size_t element); /* of the gradient */
    bool (*progress)(void *user, double fraction);    /* NULL, or called between layers; false ends the run */
    void *progress_user;
} ar_baseline_options;

/** Forward, loss and backward of a whole model on one batch, or that many training steps; a batch is always the global
 *  one. *loss: fp32-valued in exact and fp32 modes; untouched on error. Without a target (T = 0) the loss is NaN and
 * gradients are +0. Infinite weights pass, and make what depends on them NaN. Memory: borrows all arguments until
 * return. Takes 8 bytes a parameter, 8 an activation, and 72 an element of a band of 256 rows of one gradient. Training
 * takes 8 bytes a parameter more for the gradients, 8 (momentum) or 16 (Adam) for the moments. Threads: safe; the run
 * is one thread's, and emit, weights and progress are called on it. Errors: AR_ERR_ARG (also a sequence longer than
 * max_positions), AR_ERR_DATA (ids out of range, NaN in weights or mask, a gradient norm to clip that is not finite;
 * names which), AR_ERR_NOT_FOUND (a weight), AR_ERR_UNSUPPORTED (a config that models.md has no names for),
 * AR_ERR_MEMORY, AR_ERR_OVERFLOW (also elements that dropout cannot number), AR_ERR_ABORTED (progress returned false),
 * and what emit returned. */
AR_NODISCARD ar_status ar_baseline_run(const ar_config *c, const ar_baseline_options *o, const ar_batch *batch,
                                       double *loss);

AR_END_DECLS
#endif

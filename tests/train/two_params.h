/* SPDX-License-Identifier: Apache-2.0 */
/* A matrix sharded by rows and a replicated vector, for tests of what updates them. */
#pragma once

#include "anyrank/train.h"
#include "ref/core/tensor_private.h"
#include "ref/layers/param_private.h"
#include "support/bits.h"
#include "support/rank_run.h"
#include "tests/support/scoped.h"

enum { ROWS = 8, COLS = 3, MATRIX = ROWS * COLS, VECTOR = 5, STEPS = 5, MOST_RANKS = 4 };

/* Values of both, complete. */
typedef struct two_values {
    float matrix[MATRIX], vector[VECTOR];
} two_values;

static inline two_values two_values_of(unsigned matrix_seed, unsigned vector_seed, double range)
{
    two_values v;
    fill_values(v.matrix, MATRIX, matrix_seed, range);
    fill_values(v.vector, VECTOR, vector_seed, range);
    return v;
}

/* Where this rank's rows of the matrix begin in the complete one. */
static inline size_t own_rows(const ar_ctx *ctx)
{
    return MATRIX / ranks_of(ctx) * rank_of(ctx);
}

/* Makes these the gradient's values on this rank. */
static inline ar_status set_gradient(ar_ctx *ctx, ar_param *p, const float *values)
{
    AR_TRY(ari_param_zero_grad(p, ctx));
    return rank_add_gradient(ctx, p, values);
}

typedef ar_status (*two_params_fn)(ar_ctx *ctx, void *user, ar_param *matrix, ar_param *vector);

/* Calls fn with the two, which begin with `start`, complete on every rank. */
static inline ar_status with_two_params(ar_ctx *ctx, const two_values *start, two_params_fn fn, void *user)
{
    const size_t shape[2] = {ROWS, COLS}, length = VECTOR;
    const int r = (int)rank_of(ctx), n = (int)ranks_of(ctx);
    SCOPED(ar_param_fini) ar_param matrix = {0}, vector = {0};
    ar_layout layout;
    AR_TRY(ar_layout_shard(&layout, 2, shape, 0, r, n));
    AR_TRY(ar_param_init(&matrix, ctx, "matrix", &layout, false));
    AR_TRY(ari_layout_replicate(&layout, 1, &length, r, n));
    AR_TRY(ar_param_init(&vector, ctx, "vector", &layout, false));
    AR_TRY(ar_param_set(&matrix, ctx, start->matrix));
    AR_TRY(ar_param_set(&vector, ctx, start->vector));
    return fn(ctx, user, &matrix, &vector);
}

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/arith.h"
#include "anyrank/context.h"
#include "anyrank/run.h"

enum { RANK_PARAMS = 10 };

/* What one simulated rank does, on its own thread: it returns its status and never asserts; results go through `user`
 * into memory of its own (rank r's), which the main thread looks at after the join. */
typedef ar_status (*rank_fn)(ar_ctx *ctx, void *user);

/** Runs fn on the simulated ranks of a run's layout, each with a device, of one thread on the CPU, and a context of its
 *  own. The first rank's error, with its message in ar_error_message. */
AR_NODISCARD ar_status rank_run(const ar_run *run, rank_fn fn, void *user);
/** What a rank may do: nothing. */
ar_status rank_nothing(ar_ctx *ctx, void *user);
/** The same with somebody who listens; tap_user: [ranks]. */
AR_NODISCARD ar_status rank_run_heard(const ar_run *run, ar_tap_fn tap, void **tap_user, rank_fn fn, void *user);

/** This rank of the context's tensor-parallel group, and how many there are. */
size_t rank_of(const ar_ctx *ctx);
size_t ranks_of(const ar_ctx *ctx);
/* A rank's parameters, and the list of them; SCOPED(rank_params_end) after rank_params_begin. */
typedef struct rank_params {
    ar_param at[RANK_PARAMS];
    ar_param *all[RANK_PARAMS];
} rank_params;
void rank_params_begin(rank_params *p);
/** Also of those that were never initialised. */
void rank_params_end(rank_params *p);
/** A fresh tensor of the step with these values. */
AR_NODISCARD ar_status rank_upload(ar_ctx *ctx, ar_tensor *t, int ndim, const size_t *shape, const float *values);
/** Adds values, as many as this rank holds, to a parameter's gradient; and reads what is there. */
AR_NODISCARD ar_status rank_add_gradient(ar_ctx *ctx, ar_param *p, const float *values);
AR_NODISCARD ar_status rank_read_gradient(ar_ctx *ctx, float *out, const ar_param *p);

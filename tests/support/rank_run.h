/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/arith.h"
#include "anyrank/context.h"
#include "anyrank/device.h"
#include "anyrank/sim.h"

/* What one simulated rank does, on its own thread: it returns its status and never asserts; results go through `user`
 * into memory of its own (rank r's), which the main thread looks at after the join. */
typedef ar_status (*rank_fn)(ar_ctx *ctx, void *user);

typedef struct rank_run_options {
    int ranks;        /* all of them */
    int dp;           /* data-parallel ranks among them, tensor-parallel ones being neighbours; 0: one */
    int dp_replicate; /* of ar_parallel */
    int cp, cp_inner; /* context-parallel ranks among them, as in ar_parallel; 0: one */
    bool zigzag;
    int pp, virtual_stages; /* pipeline ranks among them, furthest apart; 0: one */
    bool sp, keep_gathered;
    int overlap; /* of ar_ctx_options */
    double dropout;
    uint64_t seed; /* of its masks */
    ar_loss_options loss;
    ar_numerics numerics;
    ar_precision precision; /* of the native ones */
    ar_dtype storage;       /* of the weights' matrices; 0: fp32 */
    ar_declared_check placements;
    ar_fault fault;
    ar_sim_algorithm algorithm;
    const ar_sim_cluster *cluster; /* of virtual time; NULL: none */
    ar_device_choice device;       /* of every rank; zero: the CPU */
    uint64_t schedule;             /* the seed of an explored schedule; 0: the system's */
    ar_tap_fn tap;                 /* NULL: nobody listens */
    void *const *tap_user;         /* [ranks] */
} rank_run_options;

/** Runs fn on `ranks` simulated ranks, each with a device, of one thread on the CPU, and a context of its own. The
 *  first rank's error, with its message in ar_error_message. */
AR_NODISCARD ar_status rank_run(const rank_run_options *o, rank_fn fn, void *user);

/** This rank of the context's tensor-parallel group, and how many there are. */
size_t rank_of(const ar_ctx *ctx);
size_t ranks_of(const ar_ctx *ctx);
/** A fresh tensor of the step with these values. */
AR_NODISCARD ar_status rank_upload(ar_ctx *ctx, ar_tensor *t, int ndim, const size_t *shape, const float *values);
/** Adds values, as many as this rank holds, to a parameter's gradient; and reads what is there. */
AR_NODISCARD ar_status rank_add_gradient(ar_ctx *ctx, ar_param *p, const float *values);
AR_NODISCARD ar_status rank_read_gradient(ar_ctx *ctx, float *out, const ar_param *p);

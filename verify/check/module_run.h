/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_VERIFY_CHECK_MODULE_RUN_H
#define ARI_VERIFY_CHECK_MODULE_RUN_H

#include "anyrank/check_module.h"

/* What every rank of a module's check does. Ranks share it; each writes only what is its own. */
typedef struct ari_module_run {
    const ar_module_case *c;
    const ar_check_module_options *o;
    ar_parallel parallel;
    const ar_batch *batch;                /* [max(steps, 1)] */
    float *loss;                          /* [max(steps, 1)], rank 0's to write */
    size_t parameters, parameter_tensors; /* rank 0's to write: elements of the full tensors */
} ari_module_run;

/** The body of ari_cluster_options; user: the ari_module_run. */
AR_NODISCARD ar_status ari_module_run_rank(void *user, ar_ctx *ctx);
/** Refuses what no check of modules takes; name: the module's. Errors: AR_ERR_ARG, AR_ERR_UNSUPPORTED. */
AR_NODISCARD ar_status ari_module_run_check(const ar_run *r, const char *name);
/** Builds the module and the loss of a case, and gives the parameters their first values. On error both are NULL. */
AR_NODISCARD ar_status ari_module_build(const ar_module_case *c, uint64_t seed, ar_ctx *ctx, ar_module **module,
                                        ar_loss **loss);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_RUN_RUN_H
#define ARI_RUN_RUN_H

#include "anyrank/run.h"

/* What every run starts with. */

/** Forward and backward passes of a run: at least the one without an update. */
static inline size_t ari_run_steps(const ar_run *r)
{
    return r->steps > 1 ? (size_t)r->steps : 1;
}
/** Where the model lies, and its config. Errors: those of ar_model_path and ar_config_load. */
AR_NODISCARD ar_status ari_run_config(ar_config *c, char *folder, size_t cap, const char *model);
/** The part of ar_run_check that needs no model: of training. name: the model's, or a module's. Errors: AR_ERR_ARG. */
AR_NODISCARD ar_status ari_run_check_training(const ar_run *r, const char *name);
/** Refuses a sequence of `seq` tokens that has no positions in the model, or rotary angles of 2^20 and more, for which
 *  sine and cosine are not defined (docs/numerics.md): the baseline would compute NaN and every rank stop. Only a
 *  rope_theta below 1 or a very long sequence has them. Errors: AR_ERR_SHAPE, AR_ERR_CONFIG. */
AR_NODISCARD ar_status ari_run_check_positions(const ar_config *c, size_t seq);
/** Refuses low precision where the numerics are exact. Errors: AR_ERR_ARG. */
AR_NODISCARD ar_status ari_run_check_numerics(const ar_run *r);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_VERIFY_CHECK_CHECK_BASE_H
#define ARI_VERIFY_CHECK_CHECK_BASE_H

#include "anyrank/check.h"
#include "run/run.h"
#include "verify/reference/reference.h"

/* What the layouts of a check are compared with: the model, its input, and what the baseline made of them. One serves
 * any number of layouts, faults and ways to sum gradients up. */
typedef struct ari_check_base {
    ar_config config;
    ari_weights *weights; /* NULL: fresh */
    int64_t *ids;
    ar_batch *batch; /* [steps, at least 1], global */
    ari_reference ref;
    float *loss;             /* [steps, at least 1] */
    double max_error_vs_f64; /* as in ar_check_report */
    double seconds;          /* of the baseline */
} ari_check_base;

/** Reads weights and text and runs the baseline; layouts and faults are not looked at, options not checked. `folder`:
 *  where the config came from. Gives; ari_check_base_fini, also after a failure. Errors: those of reading, of the
 *  baseline, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_check_base_init(ari_check_base *b, const ar_check_options *o, const ar_config *c,
                                           const char *folder);
void ari_check_base_fini(ari_check_base *b);
/** Runs one layout as o says, under as many schedules as it asks for, and compares it. o: as ari_check_base_init had
 *  it, but for what is said above. Gives *run; ari_check_run_fini, also after a failure. Errors: those of
 *  ari_check_run. */
AR_NODISCARD ar_status ari_check_base_run(ar_check_run *run, const ari_check_base *b, const ar_check_options *o,
                                          const ar_parallel *p);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_VERIFY_FAULTS_FAULT_CASE_H
#define ARI_VERIFY_FAULTS_FAULT_CASE_H

#include "verify/check/check_base.h"

/* Where an injectable fault matters: a bundled model, a layout and a step in which it changes something; or a module
 * (ari_fault_module_check). Small, so that all of them run in a minute. What a fault looks like there is not known
 * here. */
typedef struct ari_fault_case {
    ar_fault fault;
    ar_run run;  /* its fault, plan and optimizer are not looked at */
    bool module; /* no model: the name is for reports alone */
    ar_mlp_order order;
} ari_fault_case;

/** The case of a fault; not of AR_FAULT_NONE. */
ari_fault_case ari_fault_case_of(ar_fault fault);
/** Whether two cases run the same, but for the fault. */
bool ari_fault_case_alike(const ari_fault_case *a, const ari_fault_case *b);
/** The case's config and plan; not of a module. Errors: those of reading the model. */
AR_NODISCARD ar_status ari_fault_case_load(ar_config *c, ar_plan *plan, const ari_fault_case *f);

/* Baselines that cases share: those of one model, batch, steps, clipping and dropout have one. As many are kept as were
 * used last. */
enum { ARI_FAULT_BASES = 4 };
typedef struct ari_fault_bases {
    int threads; /* 0: the machine's cores */
    uint64_t seed;
    ar_numerics numerics; /* of all but modules, which run in the exact ones */
    ar_precision precision;
    struct ari_fault_base *base[ARI_FAULT_BASES]; /* the one used last first; NULL: none yet */
} ari_fault_bases;

/** Compares a run of the case with `fault`, or AR_FAULT_NONE for the clean one. Gives *run; ari_check_run_fini, also
 *  after a failure. Errors: those of reading the model, of ari_check_base_init and ari_check_base_run. */
AR_NODISCARD ar_status ari_fault_case_run(ar_check_run *run, ari_fault_bases *bases, const ari_fault_case *f,
                                          ar_fault fault);
void ari_fault_bases_fini(ari_fault_bases *bases);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_VERIFY_FAULTS_FAULT_MODULE_H
#define ARI_VERIFY_FAULTS_FAULT_MODULE_H

#include "anyrank/check_module.h"
#include "verify/faults/fault_case.h"

/** Compares a module under the case's layout with the same on one rank: y = x W^T beside a matrix that it has and does
 *  not use, with squared errors. Where the case takes means over dp the module's gradients are those of a loss that
 *  each rank divides by its own samples, so that their mean is the one rank's: dp = 2, which leaves every bit. `fault`
 *  is on in the layout. Gives; ar_check_module_report_destroy. Errors: those of ar_check_module. */
AR_NODISCARD ar_status ari_fault_module_check(ar_check_module_report **gives, const ari_fault_case *f, ar_fault fault,
                                              int threads, uint64_t seed);

#endif

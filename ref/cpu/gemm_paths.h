/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CPU_GEMM_PATHS_H
#define ARI_CPU_GEMM_PATHS_H

#include "anyrank/device.h"

/* How the CPU makes the integer sums of an exact contraction: in binary64, which every processor has, or with AVX-512
 * IFMA. The same bits either way. */
typedef enum ari_exact_choice { ARI_EXACT_PORTABLE, ARI_EXACT_IFMA } ari_exact_choice;

#define ARI_EXACT_VARIABLE "ANYRANK_EXACT_PATH"

/** What a device created now would use: the fastest by CPUID, or what the environment variable ANYRANK_EXACT_PATH
 *  ("portable" or "ifma") forces. Errors, with the choice by CPUID in *choice: AR_ERR_ARG (another value),
 *  AR_ERR_UNSUPPORTED ("ifma" on a processor without it). */
AR_NODISCARD ar_status ari_exact_choose(ari_exact_choice *choice);
const char *ari_exact_name(ari_exact_choice choice);
/** Puts the chosen path's functions into a device's table. */
void ari_exact_fill(ar_device_ops *ops, ari_exact_choice choice);

#endif

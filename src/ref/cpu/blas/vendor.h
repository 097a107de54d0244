/* SPDX-License-Identifier: Apache-2.0 */
/* Differences between libraries that have CBLAS: openblas.c, mkl.c or other.c. */
#pragma once

#include "ref/cpu/blas/blas.h"

/** Before a call: the library is to compute it in the calling thread. Gives what the second function takes after it. */
int ari_blas_alone(void);
void ari_blas_together(int threads);

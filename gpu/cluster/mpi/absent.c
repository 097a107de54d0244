/* SPDX-License-Identifier: Apache-2.0 */
/* Replaces MPI in a build without it. */
#include <stdio.h>

#include "gpu/cluster/mpi/process.h"

#define HOW_TO "install Open MPI (libopenmpi-dev), or MPICH, and configure again with -DANYRANK_MPI=ON"

bool ari_mpi_describe(char *text, size_t size)
{
    snprintf(text, size, "not in this build: " HOW_TO);
    return false;
}

bool ari_process_mpi_launched(void)
{
    return false;
}

ar_status ari_process_mpi_create(ar_process **gives, const ar_process_options *o)
{
    (void)gives;
    (void)o;
    return ar_error_set(AR_ERR_UNSUPPORTED, "this build has no MPI: " HOW_TO);
}

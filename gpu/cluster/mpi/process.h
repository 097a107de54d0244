/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "gpu/cluster/process/process.h"

/** Creates processes that MPI connects. Errors: AR_ERR_UNSUPPORTED in a build without MPI. */
AR_NODISCARD ar_status ari_process_mpi_create(ar_process **result, const ar_process_options *o);
/** True if an MPI launcher started this process, and this build can answer it. */
bool ari_process_mpi_launched(void);
/** The library: see ari_transport_describe. */
bool ari_mpi_describe(char *text, size_t size);

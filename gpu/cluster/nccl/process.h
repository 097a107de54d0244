/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "gpu/cluster/process/process.h"

/** Slot comm of a process, for any way in which processes communicate. */
AR_NODISCARD ar_status ari_nccl_comm_create(ar_comm **result, ar_process *p, ar_device *d);
/** The library: see ari_transport_describe. */
bool ari_nccl_describe(char *text, size_t size);

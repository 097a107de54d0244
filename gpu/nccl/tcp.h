/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_NCCL_TCP_H
#define ARI_NCCL_TCP_H

#include "gpu/nccl/control.h"
#include "ref/comm/process_impl.h"

/** The control of a process that sockets connect, borrowed; NULL: something else connects it. */
ari_control *ari_process_tcp_control(ar_process *p);

#endif

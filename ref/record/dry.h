/* SPDX-License-Identifier: Apache-2.0 */
/* A rank on nothing: what the layers, the step and data parallelism ask for is counted, and that is all. Its memory is
 * addresses that nobody reads, its kernels do nothing, and its collectives end at once, without peers. What comes from
 * it to the host is zeros. */
#pragma once

#include "anyrank/comm.h"
#include "anyrank/device.h"
#include "ref/record/ledger.h"

/** A device whose buffers, operands and blocks are as large as those of `like`, which is borrowed; NULL: the CPU
 *  device. ledger: records copies, borrowed; NULL: nothing does. Its queues are inline, whatever is asked for. Release
 *  the result with ar_device_destroy. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_dry_device_create(ar_device **out, const ar_device *like, ari_ledger *ledger);

/** Creates a communicator of rank `rank` of `size` ranks without the other ranks: every collective completes at once.
 *  Make groups with ari_comm_join. ledger records the calls and is borrowed; NULL records nothing. Release it with
 *  ar_comm_destroy. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_dry_comm_create(ar_comm **out, int rank, int size, ari_ledger *ledger);

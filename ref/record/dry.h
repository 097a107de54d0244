/* SPDX-License-Identifier: Apache-2.0 */
/* Dry run of a rank: everything that layers, step and data parallelism request is counted, and nothing is computed. Its
 * memory is unreadable addresses, its kernels do nothing, and its collectives complete at once without peers. Downloads
 * to the host return zeros. */
#pragma once

#include "anyrank/comm.h"
#include "anyrank/device.h"
#include "ref/record/ledger.h"

/** Creates a device whose buffers, operands and blocks have the sizes of those of `like`, borrowed; NULL: the CPU
 *  device. ledger records copies, borrowed; NULL: nothing is recorded. Its queues are always inline. Release it with
 *  ar_device_destroy. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_dry_device_create(ar_device **out, const ar_device *like, ari_ledger *ledger);

/** Creates a communicator of rank `rank` of `size` ranks without the other ranks: every collective completes at once.
 *  Make groups with ari_comm_join. ledger records the calls and is borrowed; NULL records nothing. Release it with
 *  ar_comm_destroy. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_dry_comm_create(ar_comm **out, int rank, int size, ari_ledger *ledger);

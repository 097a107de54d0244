/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_SUPPORT_LATE_DEVICE_H
#define TESTS_SUPPORT_LATE_DEVICE_H

#include "anyrank/device.h"

/* A device whose streams do their work late, each on a thread of its own that dawdles before some of its tasks, as a
 * GPU's streams may: what does not wait for what it needs finds the wrong bytes. Its memory is the host's. It has what
 * moves data and nothing else: memory, copy, zero, combine. */

/** fails_at: which call of copy or combine fails with AR_ERR_DEVICE, 1, 2, ..; 0: none. Gives; ar_device_destroy. */
AR_NODISCARD ar_status late_device_create(ar_device **gives, int fails_at);

#endif

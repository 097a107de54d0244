/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/dump_listener.h"

/* Private functions of anyrank/dump_listener.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** Discards all reported values before the next run. */
void ari_dump_listener_clear(ar_dump_listener *l);
/** Returns the number of stored values. They are in the order of their first reports. */
size_t ari_dump_listener_count(const ar_dump_listener *l);
/** Gets value i. The memory is borrowed until the next report. Returns false if i is out of range. */
bool ari_dump_listener_at(const ar_dump_listener *l, size_t i, ar_dump_value *value);

AR_END_DECLS

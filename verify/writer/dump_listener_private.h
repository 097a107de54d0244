/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/dump_listener.h"

/* Private functions of anyrank/dump_listener.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** Forgets what was reported, so that the next run starts afresh. */
void ari_dump_listener_clear(ar_dump_listener *l);
/** The values kept, in the order of first reports. Borrows until the next report. Value i; false: there is none. */
size_t ari_dump_listener_count(const ar_dump_listener *l);
/** The values kept, in the order of first reports. Borrows until the next report. Value i; false: there is none. */
bool ari_dump_listener_at(const ar_dump_listener *l, size_t i, ar_dump_value *value);

AR_END_DECLS

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/process.h"

/* Functions of anyrank/process.h for the library, the command and the tests alone. */

AR_BEGIN_DECLS

/** The library that a transport stands on and its version, or why this build or this machine has none; truncates.
 *  Returns whether there is one. AR_TRANSPORT_SIM needs none. */
bool ari_transport_describe(ar_transport t, char *text, size_t size);

AR_END_DECLS

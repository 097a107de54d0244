/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/data.h"

/* Private functions of anyrank/data.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** "auto", "bytes", "u16", "u32", "safetensors", "jsonl". Static storage. */
const char *ari_data_format_name(ar_data_format format);

AR_END_DECLS

/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>

#include "gpu/nccl/nccl.h"
#include "ref/comm/process_impl.h"

bool ari_nccl_describe(char *text, size_t size)
{
    ari_nccl n;
    if (ari_nccl_load(&n) != AR_OK) {
        snprintf(text, size, "%s", ar_error_message());
        return false;
    }
    snprintf(text, size, "%d.%d.%d", n.version / 10000, n.version / 100 % 100, n.version % 100);
    return true;
}

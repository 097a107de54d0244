/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/ddp.h"

#include "ref/core/context.h"

ar_ddp_options ar_ddp_defaults(void)
{
    return (ar_ddp_options){.bucket_bytes = AR_BUCKET_BYTES};
}

void ar_ddp_set_sync(ar_ddp *d, bool sync)
{
    (void)d, (void)sync;
}

ar_status ar_ddp_start(ar_ddp *d)
{
    (void)d;
    return AR_OK;
}

ar_status ar_ddp_wait(ar_ddp *d)
{
    (void)d;
    return AR_OK;
}

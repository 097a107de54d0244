/* SPDX-License-Identifier: Apache-2.0 */
/* What stands for NCCL in a build without it. */
#include "ref/core/process_impl.h"

ar_status ari_nccl_comm_create(ar_comm **gives, ar_process *p, ar_device *d)
{
    (void)gives;
    (void)p;
    (void)d;
    return ar_error_set(AR_ERR_UNSUPPORTED, "this build has no NCCL: install it beside CUDA, and configure again with "
                                            "-DANYRANK_CUDA=ON");
}

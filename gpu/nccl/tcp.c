/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/core/process_impl.h"

ar_status ari_process_tcp_create(ar_process **gives, const ar_process_options *o)
{
    (void)gives;
    (void)o;
    return ar_error_set(AR_ERR_UNSUPPORTED, "processes without MPI are not in this build");
}

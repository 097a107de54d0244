/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/dump.h"

ar_status ar_dump_open(ar_dump **gives, const char *path, const ar_dump_options *o)
{
    (void)gives, (void)o;
    return ar_error_set(AR_ERR_UNSUPPORTED, "%s: dumps are not read yet", path);
}

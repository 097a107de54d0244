/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu/imma.h"

#include <stdlib.h>
#include <string.h>

ar_status ari_imma_choose(ari_imma *path)
{
    const char *set = getenv(ARI_IMMA_VARIABLE);
    *path = ARI_IMMA_AUTO;
    if (!set || set[0] == '\0')
        return AR_OK;
    if (strcmp(set, "imma16") != 0 && strcmp(set, "imma10") != 0)
        return ar_error_set(AR_ERR_ARG, "%s is '%.40s', expected 'imma16' or 'imma10'", ARI_IMMA_VARIABLE, set);
    *path = strcmp(set, "imma16") == 0 ? ARI_IMMA_16 : ARI_IMMA_10;
    return AR_OK;
}

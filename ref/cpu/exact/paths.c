/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/cpu/device.h"

/* Which way of making exact sums a device takes (gemm.h). */
static const ari_exact_path *const paths[] = {
#if ARI_HAVE_X86_PATHS
    &ari_exact_amx,      &ari_exact_ifma, &ari_exact_avx512vnni, &ari_exact_avxvnni, &ari_exact_avx2,
#endif
#if ARI_HAVE_ARM_PATHS
    &ari_exact_smmla,    &ari_exact_sdot, &ari_exact_neon,
#endif
    &ari_exact_portable, /* last: every processor has it */
};
#define PATHS (sizeof paths / sizeof paths[0])

const ari_exact_path *ari_exact_path_at(size_t i)
{
    return i < PATHS ? paths[i] : NULL;
}

static const ari_exact_path *fastest_path(void)
{
    size_t i = 0;
    while (!paths[i]->supported())
        i++;
    return paths[i];
}

static ar_status unknown_path(const char *set)
{
    char names[160] = "";
    for (size_t i = 0; i < PATHS; i++) {
        const size_t used = strlen(names);
        (void)snprintf(names + used, sizeof names - used, "%s%s",
                       i == 0           ? ""
                       : i + 1 == PATHS ? " or "
                                        : ", ",
                       paths[i]->name);
    }
    return ar_error_set(AR_ERR_ARG, "cpu device: %s is '%.40s', expected %s", ARI_EXACT_VARIABLE, set, names);
}

ar_status ari_exact_choose(const ari_exact_path **path)
{
    const char *set = getenv(ARI_EXACT_VARIABLE);
    *path = fastest_path();
    if (!set || set[0] == '\0')
        return AR_OK;
    size_t i = 0;
    while (i < PATHS && strcmp(set, paths[i]->name) != 0)
        i++;
    if (i == PATHS)
        return unknown_path(set);
    if (!paths[i]->supported())
        return ar_error_set(AR_ERR_UNSUPPORTED, "cpu device: %s is '%s', and this processor has no %s",
                            ARI_EXACT_VARIABLE, set, paths[i]->needs);
    *path = paths[i];
    return AR_OK;
}

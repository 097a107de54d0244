/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/size.h"
#include "ref/cpu/device.h"
#include "ref/cpu/kernels.h"

/* Implementations of exact sums (gemm.h) in order of preference; a device uses the first one that the processor
 * supports. Where two were measured, the faster one comes first (docs/evidence/2026-11/exact-gemm.tsv, block.tsv). The
 * order is fixed: a measurement at run time took milliseconds in each process, chose the same path except by chance,
 * and made a run's path unpredictable. */
static const ari_exact_path *const paths[] = {
#if ARI_HAVE_X86_PATHS
    &ari_exact_amx,      &ari_exact_avx512vnni, &ari_exact_avxvnni, &ari_exact_avx2,
#endif
#if ARI_HAVE_ARM_PATHS
    &ari_exact_smmla,    &ari_exact_sdot,       &ari_exact_neon,
#endif
    &ari_exact_portable, /* last: supported by every processor, and slower than all others */
};
#define PATHS (sizeof paths / sizeof paths[0])

const ari_exact_path *ari_exact_path_at(size_t i)
{
    return i < PATHS ? paths[i] : NULL;
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

/* Finds the kernel that the environment variable names. */
static ar_status forced(const ari_exact_path **out, const char *set)
{
    size_t i = 0;
    while (i < PATHS && strcmp(set, paths[i]->name) != 0)
        i++;
    if (i == PATHS)
        return unknown_path(set);
    if (!paths[i]->supported())
        return ar_error_set(AR_ERR_UNSUPPORTED, "cpu device: %s is '%s', and this processor has no %s",
                            ARI_EXACT_VARIABLE, set, paths[i]->requirement);
    *out = paths[i];
    return AR_OK;
}

/* Returns the first available path; `brief`: among those for sums of any length. */
static const ari_exact_path *first_path(bool brief)
{
    size_t i = 0;
    while (!paths[i]->supported() || (brief && paths[i]->least_terms > 0))
        i++;
    return paths[i];
}

ar_status ari_exact_choose(ari_exact_choice *choice)
{
    const char *set = getenv(ARI_EXACT_VARIABLE);
    *choice =
        (ari_exact_choice){first_path(false), first_path(true), "the fastest of this build that the processor has"};
    if (!set || set[0] == '\0')
        return AR_OK;
    AR_TRY(forced(&choice->path, set));
    choice->brief = choice->path;
    choice->why = ARI_EXACT_VARIABLE " is set";
    return AR_OK;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Whether to choose this OpenBLAS (FindAnyrankBLAS.cmake, install_deps.sh): prints its version and, if not, why not. */
#include <stdio.h>

#include "ref/cpu/blas/openblas.h"

int main(void)
{
    int major = 0, minor = 0, patch = 0;
    char version[24] = "of unknown version";
    const char *problem = openblas_problem();
    (void)sscanf(openblas_get_config(), "OpenBLAS %23s", version);
    (void)sscanf(version, "%d.%d.%d", &major, &minor, &patch);
    if (!problem && major * 10000 + minor * 1000 + patch < 3021)
        problem = "is older than 0.3.21";
    printf("OpenBLAS %s%s%s", version, problem ? " " : "", problem ? problem : "");
    return problem != NULL;
}

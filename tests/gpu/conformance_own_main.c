/* SPDX-License-Identifier: Apache-2.0 */
/* The exact contraction's own kernel for compute capability 9.0, on the emulated device's model of that machine, against
 * the CPU device: the slots that it fills. Their sums are made alike; integers show them in both ways of digits, and so
 * do rounded values, since one of the two has bands of terms. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu/conformance.h"
#include "gpu/native.h"

/* small: without sums of several blocks of terms and of several carries. */
static int run(char *program, const char *slot, const char *passes, bool small)
{
    char *arguments[] = {program,        strdup("--slot"), strdup(slot), strdup("--passes"),
                         strdup(passes), strdup("--small")};
    const int count = sizeof arguments / sizeof *arguments;
    const int status = conformance_run(small ? count : count - 1, arguments, "emulated");
    for (int i = 1; i < count; i++)
        free(arguments[i]);
    return status;
}

int main(int argc, char **argv)
{
#if defined(ARI_SANITIZED)
    (void)argc;
    (void)argv;
    (void)run;
    puts("the model has stacks of its own, which a sanitizer does not follow");
    return 77;
#else
    if (setenv(ARI_IMMA_KERNEL_VARIABLE, "own", 1) != 0)
        abort();
    if (argc > 1)
        return conformance_run(argc, argv, "emulated");
    const int i64 = run(argv[0], "gemm_i64", "all", true), rounded = run(argv[0], "gemm_round", "all", false);
    const int acc = run(argv[0], "gemm_acc", "first", true);
    return i64 != 0 ? i64 : rounded != 0 ? rounded : acc;
#endif
}

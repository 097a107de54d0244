/* SPDX-License-Identifier: Apache-2.0 */
/* Prints how accurate contractions are (numerics.md, section 2), long K included. Under a minute. */
#include <stdio.h>

#include "tests/numerics/accuracy.h"

static const accuracy_row rows[] = {
    {"Gaussian", ACCURACY_GAUSSIAN, 4096},        {"Gaussian", ACCURACY_GAUSSIAN, 131072},
    {"1 % of channels", ACCURACY_CHANNELS, 4096}, {"massive activation", ACCURACY_MASSIVE, 4096},
    {"attention sink", ACCURACY_SINK, 4096},      {"attention sink", ACCURACY_SINK, 16384},
    {"attention sink", ACCURACY_SINK, 32768},     {"attention sink", ACCURACY_SINK, 131072},
    {"dlogits times W", ACCURACY_DLOGITS, 32000}, {"dlogits times W", ACCURACY_DLOGITS, 128256},
    {"log-normal tokens", ACCURACY_TOKENS, 4096}, {"log-normal", ACCURACY_LOGNORMAL, 4096},
    {"Student t(3)", ACCURACY_STUDENT, 4096},     {"outlier channels", ACCURACY_OUTLIERS, 4096},
    {"peaked softmax", ACCURACY_PEAKED, 4096},
};

int main(void)
{
    printf("%-20s %8s %10s %10s %15s %10s %12s %6s\n", "data", "K", "sgemm", "exact", "without step 0", "15 bits",
           "bf16 result", "ratio");
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        const accuracy_result r = accuracy_measure(&rows[i], 48);
        printf("%-20s %8zu %10.2e %10.2e %15.2e %10.2e %12.2e %6.3f\n", rows[i].name, rows[i].k, r.sgemm, r.exact,
               r.unscaled, r.narrow, r.stored, r.narrow / r.stored);
        fflush(stdout);
        if (!(r.exact < 2e-5)) /* ten times the worst row of the documented table, and NaN */
            return 1;
    }
    return 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* The exponentials of rows of differences, all 2^32 of them, are the definition's bits: exps_sweep. Prints how many are
 * not, and exits with 1 if there are any. About a minute a core. */
#include <stdio.h>

#include "ref/cpu/row_sum.h"

enum { CHUNK = 1 << 16 };

int main(void)
{
    unsigned long long wrong = 0;
#pragma omp parallel for schedule(dynamic, 64) reduction(+ : wrong)
    for (uint32_t chunk = 0; chunk < (1u << 16); chunk++) {
        static _Thread_local float x[CHUNK], e[CHUNK];
        for (uint32_t i = 0; i < CHUNK; i++)
            x[i] = ari_float32(chunk * CHUNK + i);
        ari_softmax_exps(e, x, 0.0f, CHUNK);
        for (uint32_t i = 0; i < CHUNK; i++)
            wrong += ari_bits32(e[i]) != ari_bits32(ari_softmax_exp(x[i], 0.0f));
    }
    printf("%llu of 2^32 exponentials differ from the definition's\n", wrong);
    return wrong != 0;
}

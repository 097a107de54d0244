/* SPDX-License-Identifier: Apache-2.0 */
/* Judges the fp32 functions of ref/numerics on all 2^32 inputs: scalar_sweep [FUNCTION...], all of them by default.
 * Prints one line a function and exits with 1 if any error exceeds 1 ulp. About 3 minutes a function and core. Link
 * with libquadmath. */
#define SCALAR_QUAD
#include <stdio.h>
#include <string.h>

#include "tests/numerics/scalar_reference.h"

enum { CHUNK = 1 << 16 };

static void sweep_chunk(const scalar_function *f, uint32_t first, scalar_tally *t)
{
    const bool limited = strcmp(f->name, "sin32") == 0 || strcmp(f->name, "cos32") == 0;
    static _Thread_local float x[CHUNK], y[CHUNK];
    for (uint32_t i = 0; i < CHUNK; i++)
        x[i] = ari_float32(first + i);
    f->wide(y, x, CHUNK);
    for (uint32_t i = 0; i < CHUNK; i++) {
        const bool outside = limited && !(fabsf(x[i]) < 0x1p20f);
        if (x[i] - x[i] != 0.0f || outside) {
            const bool infinite = fabsf(x[i]) > 0x1.fffffep127f && !outside; /* limits have a test of their own */
            if (!infinite && ari_bits32(y[i]) != ARI_NAN_BITS)
                scalar_wrong(t, x[i]);
        } else {
            scalar_judge(f, x[i], y[i], t);
        }
    }
}

static scalar_tally sweep(const scalar_function *f)
{
    scalar_tally total = {0};
#pragma omp parallel
    {
        scalar_tally mine = {0};
#pragma omp for schedule(dynamic, 64)
        for (uint32_t chunk = 0; chunk < (1u << 16); chunk++)
            sweep_chunk(f, chunk << 16, &mine);
#pragma omp critical
        {
            if (mine.max_ulp > total.max_ulp) {
                total.max_ulp = mine.max_ulp;
                total.max_at = mine.max_at;
            }
            total.judged += mine.judged;
            total.misrounded += mine.misrounded;
            total.undecided += mine.undecided;
            total.wrong_at = mine.wrong != 0 ? mine.wrong_at : total.wrong_at;
            total.wrong += mine.wrong;
        }
    }
    return total;
}

int main(int argc, char **argv)
{
    int failures = 0;
    if (!scalar_wide_works()) {
        printf("this processor lacks AVX2 or FMA: skipped\n");
        return 77;
    }
    printf("%-13s %12s %16s %12s %8s\n", "function", "max ulp", "at", "misrounded", "wrong");
    for (size_t i = 0; i < SCALAR_FUNCTION_COUNT; i++) {
        const scalar_function *f = &scalar_functions[i];
        bool wanted = argc == 1;
        for (int a = 1; a < argc; a++)
            wanted = wanted || strcmp(argv[a], f->name) == 0;
        if (!wanted)
            continue;
        const scalar_tally t = sweep(f);
        printf("%-13s %12.8f %16a %12llu %8llu", f->name, t.max_ulp, (double)t.max_at, (unsigned long long)t.misrounded,
               (unsigned long long)t.wrong);
        if (t.wrong != 0)
            printf("  e.g. at %a", (double)t.wrong_at);
        printf("\n");
        fflush(stdout);
        failures += t.wrong != 0 || !(t.max_ulp <= 1.0);
    }
    return failures == 0 ? 0 : 1;
}

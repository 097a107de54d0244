/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/core/nearest.h"

#include <stdint.h>
#include <string.h>

enum { LONGEST = 64 };

static size_t least(size_t a, size_t b, size_t c)
{
    const size_t ab = a < b ? a : b;
    return ab < c ? ab : c;
}

/* Levenshtein's distance, one row at a time; words longer than LONGEST are near nothing. */
static size_t distance(const char *a, const char *b)
{
    const size_t n = strlen(a), m = strlen(b);
    if (n > LONGEST || m > LONGEST)
        return SIZE_MAX;
    size_t row[LONGEST + 1];
    for (size_t j = 0; j <= m; j++)
        row[j] = j;
    for (size_t i = 1; i <= n; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= m; j++) {
            const size_t replaced = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            row[j] = least(row[j] + 1, row[j - 1] + 1, replaced);
        }
    }
    return row[m];
}

const char *ari_nearest(const char *word, const char *const *candidates, size_t n)
{
    const size_t third = strlen(word) / 3;
    size_t best = (third > 2 ? third : 2) + 1;
    const char *found = NULL;
    for (size_t i = 0; i < n; i++) {
        const size_t d = distance(word, candidates[i]);
        if (d < best) {
            best = d;
            found = candidates[i];
        }
    }
    return found;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/io/nearest.h"

#include <string.h>

#define LONGEST 64 /* names of options and models are far shorter */

static size_t min(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* Three rows of the usual table: row[i % 3][j] is the distance of a[0..i) to b[0..j). */
static size_t distance(const char *a, size_t n, const char *b, size_t m)
{
    size_t row[3][LONGEST + 1];
    for (size_t j = 0; j <= m; j++)
        row[0][j] = j;
    for (size_t i = 1; i <= n; i++) {
        size_t *now = row[i % 3];
        const size_t *before = row[(i + 2) % 3], *earlier = row[(i + 1) % 3];
        now[0] = i;
        for (size_t j = 1; j <= m; j++) {
            now[j] = min(min(before[j], now[j - 1]) + 1, before[j - 1] + (a[i - 1] != b[j - 1]));
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                now[j] = min(now[j], earlier[j - 2] + 1);
        }
    }
    return row[n % 3][m];
}

const char *ari_nearest(const char *word, const char *const *names, size_t n)
{
    const size_t length = strlen(word);
    const char *best = NULL;
    size_t best_distance = length / 3 < 2 ? 3 : length / 3 + 1; /* one more than what is still near */
    for (size_t i = 0; i < n && length <= LONGEST; i++) {
        const size_t other = strlen(names[i]);
        if (other > LONGEST)
            continue;
        const size_t d = distance(word, length, names[i], other);
        if (d < best_distance && d < other) { /* d = other: nothing in common */
            best = names[i];
            best_distance = d;
        }
    }
    return best;
}

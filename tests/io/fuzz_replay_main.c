/* SPDX-License-Identifier: Apache-2.0 */
/* Every seed of tests/fuzz/corpus through its target, whole, cut off at every length and with every byte changed: what
 * tests/fuzz/run.sh drives for minutes is held here to the inputs that it begins with. A plain main, for the sanitizers. */
#include <dirent.h>

#include "support/small.h"
#include "tests/fuzz/targets.h"
#include "tests/support/scoped.h"

#define MAX_SEED 8192

static size_t replay_file(const fuzz_target *t, const char *path)
{
    OWNED(free) unsigned char *seed = NULL, *changed = NULL;
    size_t n = 0, runs = 0;
    const size_t step = small_only() ? 23 : 3;
    if (ari_file_read(&seed, &n, path, MAX_SEED) != AR_OK || (changed = malloc(n + 1)) == NULL) {
        fprintf(stderr, "%s: %s\n", path, ar_error_message());
        exit(1);
    }
    t->run(seed, n);
    for (size_t at = 0; at < n; at += step, runs += 2) {
        t->run(seed, at);
        memcpy(changed, seed, n);
        changed[at] ^= (unsigned char)(1u << (at / step % 7));
        t->run(changed, n);
    }
    return runs + 1;
}

static size_t replay(const fuzz_target *t, size_t *seeds)
{
    char folder[512], path[1024];
    size_t runs = 0;
    snprintf(folder, sizeof folder, "%s/tests/fuzz/corpus/%s", TEST_SOURCE_DIR, t->name);
    DIR *d = opendir(folder);
    if (d == NULL)
        return 0;
    for (const struct dirent *e = readdir(d); e != NULL; e = readdir(d)) {
        if (e->d_name[0] == '.')
            continue;
        snprintf(path, sizeof path, "%s/%s", folder, e->d_name);
        runs += replay_file(t, path);
        ++*seeds;
    }
    closedir(d);
    return runs;
}

int main(void)
{
    int failed = 0;
    for (size_t i = 0; i < FUZZ_TARGETS; i++) {
        size_t seeds = 0;
        const size_t runs = replay(&fuzz_targets[i], &seeds);
        printf("%-12s %zu seeds, %zu inputs\n", fuzz_targets[i].name, seeds, runs);
        failed |= seeds == 0;
    }
    return failed;
}

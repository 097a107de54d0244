/* SPDX-License-Identifier: Apache-2.0 */
/* Random layouts, and ranks that take each other's parts for theirs, in a program with a plain main, which
 * ThreadSanitizer can watch. */
#include <stdlib.h>
#include <string.h>

#include "support/layout_draw.h"

enum { DRAWS = 20, FIRST_SEED = 85, CONTEXT_DRAWS = 12, FIRST_CONTEXT = 236 };

/* Two ranks with the same place in the mesh hold the same part of every tensor, and others' is nobody's: that is told,
 * with the same hash each time. */
static bool wrong_groups_are_told(void)
{
    static const ar_parallel layout = {.tp = 2, .dp = 2};
    const ar_check_options o = {.run.model = "stack-demo",
                                .parallel = &layout,
                                .layouts = 1,
                                .run.batch = 2,
                                .run.seq = 4,
                                .run.threads = 1,
                                .run.sim.timeout_ns = 120000000000u,
                                .run.fault = "group_wrong_stride",
                                .skip_f64 = true};
    char hash[65] = "";
    bool ok = true;
    for (int i = 0; i < 2 && ok; i++) {
        ar_check_report *r = NULL;
        if (ar_check(&r, &o) != AR_OK) {
            fprintf(stderr, "%s\n", ar_error_message());
            return false;
        }
        ok = r->run[0].result == AR_CHECK_DIFFERENT && (i == 0 || strcmp(hash, r->run[0].weights_hash) == 0);
        snprintf(hash, sizeof hash, "%s", r->run[0].weights_hash);
        ar_check_report_destroy(r);
    }
    if (!ok)
        fprintf(stderr, "groups of the wrong ranks: not told, or another hash\n");
    return ok;
}

int main(void)
{
    const bool told = wrong_groups_are_told();
    const int failures = layout_draws_run(DRAW_TENSORS, FIRST_SEED, DRAWS, stderr) +
                         layout_draws_run(DRAW_CONTEXTS, FIRST_CONTEXT, CONTEXT_DRAWS, stderr);
    return failures == 0 && told ? EXIT_SUCCESS : EXIT_FAILURE;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* 500 random layouts each of tensors, contexts, stages, families and experts, as tests/verify/random_layouts_test.c runs some:
 * ANYRANK_TEST_SEED, _DRAWS, _BF16 and _DEVICE ask for others, an argument for one kind alone. Exit status 0: all have the
 * baseline's bits and what is predicted. */
#include <stdlib.h>
#include <string.h>

#include "support/layout_draw.h"

enum { DRAWS = 500, FIRST_SEED = 1000 };

int main(int argc, char **argv)
{
    static const char *const kinds[] = {[DRAW_TENSORS] = "tensors",
                                        [DRAW_CONTEXTS] = "contexts",
                                        [DRAW_STAGES] = "stages",
                                        [DRAW_FAMILIES] = "families",
                                        [DRAW_EXPERTS] = "experts"};
    int failures = 0, ran = 0;
    for (int kind = 0; kind < (int)(sizeof kinds / sizeof *kinds); kind++) {
        if (argc > 1 && strcmp(argv[1], kinds[kind]) != 0)
            continue;
        failures += layout_draws_run((layout_draw_kind)kind, FIRST_SEED, DRAWS, stdout);
        ran++;
    }
    if (ran == 0)
        fprintf(stderr, "usage: random_layouts [tensors | contexts | stages | families | experts]\n");
    return failures == 0 && ran > 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* 500 random layouts, and 500 whose ranks share sequences, as tests/verify/random_layouts_test.c runs some:
 * ANYRANK_TEST_SEED and ANYRANK_TEST_DRAWS ask for others. Exit status 0: all have the baseline's bits and the predicted
 * bytes. */
#include <stdlib.h>

#include "support/layout_draw.h"

enum { DRAWS = 500, FIRST_SEED = 1000 };

int main(void)
{
    int failures = layout_draws_run(FIRST_SEED, DRAWS, false, stdout);
    failures += layout_draws_run(FIRST_SEED, DRAWS, true, stdout);
    return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

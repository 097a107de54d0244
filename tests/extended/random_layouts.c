/* SPDX-License-Identifier: Apache-2.0 */
/* 500 random layouts, as tests/verify/random_layouts_test.c runs 120: ANYRANK_TEST_SEED and ANYRANK_TEST_DRAWS ask for
 * others. Exit status 0: all have the baseline's bits and the predicted bytes. */
#include <stdlib.h>

#include "support/layout_draw.h"

enum { DRAWS = 500, FIRST_SEED = 1000 };

int main(void)
{
    return layout_draws_run(FIRST_SEED, DRAWS, false, stdout) == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Random layouts in a program with a plain main, which ThreadSanitizer can watch. */
#include <stdlib.h>

#include "support/layout_draw.h"

enum { DRAWS = 20, FIRST_SEED = 80 };

int main(void)
{
    return layout_draws_run(FIRST_SEED, DRAWS, stderr) == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

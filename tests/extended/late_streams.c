/* SPDX-License-Identifier: Apache-2.0 */
/* 1,000 seeds of late streams over every kind of layout, as tests/gpu/late_main.c runs two. Arguments: another number of
 * seeds, and the first one. Exit status 0: all runs have the bits of one rank on the CPU. */
#include <stdio.h>
#include <stdlib.h>

#include "support/late_layouts.h"

int main(int argc, char **argv)
{
    const uint64_t seeds = argc > 1 ? strtoull(argv[1], NULL, 10) : 1000;
    return late_layouts_run(argc > 2 ? strtoull(argv[2], NULL, 10) : 1, seeds) == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

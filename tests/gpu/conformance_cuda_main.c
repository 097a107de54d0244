/* SPDX-License-Identifier: Apache-2.0 */
/* The CUDA device on the first GPU against the CPU device; exit status 77 where there is none. */
#include "gpu/conformance.h"

int main(int argc, char **argv)
{
    return conformance_run(argc, argv, "cuda");
}

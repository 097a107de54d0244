/* SPDX-License-Identifier: Apache-2.0 */
/* The CUDA device's kernels, compiled for the host, against the CPU device; or another device that is named. */
#include "gpu/conformance.h"

int main(int argc, char **argv)
{
    return conformance_run(argc, argv, "emulated");
}

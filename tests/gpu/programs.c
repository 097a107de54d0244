/* SPDX-License-Identifier: Apache-2.0 */
/* The command and the programs of gpu/device-check.sh in one file, which is each of them under its name: the library and
 * its code for GPUs, most of each one's size, are there once. */
#include <stdio.h>
#include <string.h>

#include "gpu/programs.h"

int main(int argc, char **argv)
{
    static const struct program {
        const char *name;
        int (*main)(int argc, char **argv);
    } programs[] = {{"anyrank", anyrank_main},         {"conformance_main", conformance_main_main},
                    {"gpu_smoke", gpu_smoke_main},     {"bench_gemm", bench_gemm_main},
                    {"bench_block", bench_block_main}, {"bench_nccl", bench_nccl_main}};
    const char *name = argc > 0 ? argv[0] : "";
    if (strrchr(name, '/'))
        name = strrchr(name, '/') + 1;
    for (size_t i = 0; i < sizeof programs / sizeof *programs; i++)
        if (strcmp(name, programs[i].name) == 0)
            return programs[i].main(argc, argv);
    fprintf(stderr,
            "this program is called anyrank, conformance_main, gpu_smoke or bench_gemm, _block or _nccl, by links\n");
    return 2;
}

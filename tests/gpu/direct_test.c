/* SPDX-License-Identifier: Apache-2.0 */
/* When NCCL may read and write the buffers of other ranks of the process. */
#include <stdlib.h>

#include "gpu/cluster/nccl/nccl.h"
#include "tests/support/test.h"

#define VARIABLE "NCCL_P2P_DIRECT_DISABLE"

static bool all_reach(int gpu, int peer)
{
    return gpu != peer; /* CUDA's answer: no GPU is its own peer */
}

static bool two_does_not_reach_zero(int gpu, int peer)
{
    return gpu != peer && !(gpu == 2 && peer == 0);
}

static bool zero_does_not_reach_two(int gpu, int peer)
{
    return gpu != peer && !(gpu == 0 && peer == 2);
}

static void setup(void)
{
    unsetenv(VARIABLE);
}

Test(direct, gpus_that_all_reach_each_other_leave_it_to_nccl, .init = setup, .timeout = 300)
{
    ari_nccl_choose_direct(0, all_reach);
    ari_nccl_choose_direct(4, all_reach);
    ari_nccl_choose_direct(2, two_does_not_reach_zero); /* GPU 2 is none of them */
    cr_assert_null(getenv(VARIABLE));
}

Test(direct, one_gpu_that_does_not_reach_another_forbids_it, .init = setup, .timeout = 300)
{
    ari_nccl_choose_direct(3, two_does_not_reach_zero);
    cr_assert_str_eq(getenv(VARIABLE), "1");
    unsetenv(VARIABLE);
    ari_nccl_choose_direct(3, zero_does_not_reach_two);
    cr_assert_str_eq(getenv(VARIABLE), "1");
}

Test(direct, a_variable_that_is_set_stays, .init = setup, .timeout = 300)
{
    setenv(VARIABLE, "0", 1);
    ari_nccl_choose_direct(3, two_does_not_reach_zero);
    cr_assert_str_eq(getenv(VARIABLE), "0");
}

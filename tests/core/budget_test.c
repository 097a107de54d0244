/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/core/os/threads.h"
#include "ref/core/wait.h"
#include "tests/support/test.h"

Test(core_budget, ranks_times_kernel_threads_never_exceed_the_cores_they_share)
{
    for (int threads = 1; threads <= 64; threads++) {
        for (int ranks = 1; ranks <= 64; ranks++) {
            const int share = ari_core_budget(threads, ranks);
            cr_assert_geq(share, 1);
            cr_assert(ranks * share <= threads || share == 1, "%d ranks of %d threads each on %d", ranks, share,
                      threads);
            cr_assert((share + 1) * ranks > threads, "%d ranks leave a whole thread each of %d idle", ranks, threads);
        }
    }
    cr_assert_eq(ari_core_budget(8, 2), 4);
    cr_assert_eq(ari_core_budget(2, 12), 1);
}

Test(core_budget, there_is_at_least_one_core)
{
    cr_assert_geq(ari_cores(), 1);
}

Test(core_budget, a_thread_begins_on_a_core_and_may_leave_it)
{
    const int cores = ari_cores();
    for (int i = 0; i < 2 * cores + 1; i++) {
        ari_begin_on_core(i);
        cr_assert_eq(ari_cores(), cores, "after the %d-th core it may run on fewer", i);
    }
}

/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <criterion/hooks.h>

/* What hangs fails after this many seconds: many times what a test takes on a busy machine. (The option of that name
 * only shortens limits that a test has.) */
enum { LIMIT_S = 600 };

ReportHook(PRE_ALL)(struct criterion_test_set *all)
{
    FOREACH_SET(struct criterion_suite_set * s, all->suites)
    {
        FOREACH_SET(struct criterion_test * t, s->tests)
        {
            t->data->timeout = t->data->timeout > 0.0 ? t->data->timeout : LIMIT_S;
        }
    }
}

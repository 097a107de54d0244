/* SPDX-License-Identifier: Apache-2.0 */
/* A program of somebody else's, in C and in C++. */
#include <anyrank/check.h>
#include <anyrank/parallel.h>
#include <stdio.h>

int main(void)
{
    static ar_check_options nothing; /* refused; but a static library is linked with all that a check needs */
    ar_parallel layout = {0};
    ar_check_report *report = NULL;
    const ar_status refused = ar_check(&report, &nothing);
    layout.tp = 2;
    layout.dp = 3;
    printf("%d ranks\n%s\n", ar_parallel_world(&layout), ar_status_name(refused));
    return 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* A program of somebody else's, in C and in C++. */
#include "ref/comm/comm_private.h"
#include <anyrank/check.h>
#include <anyrank/comm.h>
#include <stdio.h>

int main(void)
{
    static ar_check_options nothing; /* refused; but a static library is linked with all that a check needs */
    ar_check_report *report = NULL;
    ar_comm *comm = NULL;
    const ar_status st = ari_comm_self(&comm), refused = ar_check(&report, &nothing);
    if (st == AR_OK)
        printf("%s, rank %d of %d\n%s\n", ar_status_name(st), ar_comm_rank(comm), ar_comm_size(comm),
               ar_status_name(refused));
    ari_comm_destroy(comm);
    return st == AR_OK ? 0 : 1;
}

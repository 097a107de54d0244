/* SPDX-License-Identifier: Apache-2.0 */
/* A program of somebody else's, in C and in C++. */
#include <anyrank/comm.h>
#include <stdio.h>

int main(void)
{
    ar_comm *comm = NULL;
    const ar_status st = ar_comm_self(&comm);
    if (st == AR_OK)
        printf("%s, rank %d of %d\n", ar_status_name(st), ar_comm_rank(comm), ar_comm_size(comm));
    ar_comm_destroy(comm);
    return st == AR_OK ? 0 : 1;
}

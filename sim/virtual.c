/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/sim_impl.h"

void ari_virtual_cost(void *user, ari_group *g)
{
    (void)user;
    int last = 0;
    for (int i = 1; i < ari_group_size(g); i++)
        last = ari_group_virtual_begin(g, i) > ari_group_virtual_begin(g, last) ? i : last;
    ari_group_set_virtual_last(g, last);
    for (int i = 0; i < ari_group_size(g); i++)
        ari_group_set_virtual_end(g, i, ari_group_virtual_begin(g, last));
}

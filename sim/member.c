/* SPDX-License-Identifier: Apache-2.0 */
/* One rank's place in a group, of which a communicator is one and each end of its channels is another. */
#include <stdlib.h>

#include "ref/comm/moves.h"
#include "ref/core/queue_impl.h"
#include "sim/wire.h"

void ari_sim_member_drop(ari_group *g, int index)
{
    ari_member dropped;
    ari_member_init(&dropped, g, index);
    ari_member_fini(&dropped);
}

ar_status ari_sim_comm_init(ari_sim_comm *c, const ari_comm_ops *ops, ari_group *g, int index,
                            const ar_sim_options *options)
{
    c->options = options;
    AR_TRY(ari_fault_watch_create(c));
    ari_member_init(&c->member, g, index);
    ari_comm_init(&c->base, ops, index, ari_group_size(g));
    return AR_OK;
}

void ari_sim_comm_fini(ari_sim_comm *c)
{
    ari_member_fini(&c->member);
    ari_fault_watch_free(c->watch);
    free(c->scratch);
}

ar_status ari_sim_reserve(ari_sim_comm *c, size_t bytes)
{
    return ari_scratch_reserve(&c->scratch, &c->scratch_bytes, bytes, "of partial sums");
}

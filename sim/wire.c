/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/wire.h"

bool ari_wire_is_plain(const ari_sim_comm *mover)
{
    return mover->options->fault_count == 0 && !mover->options->verify_transfers;
}

ari_wire ari_wire_open(ari_sim_comm *mover)
{
    return (ari_wire){.mover = mover, .plain = ari_wire_is_plain(mover)};
}

void ari_wire_close(const ari_wire *w)
{
    for (ari_sim_comm *c = w->mover; c; c = c->counted_by)
        ari_moved_add(&c->base.moved, w->read, w->written);
}

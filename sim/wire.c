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
    ari_moved_read(&w->mover->base.moved, w->read);
    ari_moved_written(&w->mover->base.moved, w->written);
}

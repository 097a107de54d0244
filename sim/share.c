/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/slice.h"

/* `direct` for ranks that have no core each. There every rank would have to get a core twice for a collective: to do
 * its slice, and to hear that all have done theirs. Here those that have one when the last rank comes do all the
 * slices; the others find, whenever they get one, that all is done. */

static ar_status share(ari_group *g, void *arg)
{
    (void)arg;
    ari_group_share(g);
    return AR_OK;
}

ar_status ari_share_run(ari_sim_comm *c, const ari_call *call)
{
    ari_member *m = &c->member;
    AR_TRY(ari_member_enter(m, &c->base, call, share, NULL));
    ari_wire wire = ari_wire_open(c);
    for (int part; (part = ari_member_next_part(m)) >= 0;) {
        (void)ari_slice_move(&wire, part);
        ari_member_part_done(m);
    }
    ari_wire_close(&wire);
    return ari_member_leave_shared(m);
}

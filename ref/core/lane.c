/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/core/lane.h"
#include "ref/core/size.h"

#include <stdio.h>

ARI_OWNER(ari_lane, ari_lane_destroy)

static _Thread_local ari_lane *self;

ari_lane *ari_lane_self(void)
{
    return self;
}

ar_status ari_lane_create(ari_lane **gives, ari_lane *of, const ari_instruments *with, int rank, const char *name)
{
    ARI_OWNED_BY(ari_lane_destroy) ari_lane *l = calloc(1, sizeof *l);
    *gives = NULL;
    if (!l)
        return ar_error_set(AR_ERR_MEMORY, "no memory for a lane of rank %d", rank);
    *l = (ari_lane){.with = &l->own, .rank = rank, .own = *with};
    atomic_init(&l->tracks, 1);
    l->main = of ? of->main : l;
    if (of) {
        l->track = atomic_fetch_add(&l->main->tracks, 1);
        l->virtual_ns = of->virtual_ns;
    }
    snprintf(l->name, sizeof l->name, "%s", name);
    if (with->trace)
        AR_TRY(ari_recording_create(&l->recording, with->trace, l));
    if (with->scheduler)
        AR_TRY(ari_turn_create(&l->turn, with->scheduler));
    ARI_GIVE(gives, l);
    return AR_OK;
}

void ari_lane_destroy(ari_lane *l)
{
    if (!l)
        return;
    ari_turn_destroy(l->turn);
    free(l);
}

void ari_lane_enter(ari_lane *l)
{
    if (!l)
        return;
    self = l;
    if (l->turn)
        ari_turn_enter(l->turn);
}

void ari_lane_leave(ari_lane *l)
{
    if (!l)
        return;
    ari_recording_close(l->recording, l->virtual_ns);
    self = NULL;
    if (l->turn)
        ari_turn_leave(l->turn);
}

void ari_lane_join(const ari_lane *l)
{
    if (l && l->turn && self && self->turn)
        ari_turn_join(self->turn, l->turn);
}

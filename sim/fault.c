/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/splitmix.h"
#include "sim/fault_impl.h"

/* --- as data ------------------------------------------------------------------------------------------------------ */

const char *ar_sim_fault_name(ar_sim_fault_kind k)
{
    static const char *const names[AR_SIM_FAULT_KINDS] = {
        [AR_SIM_DELAY] = "delay",     [AR_SIM_STALL] = "stall",         [AR_SIM_KILL] = "kill",
        [AR_SIM_CORRUPT] = "corrupt", [AR_SIM_DUPLICATE] = "duplicate", [AR_SIM_DROP] = "drop",
        [AR_SIM_SLOW] = "slow"};
    return (unsigned)k < AR_SIM_FAULT_KINDS ? names[k] : "?";
}

void ar_sim_fault_describe(const ar_sim_fault *f, char *text, size_t size)
{
    char transfer[32] = "", bit[32] = "", ns[32] = "";
    const bool waits = f->kind == AR_SIM_DELAY || f->kind == AR_SIM_SLOW;
    const bool before = (f->kind == AR_SIM_STALL || f->kind == AR_SIM_KILL) && f->transfer == 0;
    if (waits)
        snprintf(ns, sizeof ns, " ns %llu", (unsigned long long)f->ns);
    else if (!before)
        snprintf(transfer, sizeof transfer, " transfer %llu", (unsigned long long)f->transfer);
    if (f->kind == AR_SIM_CORRUPT)
        snprintf(bit, sizeof bit, " bit %llu", (unsigned long long)f->bit);
    snprintf(text, size, "%s rank %d collective %llu%s%s%s", ar_sim_fault_name(f->kind), f->rank,
             (unsigned long long)f->collective, transfer, bit, ns);
}

ar_sim_fault ar_sim_fault_draw(uint64_t seed, int ranks, uint64_t collectives, uint64_t longest_ns)
{
    uint64_t state = seed;
    ar_sim_fault f = {.kind = (ar_sim_fault_kind)(ari_splitmix(&state) % AR_SIM_FAULT_KINDS)};
    f.rank = (int)(ari_splitmix(&state) % (uint64_t)(ranks > 0 ? ranks : 1));
    f.collective = 1 + ari_splitmix(&state) % (collectives > 0 ? collectives : 1);
    /* Most collectives have a handful of transfers, so a number among the first is one that happens. */
    const uint64_t among = (uint64_t)1 << ari_splitmix(&state) % 6;
    f.transfer = ari_splitmix(&state) % among;
    f.bit = ari_splitmix(&state);
    f.ns = longest_ns > 0 ? ari_splitmix(&state) % longest_ns + 1 : 0;
    if (f.kind == AR_SIM_DELAY || f.kind == AR_SIM_SLOW)
        f.transfer = 0;
    else
        f.ns = 0;
    if (f.kind != AR_SIM_CORRUPT)
        f.bit = 0;
    return f;
}

ar_status ari_fault_check(const ar_sim_fault *faults, size_t count, int ranks)
{
    if (count > 0 && !faults)
        return ar_error_set(AR_ERR_ARG, "ar_sim_run: %zu faults, but no list of them", count);
    for (size_t i = 0; i < count; i++) {
        const ar_sim_fault *f = &faults[i];
        if ((unsigned)f->kind >= AR_SIM_FAULT_KINDS)
            return ar_error_set(AR_ERR_ARG, "ar_sim_run: fault %zu: unknown kind %d", i, (int)f->kind);
        if (f->rank < 0 || f->rank >= ranks)
            return ar_error_set(AR_ERR_ARG, "ar_sim_run: fault %zu (%s): rank %d; 0 to %d expected", i,
                                ar_sim_fault_name(f->kind), f->rank, ranks - 1);
        if (f->collective == 0)
            return ar_error_set(AR_ERR_ARG, "ar_sim_run: fault %zu (%s): collective 0; they count from 1", i,
                                ar_sim_fault_name(f->kind));
    }
    return AR_OK;
}

/* --- before a collective ------------------------------------------------------------------------------------------ */

ar_status ari_fault_watch_create(ari_sim_comm *c)
{
    if (ari_wire_is_plain(c))
        return AR_OK;
    c->watch = aligned_alloc(_Alignof(ari_fault_watch), sizeof *c->watch);
    if (!c->watch)
        return ar_error_set(AR_ERR_MEMORY, "no memory to watch the transfers of a communicator");
    memset(c->watch, 0, sizeof *c->watch);
    return AR_OK;
}

void ari_fault_watch_free(ari_fault_watch *w)
{
    if (!w)
        return;
    free(w->kept.bytes);
    free(w);
}

const ar_sim_fault *ari_fault_next(const ari_sim_comm *c, ar_sim_fault_kind kind, uint64_t transfer,
                                   const ar_sim_fault *after)
{
    const ar_sim_fault *f = after ? after + 1 : c->options->faults;
    for (; f < c->options->faults + c->options->fault_count; f++) {
        const bool now = f->collective == c->watch->number && f->transfer == transfer;
        if (f->kind == kind && f->rank == c->member.rank && now)
            return f;
    }
    return NULL;
}

void ari_fault_kill(ari_sim_comm *c, const ari_call *call, const char *where)
{
    char what[384], why[512];
    ari_member_describe(&c->member, call, what, sizeof what);
    snprintf(why, sizeof why, "rank %d was killed %s %s", c->member.rank, where, what);
    ari_world_fail(ari_group_world(c->member.group), c->member.rank, NULL, AR_ERR_ABORTED, why);
}

void ari_fault_stall(ari_sim_comm *c, const ari_call *call, const char *where)
{
    char what[384], why[512];
    ari_member_describe(&c->member, call, what, sizeof what);
    snprintf(why, sizeof why, "rank %d stands still %s %s, and no rank is left to wait for it", c->member.rank, where,
             what);
    ari_member_hold(&c->member, why);
}

/* By how much the rank comes later to the collective that it is about to enter. */
static uint64_t late_ns(const ari_sim_comm *c)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < c->options->fault_count; i++) {
        const ar_sim_fault *f = &c->options->faults[i];
        const bool now = f->kind == AR_SIM_DELAY ? f->collective == c->watch->number
                                                 : f->kind == AR_SIM_SLOW && f->collective <= c->watch->number;
        if (now && f->rank == c->member.rank)
            sum += f->ns > UINT64_MAX - sum ? UINT64_MAX - sum : f->ns;
    }
    return sum;
}

void ari_fault_before(ari_sim_comm *c, const ari_call *call)
{
    if (!c->watch)
        return;
    c->watch->number = ari_world_number(ari_group_world(c->member.group), c->member.rank);
    c->watch->kept.on = false;
    const uint64_t late = late_ns(c);
    if (late > 0)
        ari_member_sleep(&c->member, late);
    ari_lane *lane = ari_lane_self();
    if (late > 0 && ari_lane_is_virtual(lane))
        lane->virtual_ns += late;
    if (ari_fault_next(c, AR_SIM_STALL, 0, NULL))
        ari_fault_stall(c, call, "before");
    else if (ari_fault_next(c, AR_SIM_KILL, 0, NULL))
        ari_fault_kill(c, call, "before");
}

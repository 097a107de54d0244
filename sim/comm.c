/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>

#include "ref/core/queue_impl.h"
#include "ref/core/reduce.h"
#include "ref/core/size.h"
#include "sim/wire.h"

/* Sizes up to which the last member to arrive does all the work, with one barrier instead of two. Measured on two
 * cores: time of `direct` divided by time of `last` is 1.0 to 1.4 at 1 KiB and 0.7 to 0.8 at 4 KiB if every rank has a
 * core. With more ranks than cores, time of ari_share_run divided by time of `last`, with 4 and 8 ranks, is 1.0 to 1.15
 * at 1 KiB, 1.0 to 1.1 at 16 KiB, and 0.65 to 1.0 at 32 KiB. */
enum { LAST_BYTES = 2048, LAST_BYTES_CROWDED = 16384 };

static ari_sim_comm *sim_of(ar_comm *c)
{
    return (ari_sim_comm *)c;
}

static ar_status sim_error(const ar_comm *c, const char **message)
{
    const ari_world *w = ari_group_world(((const ari_sim_comm *)c)->member.group);
    *message = ari_world_error(w);
    return ari_world_status(w);
}

static void sim_abort(ar_comm *c, ar_status st, const char *why)
{
    const ari_member *m = &sim_of(c)->member;
    char message[512];
    snprintf(message, sizeof message, "rank %d aborted: %s", m->rank, why);
    ari_world_fail(ari_group_world(m->group), m->rank, NULL, st, message);
}

/* --- algorithms --------------------------------------------------------------------------------------------------- */

/* Each of two ranks reads what it needs from a ready copy of the other's input. Bytes and bits equal those of a ring,
 * because two numbers may be added in either order. bytes: size of the whole, of which each rank has half. */
static bool swap_run(ari_sim_comm *s, const ari_call *call, size_t bytes)
{
    const bool gathers = call->kind == ARI_ALL_GATHER, scatters = call->kind == ARI_REDUCE_SCATTER;
    const size_t part = call->counts ? bytes / 2 : bytes, mine = (size_t)s->member.index * part, its = part - mine;
    const char *input = call->input.ptr;
    const void *peer_input = ari_member_swap(&s->member, call, scatters ? input + its : input, part);
    if (!peer_input)
        return false;
    if (gathers) {
        char *out = call->out.ptr;
        if (out + mine != input)
            ari_copy_bytes(out + mine, input, part);
        ari_copy_bytes(out + its, peer_input, part);
    } else {
        ari_reduce_kernel(call->dtype, call->op)
            .pair(call->out.ptr, scatters ? input + mine : input, peer_input,
                  call->counts ? call->counts[0] : call->count);
    }
    ari_moved_add(&s->base.moved, part, 0);
    return true;
}

static bool can_swap(const ari_sim_comm *s, const ari_call *call, size_t bytes)
{
    const bool shared = call->kind == ARI_ALL_GATHER || call->kind == ARI_REDUCE_SCATTER;
    return s->swaps && bytes <= ARI_SWAP_BYTES &&
           (call->kind == ARI_ALL_REDUCE || (shared && call->counts[0] == call->counts[1]));
}

/* Members choose the algorithm only from values that they agree on, so that all choose the same. */
static ar_status auto_run(ar_comm *c, const ari_call *call)
{
    ari_sim_comm *s = sim_of(c);
    if (!ari_kind_of(call->kind)->ring)
        return ari_direct_run(c, call);
    const size_t count = call->counts ? ari_counts_before(call->counts, c->size) : call->count;
    const size_t bytes = count * ar_dtype_bytes(call->dtype);
    if (can_swap(s, call, bytes) && swap_run(s, call, bytes))
        return AR_OK;
    const bool cores = ari_world_has_cores(ari_group_world(s->member.group));
    if (bytes <= (cores ? LAST_BYTES : LAST_BYTES_CROWDED))
        return ari_last_run(c, call);
    const bool shares = !cores && call->kind == ARI_ALL_REDUCE && c->size <= ARI_MAX_PARTS && ari_wire_is_plain(s);
    return shares ? ari_share_run(s, call) : ari_direct_run(c, call);
}

/* --- split -------------------------------------------------------------------------------------------------------- */

static ari_sim_comm *member_comm(ari_group *g, int index)
{
    return sim_of(ari_group_comm(g, index));
}

/* Called when the world, and with it the group, ends. */
static void leave_split(ari_sim_comm *c)
{
    if (c->split_group)
        ari_channels_leave(c->split_channels, c->split_index);
    c->split_group = NULL;
}

static ar_status make_groups(ari_group *g, void *arg)
{
    (void)arg;
    const int n = ari_group_size(g);
    ar_status st = AR_OK;
    ARI_OWNED int *members = malloc(2 * (size_t)n * sizeof *members);
    if (!members)
        return ar_error_set(AR_ERR_MEMORY, "split: no memory for %d ranks", n);
    int *ranks = members + n;
    for (int i = 0; i < n; i++)
        member_comm(g, i)->split_group = NULL;
    for (int i = 0; i < n; i++) {
        const int color = ari_group_call(g, i)->color;
        if (color < 0 || member_comm(g, i)->split_group)
            continue;
        const int size = ari_group_members_of(g, color, members);
        for (int k = 0; k < size; k++)
            ranks[k] = ari_group_rank(g, members[k]);
        ari_group *subgroup = NULL;
        ari_channels *channels = NULL;
        AR_TRY_TO(done, st, ari_group_create(&subgroup, ari_group_world(g), ranks, size));
        AR_TRY_TO(done, st, ari_channels_create(&channels, subgroup));
        for (int k = 0; k < size; k++) {
            ari_sim_comm *member = member_comm(g, members[k]);
            member->split_group = subgroup;
            member->split_channels = channels;
            member->split_index = k;
        }
    }
done:
    for (int i = 0; st != AR_OK && i < n; i++)
        leave_split(member_comm(g, i));
    return st;
}

static void undo_split(ar_comm *c)
{
    leave_split(sim_of(c));
}

static ar_status sim_split(ar_comm **out, ar_comm *c, int color, int key)
{
    ari_sim_comm *s = sim_of(c), *split_comm = NULL;
    const ari_call call = {.kind = ARI_SPLIT, .dtype = AR_U8, .color = color, .key = key, .tag = ""};
    ari_fault_before(s, &call);
    AR_TRY(ari_member_enter(&s->member, c, &call, &(ari_alone){.run = make_groups, .undo = undo_split}));
    ari_member_done(&s->member);
    if (!s->split_group)
        return AR_OK;
    const ar_status st =
        ari_sim_comm_create(&split_comm, s->split_group, s->split_channels, s->split_index, s->options);
    s->split_group = NULL;
    if (st != AR_OK) {
        ari_channels_leave(s->split_channels, s->split_index);
        return st;
    }
    *out = &split_comm->base;
    return AR_OK;
}

static void sim_destroy(ar_comm *c)
{
    if (!sim_of(c)->of_world) /* ar_sim_run ends the world's communicator itself */
        ari_sim_comm_free(sim_of(c));
}

static const ari_run_fn algorithms[] = {
    [AR_SIM_AUTO] = auto_run,
    [AR_SIM_DIRECT] = ari_direct_run,
    [AR_SIM_RING] = ari_ring_run,
    [AR_SIM_LAST] = ari_last_run,
};

/* Runs a collective. Ranks that share a device exchange data on the host, so that a fault hits the same transfer and is
 * reported in the same words wherever the data are. Memory that a lost transfer leaves unchanged is copied to the host
 * too. send and recv meet faults in their channel. */
static ar_status sim_run(ar_comm *c, const ari_call *call)
{
    ari_sim_comm *s = sim_of(c);
    const bool is_message = ari_kind_of(call->kind)->has_peer;
    const ari_run_fn run = is_message ? ari_channel_run : algorithms[s->options->algorithm];
    if (!is_message)
        ari_fault_before(s, call);
    const bool on_host = !call->queue || !ari_queue_stream(call->queue);
    return on_host ? run(c, call) : ari_staged_run(c, call, !ari_wire_is_plain(s), run);
}

static const ari_comm_ops sim_ops = {
    .run = sim_run, .split = sim_split, .error = sim_error, .abort = sim_abort, .destroy = sim_destroy};

ar_status ari_sim_comm_create(ari_sim_comm **out, ari_group *g, ari_channels *channels, int index,
                              const ar_sim_options *options)
{
    ari_sim_comm *c = calloc(1, sizeof *c);
    const ar_status st = c ? ari_sim_comm_init(c, &sim_ops, g, index, options)
                           : ar_error_set(AR_ERR_MEMORY, "no memory for a communicator");
    if (st != AR_OK) {
        ari_sim_member_drop(g, index);
        free(c);
        return st;
    }
    c->channels = channels;
    c->swaps = ari_member_can_swap(&c->member) && ari_wire_is_plain(c);
    *out = c;
    return AR_OK;
}

void ari_sim_comm_free(ari_sim_comm *c)
{
    if (!c)
        return;
    ari_channel_ends_free(c);
    ari_channels_leave(c->channels, c->member.index);
    ari_sim_comm_fini(c);
    free(c);
}

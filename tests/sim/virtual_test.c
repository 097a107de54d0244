/* SPDX-License-Identifier: Apache-2.0 */
/* What a collective takes on the cluster of virtual time. No data moves here: the model is asked alone, so that sizes
 * can be what they are on a cluster. */
#include "ref/comm/comm_private.h"
#include "ref/comm/rendezvous_impl.h"
#include "sim/sim_impl.h"
#include "tests/support/test.h"

enum { MOST = 64 };
static const double ALPHA = 2e-6, BETA = 300e9;
static const ar_sim_cluster one_node = {.ranks_per_node = 0, .inside = {2e-6, 300e9}, .between = {0, 1}, .flops = 1e12};

/* A collective: when its members come, and what the model says. */
typedef struct meeting {
    int n;
    ari_call call[MOST];
    uint64_t comes[MOST], ends[MOST]; /* ns */
    int from[MOST];
} meeting;

static void ask(meeting *m, const ar_sim_cluster *cluster)
{
    ari_world *w = NULL;
    cr_assert_ok(ari_world_create(&w, m->n, 1, NULL));
    ari_group *g = ari_world_group(w);
    for (int i = 0; i < m->n; i++) {
        g->slot[i].call = m->call[i];
        g->slot[i].virtual_begin_ns = m->comes[i];
    }
    ari_virtual_cost((void *)(uintptr_t)cluster, g);
    for (int i = 0; i < m->n; i++) {
        m->ends[i] = g->slot[i].virtual_end_ns;
        m->from[i] = g->slot[i].virtual_from;
    }
    ari_world_destroy(w);
}

static meeting all_call(int n, ari_call call)
{
    meeting m = {.n = n};
    for (int i = 0; i < n; i++)
        m.call[i] = call;
    return m;
}

static uint64_t latest(const meeting *m)
{
    uint64_t ns = 0;
    for (int i = 0; i < m->n; i++)
        ns = m->ends[i] > ns ? m->ends[i] : ns;
    return ns;
}

static void expect_near(const meeting *m, double seconds, double tolerance, const char *what, size_t bytes)
{
    const double got = (double)latest(m) * 1e-9;
    cr_expect(fabs(got - seconds) <= tolerance * seconds, "%s of %zu bytes on %d ranks: %.9g s, not %.9g", what, bytes,
              m->n, got, seconds);
}

static void expect_ends(const meeting *m, const uint64_t *ends)
{
    for (int i = 0; i < m->n; i++)
        cr_expect_eq(m->ends[i], ends[i], "rank %d: %llu", i, (unsigned long long)m->ends[i]);
}

static const int worlds[] = {2, 3, 4, 8, 16, 64};
static const size_t sizes[] = {4, 1000, 1024, 65536, 1000003, (1 << 20), 25 << 20, 100 << 20, 1u << 30};
enum { WORLDS = sizeof worlds / sizeof *worlds, SIZES = sizeof sizes / sizeof *sizes };

/* --- closed forms ------------------------------------------------------------------------------------------------- */

Test(virtual, rings_take_what_their_closed_forms_say)
{
    for (int w = 0; w < WORLDS; w++) {
        for (int s = 0; s < SIZES; s++) {
            const int n = worlds[w];
            const double d = (double)sizes[s], part = (double)(n - 1) / n;
            size_t counts[MOST], start;
            for (int i = 0; i < n; i++)
                ari_comm_slice(sizes[s], n, i, &start, &counts[i]);
            const double half = (n - 1) * ALPHA + part * d / BETA;
            meeting m = all_call(n, (ari_call){.kind = ARI_ALL_REDUCE, .dtype = AR_U8, .count = sizes[s]});
            ask(&m, &one_node);
            expect_near(&m, 2 * half, 0.01, "all_reduce", sizes[s]);
            m = all_call(n, (ari_call){.kind = ARI_ALL_GATHER, .dtype = AR_U8, .counts = counts});
            ask(&m, &one_node);
            expect_near(&m, half, 0.01, "all_gather", sizes[s]);
        }
    }
}

Test(virtual, direct_messages_go_one_by_one_through_a_port)
{
    for (int w = 0; w < WORLDS; w++) {
        for (int s = 0; s < SIZES; s++) {
            const int n = worlds[w];
            const size_t each = sizes[s] / (size_t)n + 1;
            const double t = ALPHA + (double)(n - 1) * (double)each / BETA;
            size_t counts[MOST];
            for (int i = 0; i < n; i++)
                counts[i] = each;
            meeting m = all_call(n, (ari_call){.kind = ARI_ALL_TO_ALL, .dtype = AR_U8, .counts = counts});
            ask(&m, &one_node);
            expect_near(&m, t, 0.0005, "all_to_all", sizes[s]);
        }
    }
}

Test(virtual, a_message_takes_latency_and_bytes_once_both_have_come)
{
    meeting m = {.n = 2, .comes = {1000, 500}};
    m.call[0] = (ari_call){.kind = ARI_SEND, .dtype = AR_F32, .count = 75000, .peer = 1};
    m.call[1] = (ari_call){.kind = ARI_RECV, .dtype = AR_F32, .count = 75000, .peer = 0};
    ask(&m, &one_node);
    for (int i = 0; i < 2; i++) {
        cr_expect_eq(m.ends[i], 1000 + 1000 + 2000);
        cr_expect_eq(m.from[i], 0, "the sender came last");
    }
}

Test(virtual, barrier_split_and_a_group_of_one)
{
    meeting m = all_call(5, (ari_call){.kind = ARI_BARRIER, .dtype = AR_U8});
    ask(&m, &one_node);
    cr_expect_eq(latest(&m), 2 * 4 * 2000);
    m = all_call(3, (ari_call){.kind = ARI_SPLIT, .dtype = AR_U8});
    m.comes[1] = 777;
    ask(&m, &one_node);
    for (int i = 0; i < 3; i++) {
        cr_expect_eq(m.ends[i], 777, "a split takes no time, but needs everybody");
        cr_expect_eq(m.from[i], 1);
    }
    size_t one = 1000000;
    const ari_call calls[] = {{.kind = ARI_ALL_REDUCE, .count = one},
                              {.kind = ARI_ALL_GATHER, .counts = &one},
                              {.kind = ARI_REDUCE_SCATTER, .counts = &one},
                              {.kind = ARI_BROADCAST, .count = one},
                              {.kind = ARI_ALL_TO_ALL, .counts = &one},
                              {.kind = ARI_EXCHANGE},
                              {.kind = ARI_BARRIER}};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        m = all_call(1, calls[i]);
        m.comes[0] = 31;
        ask(&m, &one_node);
        cr_expect_eq(m.ends[0], 31, "%s of a group of one takes no time", ari_kind_name(calls[i].kind));
    }
}

/* --- uneven counts ------------------------------------------------------------------------------------------------ */

Test(virtual, an_uneven_all_gather_waits_for_its_large_part_at_every_step)
{
    /* Rank 0 has 300000 bytes (1000 ns), the others nothing. They pass it on: 1, then 2, then 3 gets it. */
    const size_t counts[4] = {300000, 0, 0, 0};
    meeting m = all_call(4, (ari_call){.kind = ARI_ALL_GATHER, .dtype = AR_U8, .counts = counts});
    ask(&m, &one_node);
    /* Rank 0 receives empty chunks of 3, 2, 1, but 3 does its second step no earlier than 2 its first, and so on:
     * nobody before rank 1 is late, so rank 0 is not. */
    expect_ends(&m, (const uint64_t[]){3 * 2000, 3 * 2000 + 1000, 3 * 2000 + 2000, 3 * 2000 + 3000});
}

Test(virtual, an_uneven_reduce_scatter_carries_its_large_sum_round_to_its_owner)
{
    /* Rank 0's sum begins on 1 and goes over 2 and 3 to 0: 1000 ns at each step, on one rank at a time. */
    const size_t counts[4] = {300000, 0, 0, 0};
    meeting m = all_call(4, (ari_call){.kind = ARI_REDUCE_SCATTER, .dtype = AR_U8, .counts = counts});
    ask(&m, &one_node);
    expect_ends(&m, (const uint64_t[]){3 * 2000 + 3000, 3 * 2000, 3 * 2000 + 1000, 3 * 2000 + 2000});
}

Test(virtual, uneven_messages_fill_the_ports_they_use)
{
    /* Rank 0 sends 600000 to 1 and 300000 to 2; rank 2 sends 300000 to 1. Round of next neighbours: 0 to 1 (2000 ns),
     * 2 to 0 (nothing), then of second ones: 0 to 2 (until 3000), 2 to 1 (until 3000). */
    const size_t sent[3][3] = {{0, 600000, 300000}, {0, 0, 0}, {0, 300000, 0}};
    meeting m = {.n = 3};
    for (int i = 0; i < 3; i++)
        m.call[i] = (ari_call){.kind = ARI_ALL_TO_ALL, .dtype = AR_U8, .counts = sent[i]};
    ask(&m, &one_node);
    expect_ends(&m, (const uint64_t[]){3000 + 2000, 3000 + 2000, 3000 + 2000});
}

Test(virtual, an_exchange_concerns_only_those_that_move_something)
{
    /* 1 and 2 exchange 300000 bytes at once, both ways; 0 does nothing, 3 comes late and does nothing. */
    const ar_p2p ops[2][2] = {{{.peer = 2, .send = true, .count = 300000}, {.peer = 2, .count = 300000}},
                              {{.peer = 1, .count = 300000}, {.peer = 1, .send = true, .count = 300000}}};
    meeting m = all_call(4, (ari_call){.kind = ARI_EXCHANGE, .dtype = AR_U8});
    for (int i = 1; i <= 2; i++) {
        m.call[i].p2p = ops[i - 1];
        m.call[i].count = 2;
    }
    m.comes[3] = 50000;
    ask(&m, &one_node);
    expect_ends(&m, (const uint64_t[]){0, 3000, 3000, 50000});
}

Test(virtual, an_exchange_adds_up_what_goes_to_one_peer)
{
    const ar_p2p sends[3] = {{.peer = 1, .send = true, .count = 100000},
                             {.peer = 1, .send = true, .count = 150000},
                             {.peer = 1, .send = true, .count = 50000}};
    const ar_p2p gets[3] = {{.peer = 0, .count = 100000}, {.peer = 0, .count = 150000}, {.peer = 0, .count = 50000}};
    meeting m = all_call(2, (ari_call){.kind = ARI_EXCHANGE, .dtype = AR_BF16, .count = 3, .p2p = gets});
    m.call[0].p2p = sends;
    ask(&m, &one_node);
    expect_ends(&m, (const uint64_t[]){2000 + 2000, 2000 + 2000});
}

/* --- late members ------------------------------------------------------------------------------------------------- */

Test(virtual, everyone_waits_as_long_as_the_last_is_late)
{
    const ari_kind rings[] = {ARI_ALL_REDUCE, ARI_BARRIER, ARI_ALL_GATHER, ARI_REDUCE_SCATTER};
    size_t counts[8];
    for (int i = 0; i < 8; i++)
        counts[i] = 4096;
    for (size_t k = 0; k < sizeof rings / sizeof *rings; k++) {
        const bool v = rings[k] == ARI_ALL_GATHER || rings[k] == ARI_REDUCE_SCATTER;
        meeting even = all_call(8, (ari_call){.kind = rings[k], .count = v ? 0 : 4096, .counts = v ? counts : NULL});
        meeting late = even;
        late.comes[2] = 123456;
        ask(&even, &one_node);
        ask(&late, &one_node);
        for (int i = 0; i < 8; i++) {
            cr_expect_eq(late.ends[i], even.ends[i] + 123456, "%s: rank %d", ari_kind_name(rings[k]), i);
            cr_expect_eq(late.from[i], 2, "%s: rank %d waits for %d", ari_kind_name(rings[k]), i, late.from[i]);
        }
    }
}

Test(virtual, a_late_leaf_of_a_broadcast_holds_up_those_after_it_alone)
{
    /* 30000 bytes are 100 ns. Root 0, then 1, 2, 3. */
    meeting m = all_call(4, (ari_call){.kind = ARI_BROADCAST, .dtype = AR_U8, .count = 30000});
    m.comes[2] = 10000;
    ask(&m, &one_node);
    expect_ends(&m, (const uint64_t[]){100, 2100, 12100, 14100});
    for (int i = 0; i < 4; i++)
        cr_expect_eq(m.from[i], i < 2 ? 0 : 2);
}

Test(virtual, a_late_sender_to_one_does_not_hold_up_the_others)
{
    /* Root 2; 0, 1, 3 send 300 ns each; 1, its next neighbour, comes at 5000: by then 0 and 3 are through. */
    size_t to_two[4] = {0, 0, 90000, 0}, nothing[4] = {0};
    meeting m = all_call(4, (ari_call){.kind = ARI_ALL_TO_ALL, .dtype = AR_U8, .counts = to_two});
    m.call[2].counts = nothing;
    m.comes[1] = 5000;
    ask(&m, &one_node);
    expect_ends(&m, (const uint64_t[]){2300, 7300, 7300, 2600});
    cr_expect_eq(m.from[2], 1);
}

Test(virtual, a_late_member_of_an_all_to_all_does_not_wait_for_busy_ports)
{
    /* 300 ns a message. Four members have 900 ns for each other; the fifth comes at 800 and has 1200 of its own. */
    const size_t counts[5] = {90000, 90000, 90000, 90000, 90000};
    meeting m = all_call(5, (ari_call){.kind = ARI_ALL_TO_ALL, .dtype = AR_U8, .counts = counts});
    m.comes[4] = 800;
    ask(&m, &one_node);
    expect_ends(&m, (const uint64_t[]){3200, 3400, 3700, 4000, 4000});
    for (int i = 1; i < 5; i++)
        cr_expect_eq(m.from[i], 4);
}

/* --- two nodes ---------------------------------------------------------------------------------------------------- */

static const ar_sim_cluster two_nodes = {
    .ranks_per_node = 4, .inside = {2e-6, 300e9}, .between = {5e-6, 25e9}, .flops = 1e12};

Test(virtual, the_slowest_link_governs_a_ring)
{
    for (int s = 0; s < SIZES; s++) {
        const double d = (double)sizes[s];
        meeting m = all_call(8, (ari_call){.kind = ARI_ALL_REDUCE, .dtype = AR_U8, .count = sizes[s]});
        ask(&m, &two_nodes);
        expect_near(&m, 14 * 5e-6 + 14.0 / 8 * d / 25e9, 0.01, "all_reduce", sizes[s]);
        const uint64_t slow = latest(&m);
        cr_expect(m.ends[0] == slow && m.ends[4] == slow, "those with the slow links are last");
        m = all_call(8, (ari_call){.kind = ARI_BROADCAST, .dtype = AR_U8, .count = sizes[s]});
        ask(&m, &two_nodes);
        expect_near(&m, 6 * 2e-6 + 5e-6 + d / 25e9, 0.0005, "broadcast", sizes[s]);
    }
}

/* Nobody waits for a message between nodes that is not its own, however members are numbered. */
Test(virtual, an_all_to_all_over_nodes_keeps_every_port_busy)
{
    const size_t counts[8] = {25000, 25000, 25000, 25000, 25000, 25000, 25000, 25000};
    ar_sim_cluster c = two_nodes;
    for (; c.ranks_per_node >= 1; c.ranks_per_node /= 2) {
        meeting m = all_call(8, (ari_call){.kind = ARI_ALL_TO_ALL, .dtype = AR_U8, .counts = counts});
        const int near = c.ranks_per_node - 1;
        ask(&m, &c);
        for (int i = 0; i < 8; i++)
            cr_expect_eq(m.ends[i], (uint64_t)round(5000 + near * 25000.0 / 300 + (7 - near) * 1000.0));
    }
    /* Five members on nodes of two: the last one, alone on its node, gets four messages over the slow link. */
    c.ranks_per_node = 2;
    meeting m = all_call(5, (ari_call){.kind = ARI_ALL_TO_ALL, .dtype = AR_U8, .counts = counts});
    ask(&m, &c);
    cr_expect_eq(m.ends[4], 5000 + 4 * 1000);
}

Test(virtual, messages_take_the_link_between_their_two_ranks)
{
    /* From 3: to 4 in the other node, to 2 in its own; 50000 bytes are 2000 ns there and 167 here. */
    size_t from_three[8] = {0, 0, 50000, 0, 50000, 0, 0, 0}, nothing[8] = {0};
    meeting m = all_call(8, (ari_call){.kind = ARI_ALL_TO_ALL, .dtype = AR_U8, .counts = nothing});
    m.call[3].counts = from_three;
    ask(&m, &two_nodes);
    cr_expect_eq(m.ends[2], 167 + 2000);
    cr_expect_eq(m.ends[4], 167 + 7000, "after what went to 2, in the node");
    cr_expect_eq(m.ends[3], 167 + 7000);
    cr_expect_eq(m.ends[0], 0);
}

Test(virtual, more_nodes_than_members_of_the_last)
{
    const ar_sim_cluster by_two = {.ranks_per_node = 2, .inside = {1e-6, 1e12}, .between = {4e-6, 1e12}, .flops = 1e12};
    meeting m = all_call(5, (ari_call){.kind = ARI_BARRIER, .dtype = AR_U8});
    ask(&m, &by_two);
    cr_expect_eq(latest(&m), 8 * 4000);
    const ar_sim_cluster alone = {.ranks_per_node = 1, .inside = {9, 1}, .between = {4e-6, 1e12}, .flops = 1e12};
    ask(&m, &alone);
    cr_expect_eq(latest(&m), 8 * 4000, "one rank a node: every link is between nodes");
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/sim.h"
#include "sim/sim_private.h"
#include "tests/support/test.h"

/* Faults of the transport as text, there and back. */
Test(fault_text, what_is_described_reads_as_the_same_fault)
{
    unsigned seen = 0;
    for (uint64_t seed = 0; seed < 2000; seed++) {
        char text[128];
        const ar_sim_fault drawn = ari_sim_fault_draw(seed, 64, 1000, UINT64_C(3000000000));
        ar_sim_fault read = {.rank = -1};
        ari_sim_fault_describe(&drawn, text, sizeof text);
        cr_assert_eq(ari_sim_fault_parse(&read, text), AR_OK, "%s: %s", text, ar_error_message());
        cr_assert(read.kind == drawn.kind && read.rank == drawn.rank && read.collective == drawn.collective &&
                      read.transfer == drawn.transfer && read.bit == drawn.bit && read.ns == drawn.ns,
                  "%s", text);
        seen |= 1u << drawn.kind;
    }
    cr_expect_eq(seen, (1u << AR_SIM_FAULT_KINDS) - 1);
}

Test(fault_text, words_stand_in_any_order_with_any_space)
{
    ar_sim_fault f;
    cr_assert_ok(ari_sim_fault_parse(&f, "  corrupt bit 77,transfer 3,  collective 14\trank 2 "));
    cr_expect(f.kind == AR_SIM_CORRUPT && f.rank == 2 && f.collective == 14 && f.transfer == 3 && f.bit == 77);
    cr_assert_ok(ari_sim_fault_parse(&f, "kill rank 0 collective 1"));
    cr_expect(f.kind == AR_SIM_KILL && f.transfer == 0);
    cr_assert_ok(ari_sim_fault_parse(&f, "slow rank 4095 collective 18446744073709551615 ns 0"));
    cr_expect(f.rank == 4095 && f.collective == UINT64_MAX && f.ns == 0);
}

Test(fault_text, what_is_wrong_is_named_and_changes_nothing)
{
    static const char *const wrong[][2] = {
        {"", "''"},
        {"explode rank 0 collective 1", "'explode'"},
        {"kill", "the rank is missing"},
        {"kill rank 1", "the collective is missing"},
        {"kill collective 1", "the rank is missing"},
        {"delay rank 0 collective 1", "how long"},
        {"kill rank 1 collective 2 bit 3", "'bit' says nothing about a kill"},
        {"delay rank 1 collective 2 transfer 3 ns 4", "'transfer' says nothing about a delay"},
        {"kill rank 1 collective", "'' is no number for 'collective'"},
        {"kill rank -1 collective 2", "'-1'"},
        {"kill rank 1 collective 2x", "'2x'"},
        {"kill rank 1 collective 18446744073709551616", "'18446744073709551616'"},
        {"kill rank 2147483648 collective 1", "no rank 2147483648"},
        {"kill rank 1 collective 0", "from 1"},
        {"kill rank 1 rank 2 collective 1", "twice"},
        {"kill rank 1 collective 2 and 3", "'and'"},
        {"kill rank 000000000000000000000000000000000001 collective 1", "too long"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        ar_sim_fault f = {.kind = AR_SIM_DROP, .rank = 5, .collective = 6};
        cr_expect_refused(ari_sim_fault_parse(&f, wrong[i][0]), AR_ERR_ARG, wrong[i][1]);
        cr_expect(f.kind == AR_SIM_DROP && f.rank == 5 && f.collective == 6, "%s", wrong[i][0]);
    }
}

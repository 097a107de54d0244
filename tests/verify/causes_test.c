/* SPDX-License-Identifier: Apache-2.0 */
/* Every sentence of the table of causes is well formed, and every call's cause has one. tests/cli/causes_test.py: the
 * page has the table's. */
#include "tests/verify/pattern_support.h"
#include "verify/check/check_run.h"

static void expect_well_formed(const ari_cause *row)
{
    const bool section = row->passes && !row->passes[0];
    const char *texts[] = {row->text, row->looks};
    cr_expect(!section || (!row->id && row->looks[0] && !row->text[0]), "%s", row->looks);
    cr_expect(row->id ? row->text[0] && row->kind != ARI_FOUND_NOTHING && row->confidence > 0 : row->confidence == 0,
              "%s", row->text);
    for (size_t k = 0; k < 2; k++) {
        for (const char *open = strchr(texts[k], '{'); open; open = strchr(open + 1, '{')) {
            const size_t name = strcspn(open + 1, ":}"), all = strcspn(open + 1, "}");
            cr_expect(name > 0 && open[1 + all] == '}', "%s", open);
            cr_expect(all == name || (all == name + 4 && open[2 + name] == '.' && strchr("efg", open[4 + name])), "%s",
                      open);
        }
    }
}

Test(causes, every_sentence_is_well_formed)
{
    size_t calls = 0;
    const ari_cause *row;
    for (size_t i = 0; (row = ari_cause_at(i)) != NULL; i++) {
        expect_well_formed(row);
        for (int k = 0; k < ARI_CALL_CAUSES; k++)
            calls += row->id && strcmp(row->id, ari_call_causes[k]) == 0;
    }
    cr_expect_eq(calls, ARI_CALL_CAUSES);
}

VALUE(by_3, 3.0f * x)
VALUE(by_731, 0.731f * x)
VALUE(a_quarter_of_one_half, i % 16 < 8 ? 0.25f * x : 0.0f)

Test(causes, evidence_has_the_numbers_of_the_sentence)
{
    static const trace scaled = {"one wrong scalar",
                                 "model.norm.weight",
                                 'g',
                                 WHOLE(3, 64),
                                 by_731,
                                 CAUSE("wrong_scalar"),
                                 HINT("the reference times 0.731: one wrong scalar")};
    static const trace thrice = {"N times", "model.norm.weight", 'g', WHOLE(3, 64), by_3, CAUSE("reduced_again")};
    SCOPED(world_free) world w;
    expect_trace(&scaled, 3);
    expect_trace(&thrice, 3);
    world_begin(&w, &thrice, 3);
    const ari_diagnosis q = found(&w);
    cr_assert_eq(q.evidence.numbers, 1);
    cr_expect(strcmp(q.evidence.number[0].name, "tp") == 0 && q.evidence.number[0].value == 3.0);
}

/* A row number makes what is left unlike any rounding, and unlike any cause. */
VALUE(nearly_minus_half, -0.5f * x + (float)((i * 2654435761u >> 7) % 1000u) * 0.0004f - 0.2f)

Test(causes, unknown_says_the_nearest)
{
    static const trace t = {"noise beside a factor", "model.layers.0.mlp", 'f', WHOLE(1, 2, 8, 16), nearly_minus_half};
    SCOPED(world_free) world w;
    world_begin(&w, &t, 1);
    const ari_diagnosis p = found(&w);
    cr_expect_str_eq(cause_of(&p), "unknown", "%s", p.hint);
    cr_expect(strstr(p.hint, "; nearest: wrong_scalar, which leaves 0."), "%s", p.hint);
    cr_assert_gt(p.evidence.considered, 0);
    cr_expect_str_eq(p.evidence.consider[0].cause, "wrong_scalar");
    cr_expect(p.evidence.consider[0].explained > 0.5 && p.evidence.consider[0].explained < 1.0);
}

/* Of one rank, or of equal copies, nothing is said that takes several. */
Test(causes, one_rank_lacks_no_collective)
{
    static const char *const of_ranks[] = {"missing_all_reduce", "missing_all_gather", "missing_broadcast",
                                           "missing_average",    "replicas_apart",     "part_of_one_rank"};
    static const trace t = {"one rank", "model.layers.0.mlp", 'b', WHOLE(1, 2, 8, 16), a_quarter_of_one_half};
    SCOPED(world_free) world w;
    world_begin(&w, &t, 1);
    const ari_diagnosis p = found(&w);
    for (size_t i = 0; i < sizeof of_ranks / sizeof *of_ranks; i++)
        cr_expect_str_neq(cause_of(&p), of_ranks[i], "%s", p.hint);
}

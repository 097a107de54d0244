/* SPDX-License-Identifier: Apache-2.0 */
/* The table of causes and docs/causes.md have the same identifiers, and every sentence is well formed. */
#include "tests/verify/pattern_support.h"
#include "verify/check/call_causes.h"
#include "verify/diagnose/case.h"

enum { MOST = 400 };

/* Calls f for every row of the table. */
static void for_each_row(void (*f)(const ari_cause *row, void *user), void *user)
{
    for (int part = 0; part < 2; part++) {
        size_t n;
        const ari_cause *row = part ? ari_causes_of_places(&n) : ari_causes_of_numbers(&n);
        for (size_t i = 0; i < n; i++)
            f(&row[i], user);
    }
}

typedef struct ids {
    char id[MOST][64];
    size_t n;
    bool seen[MOST];
} ids;

static size_t find(const ids *d, const char *id)
{
    size_t i = 0;
    while (i < d->n && strcmp(d->id[i], id) != 0)
        i++;
    return i;
}

/* Rows of the document's tables: "| `missing_all_reduce` | ..". */
static void read_document(ids *d)
{
    char line[1024];
    FILE *f = fopen(TEST_SOURCE_DIR "/docs/causes.md", "r");
    cr_assert_not_null(f);
    while (fgets(line, sizeof line, f)) {
        if (strncmp(line, "| `", 3) != 0)
            continue;
        char *end = strchr(line + 3, '`');
        cr_assert(end && d->n < MOST);
        *end = '\0';
        cr_expect_eq(find(d, line + 3), d->n, "%s is there twice", line + 3);
        snprintf(d->id[d->n++], sizeof d->id[0], "%s", line + 3);
    }
    fclose(f);
}

static void expect_documented(const ari_cause *row, void *user)
{
    ids *d = user;
    if (!row->id)
        return;
    const size_t i = find(d, row->id);
    cr_expect(i < d->n, "docs/causes.md lacks %s", row->id);
    d->seen[i < d->n ? i : 0] = true;
}

Test(causes, table_and_document_have_the_same_identifiers)
{
    static ids d;
    read_document(&d);
    for_each_row(expect_documented, &d);
    for (int i = 0; i < ARI_CALL_CAUSES; i++)
        expect_documented(&(ari_cause){.id = ari_call_causes[i]}, &d);
    for (size_t i = 0; i < d.n; i++)
        cr_expect(d.seen[i], "no row has %s", d.id[i]);
}

static void expect_well_formed(const ari_cause *row, void *user)
{
    (void)user;
    const char *texts[] = {row->text, row->looks};
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
    for_each_row(expect_well_formed, NULL);
}

/* --- what the values rule out ------------------------------------------------------------------------------------- */

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

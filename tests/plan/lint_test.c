/* SPDX-License-Identifier: Apache-2.0 */
/* Lint: right layouts have nothing to find, and every record from which a collective or an operation is taken, or to
 * which one is added, has. */
#include "ref/core/size.h"
#include "support/layout_draw.h"
#include "support/plan_draw.h"
#include "support/row.h"
#include "support/small.h"
#include "tests/support/test.h"
#include "verify/lint/lint.h"
#include "verify/lint/lint_private.h"

#include <criterion/parameterized.h>

TestSuite(lint, .timeout = 300);

enum { DRAWS = 200, FIRST_SEED = 4100 };

/* In a third of the draws ranks share sequences, in a sixth layers too. With sequence parallelism collectives go beside
 * products, in 1 to 9 chunks. */
static layout_draw draw(int i)
{
    layout_draw d;
    const layout_draw_kind kind = i % 3 < 2 ? DRAW_TENSORS : i % 2 ? DRAW_STAGES : DRAW_CONTEXTS;
    layout_draw_make(&d, kind, FIRST_SEED + (uint64_t)i);
    d.run.parallel.overlap = d.run.parallel.sp ? 1 + i % 9 : 1;
    d.run.parallel.zero = d.run.parallel.zero > 0;
    if (i % 4 == 1)
        layout_draw_add_experts(&d, (uint64_t)i);
    return d;
}

/* Of models with experts, which ranks share out in every way. */
static layout_draw draw_experts(int i)
{
    layout_draw d;
    layout_draw_make(&d, DRAW_EXPERTS, FIRST_SEED + 200 + (uint64_t)i);
    layout_draw_add_more(&d); /* balances */
    d.run.parallel.zero = d.run.parallel.zero > 0;
    d.run.parallel.dp_replicate = 1;
    return d;
}

#define TEXT(d) (layout_draw_text(text, sizeof text, &(d)), text)

/* --- whole records ------------------------------------------------------------------------------------------------ */

Test(lint, random_right_layouts_have_nothing_to_find)
{
    char text[LAYOUT_DRAW_TEXT];
    layout_histogram h = {0};
    for (int i = 0; i < DRAWS; i++) {
        const layout_draw d = draw(i);
        const ar_run run = d.run;
        OWNED(ari_lint_report_destroy) ar_lint_report *r = NULL;
        layout_histogram_add(&h, &d);
        cr_assert_eq(ari_lint(&r, &run, &d.config), AR_OK, "%s\n%s", ar_error_message(), TEXT(d));
        cr_expect_gt(r->operations, 10);
        cr_expect_eq(r->count, 0, "%s: %s %s, %s: has %s, needs %s\n%s", ari_lint_rule_name(r->finding[0].rule),
                     r->finding[0].module, r->finding[0].operation, r->finding[0].axis, r->finding[0].has,
                     r->finding[0].needs, TEXT(d));
    }
    cr_expect(layout_histogram_covers(&h, DRAW_TENSORS));
}

/* Some of them sent to others, of which some have copies; some not cut over tp. */
Test(lint, right_layouts_of_experts_have_nothing_to_find)
{
    char text[LAYOUT_DRAW_TEXT];
    int sent = 0, copied = 0, whole = 0;
    for (int i = 0; i < DRAWS; i++) {
        const layout_draw d = draw_experts(i);
        const ar_run run = d.run;
        const int ep = ari_at_least_one(d.run.parallel.ep);
        OWNED(ari_lint_report_destroy) ar_lint_report *r = NULL;
        cr_assert_eq(ari_lint(&r, &run, &d.config), AR_OK, "%s\n%s", ar_error_message(), TEXT(d));
        cr_expect_eq(r->count, 0, "%s: %s %s, %s: has %s, needs %s\n%s", ari_lint_rule_name(r->finding[0].rule),
                     r->finding[0].module, r->finding[0].operation, r->finding[0].axis, r->finding[0].has,
                     r->finding[0].needs, TEXT(d));
        sent += ep > 1;
        copied += ep > 1 && ari_extent(&d.run.parallel, ari_expert_axes(&d.run.parallel)) > ep;
        whole += ari_experts_unsplit(&d.run.parallel);
    }
    cr_expect(sent > DRAWS / 4 && copied >= DRAWS / 20 && whole > DRAWS / 20, "%d sent, %d copied, %d whole", sent,
              copied, whole);
}

/* Two of three are made wrong where they can be: on several ranks. */
Test(lint, random_plans_are_right_or_wrong_as_they_are_drawn)
{
    enum { PLANS = 500 };
    int right = 0, wrong = 0;
    for (int i = 0; i < PLANS; i++) {
        const layout_draw d = draw(i);
        char text[PLAN_DRAW_TEXT];
        uint64_t seed = d.seed;
        if (!plan_draw_knows(&d.config) || d.config.experts.n > 0)
            continue;
        ar_run run = d.run;
        ar_lint_report *r = NULL;
        const bool split = d.run.parallel.tp > 1, broken = split && i % 3 != 0;
        plan_draw(text, &seed, &d.config, (plan_draw_options){.sp = split && d.run.parallel.sp, .wrong = broken});
        cr_assert_eq(ar_plan_parse(&run.plan, text, strlen(text), "drawn"), AR_OK, "%s", ar_error_message());
        const ar_status st = ari_lint(&r, &run, &d.config);
        cr_expect(st == AR_OK || st == AR_ERR_INDIVISIBLE, "seed %d: %s\n%s", (int)d.seed, ar_error_message(), text);
        if (st == AR_OK) {
            cr_expect_eq(r->count > 0, broken, "seed %d: %zu findings in %s\n%s", (int)d.seed, r->count,
                         r->count > 0 ? r->finding[0].module : "none", text);
            wrong += broken;
            right += !broken;
        }
        ari_lint_report_destroy(r);
        ar_plan_fini(&run.plan);
    }
    cr_expect(wrong >= 50 && right >= 150, "%d wrong, %d right", wrong, right);
}

Test(lint, a_layout_that_the_model_cannot_have_is_refused_and_a_fault_is_found)
{
    layout_draw d = draw(0);
    ar_run run = d.run;
    ar_lint_report *r = NULL;
    run.parallel.tp = 1 << 20;
    cr_expect_neq(ari_lint(&r, &run, &d.config), AR_OK);
    cr_expect_null(r);
    run = d.run;
    run.fault = "column_dx_not_reduced";
    run.parallel = (ar_parallel){.tp = 2};
    cr_assert_ok(ari_lint(&r, &run, &d.config));
    cr_expect_gt(r->count, 0);
    ari_lint_report_destroy(r);
}

/* --- rules -------------------------------------------------------------------------------------------------------- */

#define WHOLE ROW(AR_INVARIANT, 0)
#define COPY ROW(AR_REPLICATE, 0)
#define TERM ROW(AR_PARTIAL_SUM, 0)
#define PART(d) ROW(AR_SHARD, (d))
#define BROKEN(name) true, AR_LINT_##name, WHOLE
#define MAKES(...) false, AR_LINT_RULES, __VA_ARGS__

typedef struct pair_case {
    ari_lint_verdict (*rule)(ar_placement a, ar_placement b);
    ar_placement a, b;
    bool broken;
    ar_lint_rule by;
    ar_placement makes;
} pair_case;

static const pair_case pairs[] = {
    {ari_lint_product, COPY, WHOLE, MAKES(WHOLE)},
    {ari_lint_product, COPY, PART(0), MAKES(PART(2))},
    {ari_lint_product, PART(2), PART(1), MAKES(TERM)},
    {ari_lint_product, PART(1), WHOLE, MAKES(PART(1))},
    {ari_lint_product, TERM, WHOLE, MAKES(TERM)},
    {ari_lint_product, TERM, PART(0), BROKEN(missing_reduction)},
    {ari_lint_product, TERM, TERM, BROKEN(product_of_partials)},
    {ari_lint_product, PART(1), PART(0), BROKEN(missing_gather)},
    {ari_lint_product, PART(2), WHOLE, BROKEN(missing_gather)},
    {ari_lint_product, COPY, PART(1), BROKEN(missing_slice)},
    {ari_lint_product, PART(1), PART(1), BROKEN(wrong_placement)},
    {ari_lint_product_dx, PART(2), PART(0), MAKES(TERM)},
    {ari_lint_product_dx, COPY, PART(1), MAKES(PART(2))},
    {ari_lint_product_dw, COPY, PART(2), MAKES(PART(0))},
    {ari_lint_product_dw, PART(2), COPY, MAKES(PART(1))},
    {ari_lint_product_dw, PART(1), PART(1), MAKES(TERM)},
    {ari_lint_product_dw, PART(0), PART(0), MAKES(TERM)},
    {ari_lint_product_dw, PART(1), WHOLE, BROKEN(missing_gather)},
    {ari_lint_product_dw, PART(2), PART(2), BROKEN(missing_gather)},
    {ari_lint_product_dw, TERM, TERM, BROKEN(product_of_partials)},
    {ari_lint_product_dw, WHOLE, TERM, MAKES(TERM)},
    {ari_lint_add, TERM, TERM, MAKES(TERM)},
    {ari_lint_add, TERM, WHOLE, BROKEN(whole_added_to_partial)},
    {ari_lint_add, WHOLE, TERM, BROKEN(whole_added_to_partial)},
    {ari_lint_add, TERM, PART(1), BROKEN(missing_reduction)},
    {ari_lint_add, PART(1), WHOLE, BROKEN(missing_gather)},
    {ari_lint_by_routes, PART(1), PART(1), MAKES(PART(1))},
    {ari_lint_by_routes, PART(2), WHOLE, MAKES(PART(2))},
    {ari_lint_by_routes, TERM, WHOLE, MAKES(TERM)},
    {ari_lint_by_routes, PART(1), WHOLE, BROKEN(missing_gather)},
    {ari_lint_by_routes, WHOLE, PART(1), BROKEN(missing_slice)},
    {ari_lint_by_routes, WHOLE, PART(2), BROKEN(missing_gather)},
    {ari_lint_by_routes, WHOLE, TERM, BROKEN(nonlinear_of_partial)},
    {ari_lint_lookup, WHOLE, PART(0), MAKES(TERM)},
    {ari_lint_lookup, WHOLE, PART(1), MAKES(PART(2))},
    {ari_lint_lookup, PART(1), PART(0), BROKEN(missing_gather)},
    {ari_lint_lookup_gradient, COPY, PART(0), MAKES(PART(0))},
    {ari_lint_lookup_gradient, PART(1), PART(0), BROKEN(missing_gather)},
    {ari_lint_lookup_gradient, PART(1), WHOLE, MAKES(TERM)},
};

static void expect_verdict(size_t i, ari_lint_verdict v, bool broken, ar_lint_rule by, ar_placement makes)
{
    cr_expect_eq(v.broken, broken, "rule case %zu", i);
    if (broken)
        cr_expect_eq(v.rule, by, "rule case %zu: %s, expected %s", i, ari_lint_rule_name(v.rule),
                     ari_lint_rule_name(by));
    else
        cr_expect(ari_lint_same(v.output, makes), "rule case %zu", i);
}

Test(lint, rules_of_two_values_are_those_of_the_page)
{
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        expect_verdict(i, pairs[i].rule(pairs[i].a, pairs[i].b), pairs[i].broken, pairs[i].by, pairs[i].makes);
}

Test(lint, only_what_is_linear_takes_terms_of_a_sum)
{
    const ar_placement term = TERM, part = PART(2), whole = WHOLE;
    expect_verdict(0, ari_lint_elementwise(term, true), false, AR_LINT_RULES, term);
    expect_verdict(1, ari_lint_elementwise(term, false), true, AR_LINT_nonlinear_of_partial, whole);
    expect_verdict(2, ari_lint_elementwise(part, false), false, AR_LINT_RULES, part);
    expect_verdict(3, ari_lint_along(part, 2, true), true, AR_LINT_missing_gather, whole);
    expect_verdict(4, ari_lint_along(part, 1, false), false, AR_LINT_RULES, part);
    expect_verdict(5, ari_lint_along(term, 1, false), true, AR_LINT_nonlinear_of_partial, whole);
    expect_verdict(6, ari_lint_add_parameter(term, whole, 0), true, AR_LINT_whole_added_to_partial, whole);
    expect_verdict(7, ari_lint_add_parameter(part, whole, 0), true, AR_LINT_missing_slice, whole);
}

/* --- records with one thing wrong --------------------------------------------------------------------------------- */

typedef enum damage {
    DROP_CALL,
    DOUBLE_CALL,
    OTHER_GROUP,
    OTHER_RANKS,
    DROP_OPERATION,
    DOUBLE_OPERATION,
    FALSE_CLAIM,
    OTHER_STAGE,
    DAMAGES
} damage;

static const char *const damage_names[] = {"a call dropped",
                                           "a call doubled",
                                           "a call over another group",
                                           "a call of more ranks",
                                           "an operation dropped",
                                           "an operation doubled",
                                           "a false claim",
                                           "an operation on another stage"};

/* The records of a draw, which are damaged at one place after the other and put right again. */
typedef struct damaged {
    ari_ledger record[16];
    size_t stages;
    ari_lint_layout layout;
} damaged;

static void damaged_init(damaged *x, const layout_draw *d)
{
    ar_run run = d->run;
    *x = (damaged){.stages = (size_t)ari_at_least_one(d->run.parallel.pp)};
    cr_assert_ok(ari_lint_record(x->record, &run, &d->config));
    x->layout = ari_lint_layout_of(&run.parallel);
    x->layout.complete = true;
}

static void damaged_fini(damaged *x)
{
    for (size_t i = 0; i < x->stages; i++)
        ari_ledger_fini(&x->record[i]);
}

static size_t findings(const damaged *x)
{
    ar_lint_report r = {0};
    cr_assert_ok(ari_lint_records(&r, NULL, x->record, x->stages, &x->layout));
    free(r.finding);
    return r.count;
}

/* Calls that lint judges: not those of what has no placement, and of several values at once. */
static bool is_judged(damage what, const ari_ledger_operation *op)
{
    const bool several = op->kind == ARI_LEDGER_BROADCAST || op->kind == ARI_LEDGER_ATTENTION ||
                         op->kind == ARI_LEDGER_RING || op->kind == ARI_LEDGER_HEADS || op->kind == ARI_LEDGER_ROUTE ||
                         op->kind == ARI_LEDGER_LOSS || op->kind == ARI_LEDGER_DISPATCH ||
                         op->kind == ARI_LEDGER_TARGETS || op->kind == ARI_LEDGER_UNUSED ||
                         op->kind == ARI_LEDGER_WEIGHT_GATHER;
    const bool placed = op->kind != ARI_LEDGER_LOGITS_MAX && op->kind != ARI_LEDGER_MATRIX &&
                        op->kind != ARI_LEDGER_UPDATE && op->kind != ARI_LEDGER_COUNTS &&
                        op->kind != ARI_LEDGER_LOSS_SUM && op->kind != ARI_LEDGER_AGREEMENT;
    return placed && (what != DOUBLE_CALL || !several);
}

/* Operations that must be there once: values may be placed otherwise and back. */
static bool counts(const ari_ledger_operation *op)
{
    return (op->pass != 's' && op->kind != ARI_LEDGER_REPORT && op->kind != ARI_LEDGER_REDISTRIBUTE) ||
           op->kind == ARI_LEDGER_GRADIENT_SUM;
}

static size_t elsewhere(size_t n, size_t at)
{
    return at + 1 < n ? n - at - 1 : 0;
}

/* Findings with call `at` of an operation damaged. */
static size_t damage_call(damaged *x, damage what, ari_ledger *l, ari_ledger_operation *op, size_t at)
{
    ari_ledger_call *call = &l->call[op->first_call + at];
    const ari_ledger_call kept = *call;
    const ari_ledger_operation was = *op;
    size_t found;
    if (what == OTHER_RANKS)
        call->ranks++;
    else if (what == OTHER_GROUP)
        call->group = call->group == ARI_OVER_TP ? ARI_OVER_DP : ARI_OVER_TP;
    if (what != DROP_CALL && what != DOUBLE_CALL) {
        found = findings(x);
        *call = kept;
        return found;
    }
    ari_ledger_call *all = l->call, *copy = malloc((l->calls + 1) * sizeof *copy);
    cr_assert(copy);
    const size_t first = op->first_call + at, more = what == DOUBLE_CALL;
    memcpy(copy, all, l->calls * sizeof *copy);
    if (more)
        memmove(copy + first + 1, copy + first, (l->calls - first) * sizeof *copy);
    else
        memmove(copy + first, copy + first + 1, elsewhere(l->calls, first) * sizeof *copy);
    l->call = copy;
    op->calls += more ? 1 : (size_t)-1;
    for (ari_ledger_operation *o = op + 1; o < l->operation + l->operations; o++)
        o->first_call += more ? 1 : (size_t)-1;
    found = findings(x);
    for (ari_ledger_operation *o = op + 1; o < l->operation + l->operations; o++)
        o->first_call -= more ? 1 : (size_t)-1;
    *op = was;
    l->call = all;
    free(copy);
    return found;
}

/* Findings without an operation, or with it twice. */
static size_t damage_operation(damaged *x, damage what, ari_ledger *l, size_t at)
{
    ari_ledger_operation *all = l->operation, *copy = malloc((l->operations + 1) * sizeof *copy);
    const size_t n = l->operations;
    cr_assert(copy);
    memcpy(copy, all, n * sizeof *copy);
    if (what == DOUBLE_OPERATION)
        memmove(copy + at + 1, copy + at, (n - at) * sizeof *copy);
    else
        memmove(copy + at, copy + at + 1, elsewhere(n, at) * sizeof *copy);
    l->operation = copy;
    l->operations = what == DOUBLE_OPERATION ? n + 1 : n - 1;
    const size_t found = findings(x);
    l->operation = all;
    l->operations = n;
    free(copy);
    return found;
}

/* other: of another stage. */
static size_t damage_value(damaged *x, damage what, ari_ledger_operation *op, const char *other)
{
    const ari_ledger_operation was = *op;
    if (what == FALSE_CLAIM)
        op->output_placement = (ar_placement){AR_PARTIAL_SUM, 0};
    else
        snprintf(op->name, sizeof op->name, "%s", other);
    const size_t found = findings(x);
    *op = was;
    return found;
}

static const char *place_text(char text[256], damage what, const ari_ledger_operation *op)
{
    snprintf(text, 256, "%s, of %s, %s ('%c')", damage_names[what], op->name, op->operation, op->pass);
    return text;
}

/* A module of a layer of another stage; "" if there is none. */
static const char *module_elsewhere(const damaged *x, size_t stage)
{
    const ari_ledger *l = &x->record[stage > 0 ? stage - 1 : x->stages - 1];
    for (size_t i = 0; i < l->operations && x->stages > 1; i++) {
        if (l->operation[i].pass != 's' && strstr(l->operation[i].name, ".0."))
            return l->operation[i].name;
    }
    return "";
}

/* Damages every place of a record. Returns how many there are. */
static size_t damage_all(damaged *x, damage what, size_t stage, const char *draw_text)
{
    const char *other = module_elsewhere(x, stage);
    ari_ledger *l = &x->record[stage];
    size_t places = 0;
    char text[256];
    for (size_t i = 0; i < l->operations; i++) {
        ari_ledger_operation *op = &l->operation[i];
        for (size_t k = 0; what <= OTHER_RANKS && is_judged(what, op) && k < op->calls; k++, places++)
            cr_expect_gt(damage_call(x, what, l, op, k), 0, "%s: is not found: %s over %d\n%s",
                         place_text(text, what, op), l->call[op->first_call + k].tag, l->call[op->first_call + k].group,
                         draw_text);
        if ((what == DROP_OPERATION || what == DOUBLE_OPERATION) && counts(op) && places++ % 5 == 0)
            cr_expect_gt(damage_operation(x, what, l, i), 0, "%s: is not found\n%s", place_text(text, what, op),
                         draw_text);
        const bool claims = what == FALSE_CLAIM && op->makes_so && op->output_placement.kind != AR_PARTIAL_SUM &&
                            x->layout.size[ARI_AXIS_TP] > 1;
        const bool moves = what == OTHER_STAGE && other[0] != '\0' && op->pass != 's';
        if ((claims || moves) && places++ % 7 == 0)
            cr_expect_gt(damage_value(x, what, op, other), 0, "%s: is not found\n%s", place_text(text, what, op),
                         draw_text);
    }
    return places;
}

/* In a third of the draws experts are shared out. */
static layout_draw draw_to_damage(damage what, int i)
{
    if (what == OTHER_STAGE)
        return draw(6 * i + 5); /* of those that draw stages */
    return i % 3 == 2 ? draw_experts(i) : draw(i);
}

/* Each in a process of its own. */
ParameterizedTestParameters(lint, every_damage_is_found)
{
    static damage all[DAMAGES];
    for (int i = 0; i < DAMAGES; i++)
        all[i] = (damage)i;
    return cr_make_param_array(damage, all, DAMAGES);
}

ParameterizedTest(damage *which, lint, every_damage_is_found)
{
    const damage what = *which;
    char text[LAYOUT_DRAW_TEXT];
    size_t all = 0;
    for (int i = 0; i < by_scale(9, 12, 60); i++) {
        const layout_draw d = draw_to_damage(what, i);
        SCOPED(damaged_fini) damaged x;
        damaged_init(&x, &d);
        cr_expect_eq(findings(&x), 0);
        for (size_t stage = 0; stage < x.stages; stage++)
            all += damage_all(&x, what, stage, TEXT(d));
    }
    cr_expect_gt(all, 100, "%s: %zu places", damage_names[what], all);
}

/* No damage of a record leaves keys cut: the rule alone. */
Test(lint, queries_need_the_keys_of_all_positions)
{
    const ar_placement own = {AR_SHARD, 1};
    const ari_lint_verdict v = ari_lint_attend(own, own);
    cr_expect(v.broken && v.rule == AR_LINT_missing_gather);
}

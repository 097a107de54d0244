/* SPDX-License-Identifier: Apache-2.0 */
/* Lint: right layouts have nothing to find, and every list from which a collective or an operation is taken, or to which
 * one is added, has. */
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

/* --- whole lists -------------------------------------------------------------------------------------------------- */

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
        whole += ari_experts_whole(&d.run.parallel);
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

Test(lint, what_the_model_or_a_list_cannot_have_is_refused)
{
    layout_draw d = draw(0);
    ar_run run = d.run;
    ar_lint_report *r = NULL;
    run.parallel.tp = 1 << 20;
    cr_expect_neq(ari_lint(&r, &run, &d.config), AR_OK);
    cr_expect_null(r);
    run = d.run;
    run.fault = AR_FAULT_column_dx_not_reduced;
    cr_expect_eq(ari_lint(&r, &run, &d.config), AR_ERR_UNSUPPORTED);
    cr_expect_null(r);
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
        cr_expect(ari_lint_same(v.makes, makes), "rule case %zu", i);
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

/* --- lists with one thing wrong ----------------------------------------------------------------------------------- */

typedef enum damage {
    DROP_CALL,
    DOUBLE_CALL,
    OTHER_GROUP,
    OTHER_RANKS,
    CUT_TOKEN,
    DROP_OPERATION,
    DOUBLE_OPERATION,
    FALSE_CLAIM,
    SHORT_PART,
    OTHER_STAGE,
    DAMAGES
} damage;

static const char *const damage_names[] = {"a call dropped",
                                           "a call doubled",
                                           "a call over another group",
                                           "a call of more ranks",
                                           "a token cut in two",
                                           "an operation dropped",
                                           "an operation doubled",
                                           "a false claim",
                                           "a short part",
                                           "an operation on another stage"};

typedef struct breaker {
    damage what;
    size_t place, at; /* the one to damage, and how many have been */
    const char *damaged;
    ari_operation_pass pass;
    ari_lint_state *l;
} breaker;

static bool here(breaker *b, const ari_operation *op)
{
    if (b->at++ != b->place)
        return false;
    b->damaged = ari_operation_name(op->kind);
    b->pass = op->pass;
    return true;
}

/* What ranks say to each other has no placement, and nothing is divided by targets that no loss has. */
static bool is_message(const breaker *b, const ari_operation *op)
{
    return op->kind == ARI_OPERATION_AGREEMENT || op->kind == ARI_OPERATION_VERIFY ||
           (op->kind == ARI_OPERATION_TARGETS && !b->l->head);
}

static bool in_pass(const ari_operation *op)
{
    return op->pass == ARI_PASS_FORWARD || op->pass == ARI_PASS_BACKWARD;
}

static void damage_call(breaker *b, ari_operation *op)
{
    for (int i = 0; i < op->calls; i++) {
        ari_op_call *call = &op->call[i];
        if (b->what == DOUBLE_CALL && (op->kind == ARI_OPERATION_BROADCAST || op->calls == ARI_OP_CALLS))
            continue;
        if (!here(b, op))
            continue;
        if (b->what == OTHER_RANKS) {
            call->ranks++;
        } else if (b->what == OTHER_GROUP) {
            call->over = call->over == ARI_OVER_TP ? ARI_OVER_DP : ARI_OVER_TP;
        } else if (b->what == CUT_TOKEN) {
            call->chunk--;
        } else if (b->what == DOUBLE_CALL) {
            memmove(call + 1, call, (size_t)(op->calls - i) * sizeof *call);
            op->calls++;
        } else {
            memmove(call, call + 1, (size_t)(op->calls - i - 1) * sizeof *call);
            op->calls--;
        }
        return;
    }
}

/* Whether an operation must be there once: values may be placed otherwise and back, parameters be broadcast and gathered
 * again. */
static bool counts(const breaker *b, const ari_operation *op)
{
    const bool again = op->kind == ARI_OPERATION_BROADCAST || op->kind == ARI_OPERATION_WEIGHT_GATHER;
    return op->kind != ARI_OPERATION_REDISTRIBUTE &&
           (in_pass(op) || op->kind == ARI_OPERATION_GRADIENT_SUM || (again && b->what == DROP_OPERATION));
}

/* Changes in values: over tp, where that is more than one rank. */
static void damage_value(breaker *b, ari_operation *op)
{
    for (int i = 0; i < op->outputs && b->l->size[ARI_AXIS_TP] > 1 && in_pass(op); i++) {
        ari_op_value *v = &op->output[i];
        ar_placement *tp = &v->at[ARI_AXIS_TP];
        if (b->what == FALSE_CLAIM && tp->kind != AR_PARTIAL_SUM && here(b, op))
            *tp = (ar_placement){AR_PARTIAL_SUM, 0};
        if (b->what == SHORT_PART && v->local[v->ndim - 1] > 0 && here(b, op))
            v->local[v->ndim - 1]--;
    }
}

static ar_status visit_damaged(void *user, const ari_operation *op)
{
    breaker *b = user;
    ari_operation copy = *op;
    if (is_message(b, op))
        return AR_OK;
    if (op->counting) /* the same operations follow */
        return ari_lint_visit(b->l, op);
    if (b->what <= CUT_TOKEN)
        damage_call(b, &copy);
    else if (b->what == FALSE_CLAIM || b->what == SHORT_PART)
        damage_value(b, &copy);
    else if (b->what == OTHER_STAGE)
        copy.stage += in_pass(op) && b->l->size[ARI_AXIS_PP] > 1 && here(b, op);
    else if (counts(b, op) && here(b, op)) {
        if (b->what == DROP_OPERATION)
            return AR_OK;
        const ar_status st = ari_lint_visit(b->l, op);
        if (st != AR_OK)
            return st;
    }
    return ari_lint_visit(b->l, &copy);
}

/* Findings of the draw's list with one thing wrong; places: how many things can be. */
static size_t findings(const layout_draw *d, breaker *b)
{
    ari_lint_findings f = {.st = AR_OK};
    ar_lint_report counts = {0};
    ari_lint_state l;
    ari_step_case c = {.run = d->run, .config = &d->config};
    c.run.numerics = AR_NUMERICS_NATIVE;
    cr_assert_ok(ari_lint_begin(&l, &f, &counts, &c));
    b->l = &l;
    cr_assert_ok(ari_operations(&c, ARI_OPS_PIPELINE, 0, visit_damaged, b));
    cr_assert_ok(ari_lint_end(&l));
    ari_lint_fini(&l);
    free(f.found);
    return f.count;
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
    for (int i = 0; i < by_scale(12, 15, 60); i++) {
        const layout_draw d = draw_to_damage(what, i);
        breaker count = {.what = what, .place = SIZE_MAX};
        cr_expect_eq(findings(&d, &count), 0);
        for (size_t place = 0; place < count.at; place += what == OTHER_STAGE ? 7 : 1) {
            breaker b = {.what = what, .place = place};
            cr_expect_gt(findings(&d, &b), 0, "%s, of %s (%s), is not found\n%s", damage_names[what], b.damaged,
                         ari_operation_pass_name(b.pass), TEXT(d));
        }
        all += count.at;
    }
    cr_expect_gt(all, 100, "%s: %zu places", damage_names[what], all);
}

/* No damage of a list leaves keys cut: the rule alone. */
Test(lint, queries_need_the_keys_of_all_positions)
{
    const ar_placement own = {AR_SHARD, 1};
    const ari_lint_verdict v = ari_lint_attend(own, own);
    cr_expect(v.broken && v.rule == AR_LINT_missing_gather);
}

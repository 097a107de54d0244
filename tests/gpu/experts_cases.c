/* SPDX-License-Identifier: Apache-2.0 */
/* Experts: their choice, its gradient, and rows that go to them and come back. */
#include "gpu/conformance.h"

/* Tokens that each go to some experts, and the order in which the rows of their slots lie. */
typedef struct routing {
    size_t n, experts, k;
    pair_buf expert, place, slot_of;
} routing;

/* k of the experts, ascending: each as likely as there are places left for it. */
static void draw_experts(device_pair *p, int32_t *expert, size_t experts, size_t k)
{
    for (size_t i = 0, left = k; left > 0; i++)
        if (pair_below(p, experts - i) < left) {
            expert[k - left] = (int32_t)i;
            left--;
        }
}

static routing new_routing(device_pair *p, size_t n, size_t experts, size_t k)
{
    const routing r = {.n = n,
                       .experts = experts,
                       .k = k,
                       .expert = pair_integers(p, "expert", PAIR_W32, n * k, 0, 1),
                       .place = pair_integers(p, "place", PAIR_W64, n * k, 0, 1),
                       .slot_of = pair_integers(p, "slot_of", PAIR_W64, n * k, 0, 1)};
    int64_t *slots = r.slot_of.host;
    for (size_t t = 0; t < n && r.expert.host; t++)
        draw_experts(p, (int32_t *)r.expert.host + t * k, experts, k);
    for (size_t i = 0; i < n * k && slots; i++) { /* any order at all */
        const size_t other = pair_below(p, i + 1);
        slots[i] = slots[other];
        slots[other] = (int64_t)i;
    }
    for (size_t i = 0; i < n * k && r.place.host; i++)
        ((int64_t *)r.place.host)[slots[i]] = (int64_t)i;
    return r;
}

/* --- routing ------------------------------------------------------------------------------------------------------ */

static void every_choice(device_pair *p, void (*one)(device_pair *, size_t n, size_t experts, size_t k))
{
    static const size_t counts[] = {1, 2, 3, 8, 31, 33, 64, 257, 1000};
    for (size_t i = 0; i < sizeof counts / sizeof *counts - (p->small ? 1 : 0); i++)
        for (size_t which = 0; which < 4 && pair_goes_on(p); which++) {
            const size_t experts = p->round > 0 ? 1 + pair_below(p, 300) : counts[i];
            const size_t some = 1 + pair_below(p, experts < 10 ? experts : 10);
            const size_t k = which == 0 ? 1 : which == 1 && experts < 100 ? experts : some;
            one(p, experts > 100 ? 5 : 1 + pair_below(p, 40), experts, k);
        }
    one(p, 0, 8, 2);
}

/* Groups of experts, two or more each, of which enough stay; or one. */
static ar_route_rule new_rule(device_pair *p, size_t experts, size_t k, bool softmax)
{
    const size_t groups = 1 + pair_below(p, 8);
    ar_route_rule rule = {.k = k, .groups = 1, .kept = 1, .normalised = pair_below(p, 2)};
    rule.scale = softmax && rule.normalised ? 1.0f : 2.5f;
    if (groups > 1 && experts % groups == 0 && experts / groups > 1) {
        const size_t each = experts / groups, least = (k + each - 1) / each;
        rule.groups = groups;
        rule.kept = least + pair_below(p, groups - least + 1);
    }
    return rule;
}

static void route_case(device_pair *p, size_t n, size_t experts, size_t k)
{
    const bool softmax = pair_below(p, 2);
    ar_route_rule rule = new_rule(p, experts, k, softmax);
    PAIR_CASE(p, "%zu rows to %zu of %zu experts, %zu of %zu groups%s%s", n, k, experts, rule.kept, rule.groups,
              softmax ? " of a softmax" : "", rule.normalised ? ", normalised" : "");
    const pair_buf logits = pair_rows(p, "z", n, experts, pair_below(p, 2) ? PAIR_EACH_ROW : PAIR_CALM_ROWS);
    const pair_buf bias = pair_rows(p, "bias", 1, experts, PAIR_CALM_ROWS);
    for (size_t i = 0; bias.host && n % 2 > 0 && i < experts; i++) /* then rows have equal scores */
        ((float *)bias.host)[i] = 0.0f;
    const pair_tensor z = pair_stored(p, pair_view(logits, 2, (const size_t[]){n, experts}));
    const pair_buf prob = pair_words(p, "p", PAIR_W32, n * experts);
    const pair_buf expert = pair_words(p, "expert", PAIR_W32, n * k), weight = pair_words(p, "weight", PAIR_W32, n * k);
    const pair_buf lse = softmax ? pair_words(p, "lse", PAIR_W32, n) : pair_none();
    PAIR_RUN(p, route, prob.at[s], expert.at[s], weight.at[s], lse.at[s], &z.at[s],
             (rule.bias = softmax ? (ar_cbuf){NULL} : ar_const(bias.at[s]), &rule));
}

PAIR_CASES(route, every_choice)

static void route_backward_case(device_pair *p, size_t n, size_t experts, size_t k)
{
    const bool softmax = pair_below(p, 2);
    ar_route_rule rule = new_rule(p, experts, k, softmax);
    PAIR_CASE(p, "%zu rows to %zu of %zu experts%s%s", n, k, experts, softmax ? " of a softmax" : "",
              rule.normalised ? ", normalised" : "");
    const routing r = new_routing(p, n, experts, k);
    const pair_buf g = pair_rows(p, "g", n, k, PAIR_EACH_ROW), prob = pair_rows(p, "p", n, experts, PAIR_CALM_ROWS);
    const pair_buf weight = pair_rows(p, "weight", n, k, PAIR_CALM_ROWS);
    const pair_buf bias = pair_rows(p, "bias", 1, experts, PAIR_CALM_ROWS);
    const pair_tensor dz = pair_stored(p, pair_output(p, "dz", 2, (const size_t[]){n, experts}, PAIR_ROW_MAJOR));
    PAIR_RUN(p, route_backward, &dz.at[s], ar_const(g.at[s]), ar_const(prob.at[s]), ar_const(r.expert.at[s]),
             ar_const(weight.at[s]), (rule.bias = softmax ? (ar_cbuf){NULL} : ar_const(bias.at[s]), &rule));
}

PAIR_CASES(route_backward, every_choice)

/* What the losses of a router's rows are made of: groups of rows with the same c. */
typedef struct router_losses {
    pair_buf prob, balance, lse, valid;
    size_t each;
} router_losses;

static router_losses new_losses(device_pair *p, size_t n, size_t experts)
{
    const size_t groups = n > 0 ? 1 + pair_below(p, n) : 1, each = (n + groups - 1) / groups;
    const bool balances = pair_below(p, 3) > 0, has_z = !balances || pair_below(p, 2);
    return (router_losses){.prob = pair_rows(p, "p", n, experts, PAIR_CALM_ROWS),
                           .balance = balances ? pair_rows(p, "c", groups, experts, PAIR_EACH_ROW) : pair_none(),
                           .lse = has_z ? pair_floats(p, "lse", n, PAIR_SPECIAL) : pair_none(),
                           .valid = pair_below(p, 2) ? pair_bytes(p, "valid", n, 4) : pair_none(),
                           .each = each > 0 ? each : 1};
}

static void route_losses_case(device_pair *p, size_t n, size_t experts, size_t k)
{
    PAIR_CASE(p, "%zu rows of %zu experts, %zu a token", n, experts, k);
    const router_losses l = new_losses(p, n, experts);
    const pair_buf sum = pair_rows(p, "dz", n, experts, PAIR_CALM_ROWS);
    const pair_tensor dz = pair_stored(p, pair_view(sum, 2, (const size_t[]){n, experts}));
    PAIR_RUN(p, route_losses, &dz.at[s], ar_const(l.prob.at[s]), ar_const(l.balance.at[s]), l.each,
             ar_const(l.lse.at[s]), 0.01, ar_const(l.valid.at[s]));
}

PAIR_CASES(route_losses, every_choice)

static void route_terms_case(device_pair *p, size_t n, size_t experts, size_t k)
{
    PAIR_CASE(p, "%zu rows of %zu experts, %zu a token", n, experts, k);
    const router_losses l = new_losses(p, n, experts);
    const pair_tensor prob = pair_view(l.prob, 2, (const size_t[]){n, experts});
    const pair_buf terms = pair_words(p, "terms", PAIR_W32, n);
    PAIR_RUN(p, route_terms, terms.at[s], &prob.at[s], ar_const(l.balance.at[s]), l.each, ar_const(l.lse.at[s]), 0.01,
             ar_const(l.valid.at[s]));
}

PAIR_CASES(route_terms, every_choice)

/* --- rows of slots ------------------------------------------------------------------------------------------------ */

/* Widths, and tokens of which each has k slots. */
static void every_width(device_pair *p, void (*one)(device_pair *, size_t n, size_t k, size_t cols))
{
    size_t cols;
    for (size_t i = 0; (cols = pair_size(p, i)) != SIZE_MAX; i++)
        for (size_t k = 1; k < 6 && cols > 0 && pair_goes_on(p); k += 1 + pair_below(p, 3))
            one(p, cols > 500 ? 3 : 1 + pair_below(p, 30), k, cols);
    one(p, 0, 2, 33);
}

/* With weights each slot has one; without, some rows are nobody's, and the table's are apart. */
static void gather_rows_case(device_pair *p, size_t n, size_t k, size_t cols)
{
    const bool weighed = pair_below(p, 2), padded = pair_below(p, 2);
    PAIR_CASE(p, "%zu rows of %zu, %zu slots each, layout %d%s", n, cols, k, padded, weighed ? ", weights" : "");
    const routing r = new_routing(p, n, k, k);
    const pair_tensor w = pair_stored(
        p, pair_input(p, "w", 2, (const size_t[]){n, cols}, padded ? PAIR_PADDED : PAIR_ROW_MAJOR, PAIR_ANY));
    const pair_buf row_of = weighed ? r.slot_of : pair_integers(p, "row_of", PAIR_W64, n * k, -2, n * k + 2);
    const pair_buf weight = weighed ? pair_floats(p, "weight", n * k, PAIR_SPECIAL) : pair_none();
    const pair_tensor y = pair_stored(p, pair_output(p, "y", 2, (const size_t[]){n * k, cols}, PAIR_ROW_MAJOR));
    PAIR_RUN(p, gather_rows, &y.at[s], &w.at[s], ar_const(row_of.at[s]), ar_const(weight.at[s]), k);
}

PAIR_CASES(gather_rows, every_width)

static void combine_rows_case(device_pair *p, size_t n, size_t k, size_t cols)
{
    const bool weighed = pair_below(p, 2);
    PAIR_CASE(p, "%zu rows of %zu, %zu slots each%s", n, cols, k, weighed ? ", weights" : "");
    const routing r = new_routing(p, n, k, k);
    const pair_buf values = pair_rows(p, "rows", n * k, cols, pair_below(p, 2) ? PAIR_EACH_ROW : PAIR_CALM_ROWS);
    const pair_tensor rows = pair_stored(p, pair_view(values, 2, (const size_t[]){n * k, cols}));
    const pair_buf weight = weighed ? pair_floats(p, "weight", n * k, PAIR_SPECIAL) : pair_none();
    const pair_tensor y = pair_stored(p, pair_output(p, "y", 2, (const size_t[]){n, cols}, PAIR_ROW_MAJOR));
    PAIR_RUN(p, combine_rows, &y.at[s], &rows.at[s], ar_const(weight.at[s]), ar_const(r.place.at[s]), k);
}

PAIR_CASES(combine_rows, every_width)

static void dot_rows_case(device_pair *p, size_t n, size_t k, size_t cols)
{
    PAIR_CASE(p, "%zu rows of %zu, %zu slots each", n, cols, k);
    const routing r = new_routing(p, n, k, k);
    const pair_buf slopes = pair_rows(p, "dy", n, cols, PAIR_CALM_ROWS);
    const pair_buf values = pair_rows(p, "rows", n * k, cols, PAIR_EACH_ROW);
    const pair_tensor dy = pair_stored(p, pair_view(slopes, 2, (const size_t[]){n, cols}));
    const pair_tensor rows = pair_stored(p, pair_view(values, 2, (const size_t[]){n * k, cols}));
    const pair_buf g = pair_words(p, "g", PAIR_W32, n * k);
    PAIR_RUN(p, dot_rows, g.at[s], &dy.at[s], &rows.at[s], ar_const(r.place.at[s]), k);
}

PAIR_CASES(dot_rows, every_width)

/* --- an expert of all tokens -------------------------------------------------------------------------------------- */

static pair_tensor logits_of(device_pair *p, size_t n)
{
    const pair_buf logits = pair_floats(p, "logit", n, pair_below(p, 3) ? PAIR_SPECIAL : PAIR_WIDE);
    return pair_stored(p, pair_view(logits, 2, (const size_t[]){n, 1}));
}

static void add_gated_case(device_pair *p, size_t n, size_t k, size_t cols)
{
    (void)k;
    PAIR_CASE(p, "%zu rows of %zu", n, cols);
    const pair_buf sums = pair_rows(p, "y", n, cols, PAIR_CALM_ROWS), more = pair_rows(p, "x", n, cols, PAIR_EACH_ROW);
    const pair_tensor y = pair_stored(p, pair_view(sums, 2, (const size_t[]){n, cols}));
    const pair_tensor x = pair_stored(p, pair_view(more, 2, (const size_t[]){n, cols}));
    const pair_tensor logit = logits_of(p, n);
    PAIR_RUN(p, add_gated, &y.at[s], &x.at[s], &logit.at[s]);
}

PAIR_CASES(add_gated, every_width)

static void add_gated_backward_case(device_pair *p, size_t n, size_t k, size_t cols)
{
    const size_t where = pair_below(p, 3);
    (void)k;
    PAIR_CASE(p, "%zu rows of %zu, dx %s", n, cols, where == 0 ? "apart" : where == 1 ? "in dy" : "in x");
    const pair_buf slopes = pair_rows(p, "dy", n, cols, PAIR_CALM_ROWS);
    const pair_buf values = pair_rows(p, "x", n, cols, PAIR_EACH_ROW);
    const pair_tensor dy = pair_stored(p, pair_view(slopes, 2, (const size_t[]){n, cols}));
    const pair_tensor x = pair_stored(p, pair_view(values, 2, (const size_t[]){n, cols}));
    const pair_tensor apart = pair_stored(p, pair_output(p, "dx", 2, (const size_t[]){n, cols}, PAIR_ROW_MAJOR));
    const pair_tensor dx = where == 0 ? apart : where == 1 ? dy : x, logit = logits_of(p, n);
    const pair_tensor dlogit = pair_stored(p, pair_output(p, "dlogit", 2, (const size_t[]){n, 1}, PAIR_ROW_MAJOR));
    PAIR_RUN(p, add_gated_backward, &dx.at[s], &dlogit.at[s], &dy.at[s], &x.at[s], &logit.at[s]);
}

PAIR_CASES(add_gated_backward, every_width)

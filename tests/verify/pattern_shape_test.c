/* SPDX-License-Identifier: Apache-2.0 */
/* Any shape, any number of ranks, and what is refused. */
#include "support/together.h"
#include "tests/verify/pattern_support.h"

#define DIMENSIONS(...) ((const size_t[]){__VA_ARGS__})

static trace any;

/* A world of any shape, whole on every rank (dim -1) or sharded. */
static void begin(world *w, const char *name, char pass, int ranks, int ndim, const size_t *shape, int dim)
{
    any = (trace){.claim = "any", .name = name, .pass = pass};
    any.on = (place){.how = dim < 0 ? ON_ALL : IN_SHARDS, .dim = dim, .ndim = ndim};
    for (int i = 0; i < ndim; i++)
        any.on.shape[i] = shape[i];
    world_begin(w, &any, ranks);
}

static void expect_pattern(const world *w, const char *text)
{
    const ari_diagnosis p = found(w);
    cr_expect(strstr(p.pattern, text), "expected '%s'\n  pattern %s\n  hint    %s", text, p.pattern, p.hint);
}

/* Precondition: a world of any shape. Identity: without a change nothing differs; with one change one element does. */
static void check_one_change(world *w)
{
    expect_pattern(w, "no element differs");
    for (int r = 0; r < w->d.ranks; r++) {
        for (size_t i = 0; i < w->count; i++) {
            if (!at(w, r, i) || i != w->count / 2)
                continue;
            *at(w, r, i) += 1.5f;
            expect_pattern(w, w->count == 1 ? "the one value" : "1 of ");
            *at(w, r, i) = w->reference[i];
        }
    }
}

CLAIM(one_change_is_found_in_every_shape_on_every_number_of_ranks)
{
    static const size_t shape[AR_MAX_DIMS] = {3, 4, 2, 5};
    static const int ranks[] = {1, 2, 3, 4, 7, 64};
    for (size_t n = 0; n < sizeof ranks / sizeof *ranks; n++) {
        for (int ndim = 0; ndim <= AR_MAX_DIMS; ndim++) {
            world w;
            begin(&w, "x", 'f', ranks[n], ndim, shape, -1);
            check_one_change(&w);
            world_free(&w);
            for (int dim = 0; dim < ndim; dim++) { /* uneven and empty shards included */
                begin(&w, "x", 'g', ranks[n], ndim, shape, dim);
                check_one_change(&w);
                world_free(&w);
            }
        }
    }
}

/* Every pass, name and amount of damage, in every shape: no detector reads outside, divides by nothing, or says
 * nothing. */
CLAIM(any_damage_gives_two_lines)
{
    static const char *const names[] = {"loss",    "model.norm", "a.attn.context", "wte.weight",
                                        "m.embed", "x.bias",     "lm_head"};
    static const size_t shape[AR_MAX_DIMS] = {2, 4, 3, 4};
    static const float damage[] = {0.0f, 1.0f, NAN, INFINITY, 3e38f, 1e-45f};
    for (size_t k = 0; k < 7 * 5 * 5 * 6 * 4; k++) {
        SCOPED(world_free) world w;
        const int ndim = (int)(k / 7 / 5 % 5), n = 1 + (int)(k / 7 / 5 / 5 / 6 % 4);
        const float value = damage[k / 7 / 5 / 5 % 6];
        if (ndim > 0 && k % 2)
            begin(&w, names[k % 7], "ifbgn"[k / 7 % 5], n, ndim, shape, ndim - 1);
        else
            begin(&w, names[k % 7], "ifbgn"[k / 7 % 5], n, ndim, shape, -1);
        w.d.head_dim = 2;
        w.d.batch = k % 3;
        w.d.seq = k % 4;
        for (size_t i = 0; i < w.count; i++) {
            for (int r = 0; r < n; r++) {
                if (at(&w, r, i) && (i + k + (size_t)r) % 3 < k % 4)
                    *at(&w, r, i) = value;
            }
        }
        const ari_diagnosis p = found(&w);
        if (p.pattern[0] == '\0' || p.hint[0] == '\0' || !memchr(p.pattern, '\0', sizeof p.pattern) ||
            !memchr(p.hint, '\0', sizeof p.hint) || strstr(p.hint, "nan") || strstr(p.hint, "inf "))
            cr_expect_fail("case %zu: '%.60s', '%.300s'", k, p.pattern, p.hint);
    }
}

CLAIM(a_tensor_without_elements_has_no_difference)
{
    for (int dim = 0; dim < 3; dim++) {
        size_t shape[3] = {2, 3, 4};
        SCOPED(world_free) world w;
        shape[dim] = 0;
        begin(&w, "x", 'f', 2, 3, shape, -1);
        expect_pattern(&w, "no element differs");
    }
}

CLAIM(ranks_without_elements_need_no_memory)
{
    SCOPED(world_free) world w;
    begin(&w, "lm_head.weight", 'g', 4, 2, DIMENSIONS(5, 3), 0); /* 2 2 1 0 */
    cr_assert_eq(w.layout[3].nbox, 0);
    w.copy[3].local = NULL;
    *at(&w, 2, 13) += 1.0f;
    expect_pattern(&w, "1 of 15 elements (6.7%): id 4, column 1; on rank 2 only");
}

CLAIM(layouts_may_view_the_tensor_in_another_shape)
{
    SCOPED(world_free) world w;
    begin(&w, "model.layers.0.self_attn.q_rope", 'f', 2, 4, DIMENSIONS(2, 3, 4, 5), 2);
    const size_t flat[3] = {2, 3, 20};
    w.d.ndim = 3;
    w.d.shape = flat;
    *at(&w, 1, 38) += 1.0f;
    expect_pattern(&w, "sample 0, token 1, head 3, lane 3");
}

CLAIM(what_is_allowed_is_no_difference)
{
    SCOPED(world_free) world w;
    begin(&w, "x", 'f', 2, 2, DIMENSIONS(4, 5), -1);
    for (size_t i = 0; i < 20; i++)
        w.local[0][i] += i == 7 ? 1e-2f : 1e-4f;
    expect_pattern(&w, "all 20 elements; on rank 0 only");
    w.d.allowed = 1e-3;
    expect_pattern(&w, "1 of 20 elements (5%): token 1, feature 2; on rank 0 only");
}

CLAIM(layouts_that_are_not_the_tensors_are_refused)
{
    SCOPED(world_free) world w;
    ari_diagnosis p = {.pattern = "untouched"};
    begin(&w, "x", 'f', 2, 2, DIMENSIONS(4, 5), -1);
    const struct {
        size_t *at, wrong;
    } cases[] = {{&w.layout[1].box[0].extent[1], 6},
                 {&w.layout[1].box[0].global[0], SIZE_MAX}, /* start + extent would wrap */
                 {&w.copy[0].shape[0], 3},
                 {&w.layout[0].shape[1], 7},
                 {&w.layout[0].nbox, AR_MAX_BOXES + 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const size_t was = *cases[i].at;
        *cases[i].at = cases[i].wrong;
        cr_expect_eq(ari_diagnose(&p, &w.d), AR_ERR_ARG, "case %zu", i);
        cr_expect(i > 0 || error_says("rank 1"), "case %zu: %s", i, ar_error_message());
        *cases[i].at = was;
    }
    w.d.ranks = 0;
    cr_expect_eq(ari_diagnose(&p, &w.d), AR_ERR_ARG);
    w.d.ranks = 2;
    cr_assert_str_eq(p.pattern, "untouched");
}

CLAIM(sizes_that_overflow_are_refused)
{
    SCOPED(world_free) world w;
    ari_diagnosis p;
    const size_t huge[2] = {SIZE_MAX / 2, 4};
    begin(&w, "x", 'f', 1, 2, DIMENSIONS(4, 5), -1);
    w.d.shape = huge;
    memcpy(w.layout[0].shape, huge, sizeof huge);
    cr_assert_eq(ari_diagnose(&p, &w.d), AR_ERR_OVERFLOW);
}

CLAIM(text_that_does_not_fit_ends_in_dots)
{
    char small[12];
    ari_text t = ari_text_in(small, sizeof small);
    ari_say(&t, "%d", 12345);
    ari_say(&t, "%s", "67890");
    cr_assert_str_eq(small, "1234567890");
    ari_say(&t, "%s", "ab");
    cr_assert_str_eq(small, "12345678...");
    ari_say(&t, "more");
    cr_assert_str_eq(small, "12345678...");
}

EVERY_CLAIM(pattern_shape)

/* SPDX-License-Identifier: Apache-2.0 */
/* The rows of a flow table: layers that do the same are one, and what it is about has a name. */
#include "tests/verify/support.h"

#include "verify/lint/flow.h"

static ari_flow flow_of(const ari_step_case *c, ari_flow_options o)
{
    ari_flow f;
    cr_assert_ok(ari_flow_init(&f, c, &o));
    return f;
}

/* Rows of this title, and how many layers they stand for. */
static size_t titled(const ari_flow *f, const ar_config *c, const char *title, size_t *layers)
{
    size_t n = 0;
    *layers = 0;
    for (size_t i = 0; i < f->count; i++) {
        char text[200];
        ari_flow_title(text, sizeof text, c, &f->row[i]);
        if (strcmp(text, title) != 0)
            continue;
        n++;
        *layers += f->row[i].layers;
    }
    return n;
}

Test(flow, layers_that_differ_have_their_own_rows)
{
    const ar_config c = config_of(STACK(31, 24, 36, 5, 24, 4));
    ari_step_case t = {.config = &c, .run = {.parallel = {.tp = 2}, .batch = 2, .seq = 6, .steps = 1}};
    cr_assert_ok(ar_plan_add(&t.run.plan, c.arch, "layers.1.mlp.w1", AR_STYLE_ROWWISE));
    cr_assert_ok(ar_plan_add(&t.run.plan, c.arch, "layers.1.mlp.w2", AR_STYLE_COLWISE));
    static const struct {
        const char *title;
        size_t layers;
    } all[] = {{"layers.0.ln1", 1}, {"layers.1.ln1", 1}, {"layers.2-4.ln1", 3}, {"layers.*.ln1", 0}};
    ari_flow f = flow_of(&t, (ari_flow_options){0});
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        size_t layers = 0;
        const size_t rows = titled(&f, &c, all[i].title, &layers); /* forward and backward */
        cr_expect_eq(rows, all[i].layers > 0 ? 2 : 0, "%s: %zu rows", all[i].title, rows);
        cr_expect_eq(layers, 2 * all[i].layers, "%s: %zu layers", all[i].title, layers);
    }
    ari_flow_fini(&f);
    f = flow_of(&t, (ari_flow_options){.each_layer = true, .passes_only = true});
    for (size_t i = 0; i < f.count; i++)
        cr_expect_eq(f.row[i].layers, 1);
    ari_flow_fini(&f);
    ar_plan_fini(&t.run.plan);
}

/* Buckets are named by their first parameter: in reverse order of registration. */
Test(flow, buckets_and_parameters_have_names)
{
    const ar_config c = config_of(GPT2(31, 24, 36, 2, 12));
    ari_step_case t = {.config = &c, .run = {.parallel = {.dp = 2}, .batch = 2, .seq = 6, .steps = 1}};
    size_t layers = 0;
    SCOPED(ari_flow_fini) ari_flow f = flow_of(&t, (ari_flow_options){0});
    cr_expect_eq(titled(&f, &c, "transformer.h.*.attn.c_attn.bias", &layers), 3); /* broadcast, gradient, its sum */
    cr_expect_eq(layers, 3 * 2);
    ari_flow_fini(&f);
    t.run.ddp.bucket_bytes = AR_BUCKET_BYTES;
    f = flow_of(&t, (ari_flow_options){0});
    /* 2 tables, 12 of each block, 2 of the last norm; the head is the table. */
    cr_expect_eq(titled(&f, &c, "transformer.ln_f.bias and 27 more", &layers), 1);
}

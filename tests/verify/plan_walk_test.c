/* SPDX-License-Identifier: Apache-2.0 */
/* Modules of one's own whose layers a plan splits: every plan of right declarations has one rank's bits, one that
 * leaves terms of a sum has not, and what cannot be built is refused by name. */
#include "anyrank/activation.h"
#include "anyrank/check_module.h"
#include "anyrank/plan_walk.h"
#include "ref/layers/module_private.h"
#include "ref/models/plan_walk_private.h"
#include "ref/placement/placement_private.h"
#include "support/rank_run.h"
#include "support/row.h"
#include "support/small.h"
#include "support/together.h"

enum { SAMPLES = 3, POSITIONS = 4, WIDTH = 8, FFN = 12, LAYERS = 6 };

typedef struct given {
    const ar_plan *plan;
    bool flat; /* samples of one dimension */
    float x[SAMPLES * POSITIONS * WIDTH], y[SAMPLES * POSITIONS * WIDTH];
} given;

/* norm - up - activation - dropout - down - out (R) */
static ar_status build(void *user, ar_ctx *ctx, ar_module **module, ar_loss **loss)
{
    const given *g = user;
    ar_plan_walk w = {.plan = g->plan};
    ar_module *m[LAYERS] = {NULL};
    ar_status st = AR_OK;
    AR_TRY_TO(made, st, ar_plan_norm_create(&m[0], ctx, &w, "net.norm", AR_NORM_LAYER, WIDTH, 1e-5));
    AR_TRY_TO(made, st, ar_plan_linear_create(&m[1], ctx, &w, "net.up", WIDTH, FFN, true));
    AR_TRY_TO(made, st, ar_plan_activation_create(&m[2], ctx, &w, "net.act", AR_ACT_SILU));
    AR_TRY_TO(made, st, ar_plan_dropout_create(&m[3], ctx, &w, "net.drop", g->flat ? 1 : POSITIONS, FFN));
    AR_TRY_TO(made, st, ar_plan_linear_create(&m[4], ctx, &w, "net.down", FFN, WIDTH, true));
    AR_TRY_TO(made, st, ar_plan_redistribute_create(&m[5], ctx, &w, "net.out", (ar_placement){AR_REPLICATE, 0}));
    AR_TRY_TO(made, st, ar_plan_end(&w, "net"));
made:
    AR_TRY(ar_sequential_made(module, "net", m, LAYERS, st));
    return ar_squared_error_create(loss, ctx, "loss");
}

static ar_status batch(void *user, int step, ar_batch *b)
{
    given *g = user;
    (void)step;
    for (int i = 0; i < SAMPLES * POSITIONS * WIDTH; i++) {
        g->x[i] = (float)((i * 7919 + 104729) % 1000) / 500.0f - 1.0f;
        g->y[i] = (float)((i * 104729 + 7919) % 1000) / 500.0f - 1.0f;
    }
    const ar_batch cube = {.batch = SAMPLES, .sample_ndim = 2, .sample_shape = {POSITIONS, WIDTH}},
                   flat = {.batch = SAMPLES * POSITIONS, .sample_ndim = 1, .sample_shape = {WIDTH}};
    *b = g->flat ? flat : cube;
    b->seq = g->flat ? 1 : POSITIONS;
    b->input = g->x;
    b->target = g->y;
    b->target_width = g->flat ? WIDTH : POSITIONS * WIDTH;
    return AR_OK;
}

static ar_plan plan_of(const char *text)
{
    ar_plan p;
    cr_assert_ok(ar_plan_parse(&p, text, strlen(text), "p.json"));
    return p;
}

typedef ar_status (*builder)(void *user, ar_ctx *ctx, ar_module **module, ar_loss **loss);

/* NULL: an error before any layout ran. */
static ar_check_report *check_built(builder b, const char *text, bool flat, const ar_parallel *p, size_t n)
{
    SCOPED(ar_plan_fini) ar_plan plan = plan_of(text);
    given g = {.plan = &plan, .flat = flat};
    const ar_module_case c = {.name = "net", .build = b, .batch = batch, .user = &g};
    const ar_check_module_options o =
        ROW(.parallel = p, .layouts = n, .run.steps = 1, .run.clip = 0.25, .run.dropout = 0.2,
            .run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW));
    ar_check_report *r = NULL;
    const ar_status st = ar_check_module(&r, &c, &o);
    cr_expect((st == AR_OK) == (r != NULL));
    return r;
}

/* --- right plans -------------------------------------------------------------------------------------------------- */

typedef struct layer {
    const char *name;
    const char *style[3];
    int styles, outputs; /* how many there are, of the outputs the first ones below */
    bool ends;           /* an attention or an MLP, which leaves R if nothing else is declared */
} layer;
static const char *const outputs[] = {NULL, "R", "S(-1)", "S(1)"};
static const layer chain[] = {{"net.norm", {"replicate", "sequence"}, 2, 4, false},
                              {"net.up", {"colwise", "rowwise", "replicate"}, 3, 4, false},
                              {"net.down", {"colwise", "rowwise", "replicate"}, 3, 4, false}};
static const layer block[] = {{"net.norm", {"replicate", "sequence"}, 2, 4, false},
                              {"net.attn.[qkv]", {"colwise", "rowwise", "replicate"}, 3, 3, false},
                              {"net.attn.out", {"colwise", "rowwise", "replicate"}, 3, 4, true},
                              {"net.mlp.[gu]*", {"colwise", "rowwise", "replicate"}, 3, 4, false},
                              {"net.mlp.fc2", {"colwise", "rowwise", "replicate"}, 3, 4, true}};

static int plans_of(const layer *l, size_t n)
{
    int all = 1;
    for (size_t k = 0; k < n; k++)
        all *= l[k].styles * l[k].outputs;
    return all;
}

/* The plan of number i among all styles and outputs; inputs are declared as what the layer before leaves. */
static void write_plan(char *text, size_t cap, const layer *l, size_t n, int i)
{
    const char *at = "R";
    size_t used = (size_t)snprintf(text, cap, "{\"rules\": [");
    for (size_t k = 0; k < n; k++) {
        const char *style = l[k].style[i % l[k].styles], *out = outputs[i / l[k].styles % l[k].outputs];
        char declared[32] = "";
        i /= l[k].styles * l[k].outputs;
        if (out)
            snprintf(declared, sizeof declared, ", \"output\": \"%s\"", out);
        used +=
            (size_t)snprintf(text + used, cap - used, "%s{\"modules\": \"%s\", \"style\": \"%s\", \"input\": \"%s\"%s}",
                             k > 0 ? ", " : "", l[k].name, style, at, declared);
        at = out                                           ? out
             : strcmp(style, "colwise") == 0 && !l[k].ends ? "S(-1)"
             : strcmp(style, "sequence") == 0              ? "S(1)"
                                                           : "R";
    }
    snprintf(text + used, cap - used, "]}");
}

static void expect_same_bits(builder b, const char *text)
{
    static const ar_parallel layouts[] = {{.tp = 2}, {.dp = 2, .tp = 4, .zero = 1, .micro_batches = 2}};
    OWNED(ar_check_report_destroy) ar_check_report *r = check_built(b, text, false, layouts, 2);
    cr_assert_not_null(r, "%s: %s", text, ar_error_message());
    for (size_t k = 0; k < 2; k++)
        cr_expect_eq(r->run[k].result, AR_CHECK_SAME, "%s, layout %zu: %s %s", text, k, r->run[k].first.tensor,
                     r->run[k].error ? r->run[k].error : "");
}

/* Strides are no multiples of 2 or 3, so that all styles and outputs are met. */
CLAIM(every_plan_of_right_declarations_has_one_ranks_bits)
{
    const int stride = by_scale(97, 13, 1);
    for (int i = 0; i < plans_of(chain, 3); i += stride) {
        char text[800];
        write_plan(text, sizeof text, chain, 3, i);
        expect_same_bits(build, text);
    }
}

/* norm - attention - gated MLP - out (R) */
static ar_status build_block(void *user, ar_ctx *ctx, ar_module **module, ar_loss **loss)
{
    static const ar_attention_options attention =
        ROW(.hidden = WIDTH, .heads = 8, .kv_heads = 4, .head_dim = 1, .qkv_bias = true, .out_bias = true,
            .causal = true, .max_positions = POSITIONS);
    static const ar_mlp_options mlp = {.hidden = WIDTH, .ffn = FFN, .activation = AR_ACT_SILU, .gated = true};
    ar_plan_walk w = {.plan = ((const given *)user)->plan};
    ar_module *m[4] = {NULL};
    ar_status st = AR_OK;
    AR_TRY_TO(made, st, ar_plan_norm_create(&m[0], ctx, &w, "net.norm", AR_NORM_RMS, WIDTH, 1e-5));
    AR_TRY_TO(made, st, ari_plan_attention_create(&m[1], ctx, &w, "net.attn", &attention));
    AR_TRY_TO(made, st, ari_plan_mlp_create(&m[2], ctx, &w, "net.mlp", &mlp));
    AR_TRY_TO(made, st, ar_plan_redistribute_create(&m[3], ctx, &w, "net.out", (ar_placement){AR_REPLICATE, 0}));
    AR_TRY_TO(made, st, ar_plan_end(&w, "net"));
made:
    AR_TRY(ar_sequential_made(module, "net", m, 4, st));
    return ar_squared_error_create(loss, ctx, "loss");
}

CLAIM(attentions_and_mlps_of_the_library_are_split_by_the_names_of_their_layers)
{
    const int stride = by_scale(62143, 3011, 241);
    for (int i = 0; i < plans_of(block, 5); i += stride) {
        char text[800];
        write_plan(text, sizeof text, block, 5, i);
        expect_same_bits(build_block, text);
    }
}

CLAIM(what_works_element_by_element_is_placed_as_its_rule_says)
{
    static const char *const plans[] = {
        "{\"*.up\": \"colwise\", \"*.act\": \"sequence_parallel\", \"*.down\": \"rowwise\"}",
        "{\"*.up\": \"colwise\", \"*.drop\": \"sequence_parallel\", \"*.down\": \"colwise\"}",
        "{\"*.up\": \"colwise\", \"*.drop\": \"replicate\", \"*.down\": \"rowwise\"}",
        "{\"rules\": [{\"modules\": \"*.up\", \"style\": \"rowwise\", \"output\": \"S(1)\"}, "
        "{\"modules\": \"*.act\", \"style\": \"sequence\", \"input\": \"S(1)\", \"output\": \"S(-1)\"}]}"};
    for (size_t i = 0; i < sizeof plans / sizeof *plans; i++)
        expect_same_bits(build, plans[i]);
}

CLAIM(values_without_positions_have_their_features_split)
{
    static const ar_parallel tp2 = {.tp = 2};
    OWNED(ar_check_report_destroy)
    ar_check_report *r = check_built(build,
                                     "{\"rules\": [{\"modules\": \"*.up\", \"style\": \"colwise\"}, "
                                     "{\"modules\": \"*.down\", \"style\": \"rowwise\"}]}",
                                     true, &tp2, 1);
    cr_assert_not_null(r, "%s", ar_error_message());
    cr_expect_eq(r->run[0].result, AR_CHECK_SAME);
    cr_expect_null(
        check_built(build, "{\"rules\": [{\"modules\": \"*.norm\", \"style\": \"sequence\"}]}", true, &tp2, 1));
    cr_expect_says("net.norm: the plan splits positions, S(1), and the value has 2");
}

/* y = x + down(gate(x) * up(x)), in C as a user writes it: the plan alone says what is split. */
typedef struct gated {
    ar_module base;
    ar_module *up, *gate, *down, *back; /* back: to what x is */
} gated;
enum { SAVED_UP, SAVED_GATE };

static ar_status gated_forward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                               const ar_batch *b)
{
    gated *m = (gated *)base;
    ar_tensor up, gate, both, down, back;
    AR_TRY(ar_module_forward(m->up, ctx, saved, &up, x, b));
    AR_TRY(ar_module_forward(m->gate, ctx, saved, &gate, x, b));
    AR_TRY(ar_saved_push(saved, m, SAVED_UP, &up));
    AR_TRY(ar_saved_push(saved, m, SAVED_GATE, &gate));
    AR_TRY(ar_mul(ctx, &both, &gate, &up));
    AR_TRY(ar_module_forward(m->down, ctx, saved, &down, &both, b));
    AR_TRY(ar_module_forward(m->back, ctx, saved, &back, &down, b));
    return ar_add(ctx, y, x, &back);
}

static ar_status gated_backward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dy,
                                const ar_batch *b)
{
    gated *m = (gated *)base;
    ar_tensor up, gate, back, both, dup, dgate, of_up, of_gate, sum;
    AR_TRY(ar_module_backward(m->back, ctx, saved, &back, dy, b));
    AR_TRY(ar_module_backward(m->down, ctx, saved, &both, &back, b));
    AR_TRY(ar_saved_pop(saved, m, SAVED_GATE, &gate));
    AR_TRY(ar_saved_pop(saved, m, SAVED_UP, &up));
    AR_TRY(ar_mul(ctx, &dup, &both, &gate));
    AR_TRY(ar_mul(ctx, &dgate, &both, &up));
    AR_TRY(ar_module_backward(m->gate, ctx, saved, &of_gate, &dgate, b));
    AR_TRY(ar_module_backward(m->up, ctx, saved, &of_up, &dup, b));
    AR_TRY(ar_add(ctx, &sum, &of_gate, &of_up));
    return dx ? ar_add(ctx, dx, dy, &sum) : AR_OK;
}

static size_t gated_children(const ar_module *base, ar_module **out, size_t cap)
{
    const gated *m = (const gated *)base;
    ar_module *const all[] = {m->up, m->gate, m->down, m->back};
    for (size_t i = 0; i < 4 && i < cap; i++)
        out[i] = all[i];
    return 4;
}

static void gated_destroy(ar_module *base)
{
    OWNED(free) gated *m = (gated *)base;
    ar_module_destroy(m->up);
    ar_module_destroy(m->gate);
    ar_module_destroy(m->down);
    ar_module_destroy(m->back);
}

static ar_status build_gated(void *user, ar_ctx *ctx, ar_module **module, ar_loss **loss)
{
    static const ar_module_ops ops = ROW(.kind = "gated", .forward = gated_forward, .backward = gated_backward,
                                         .children = gated_children, .destroy = gated_destroy);
    ar_plan_walk w = {.plan = ((const given *)user)->plan};
    const ar_placement x = w.placement;
    gated *m = calloc(1, sizeof *m);
    if (!m)
        return AR_ERR_MEMORY;
    *module = &m->base;
    AR_TRY(ar_module_init(&m->base, &ops, "mlp", AR_HELD_WHOLE));
    AR_TRY(ar_plan_linear_create(&m->up, ctx, &w, "mlp.up", WIDTH, FFN, false));
    const ar_placement of_up = w.placement;
    w.placement = x;
    AR_TRY(ar_plan_linear_create(&m->gate, ctx, &w, "mlp.gate", WIDTH, FFN, true));
    if (!ari_placement_same(of_up, w.placement, 3))
        return ar_error_set(AR_ERR_UNSUPPORTED, "mlp.up and mlp.gate leave other parts: give both one style");
    AR_TRY(ar_plan_linear_create(&m->down, ctx, &w, "mlp.down", FFN, WIDTH, true));
    AR_TRY(ar_plan_redistribute_create(&m->back, ctx, &w, "mlp.back", x));
    AR_TRY(ar_plan_end(&w, "mlp"));
    return ar_squared_error_create(loss, ctx, "loss");
}

CLAIM(layers_that_share_an_input_are_split_each_by_its_rule)
{
    static const ar_parallel layouts[] = {{.tp = 2}, {.dp = 3, .tp = 4, .micro_batches = 1}};
    static const struct {
        const char *text, *error; /* NULL: the same bits */
    } plans[] = {
        {"{\"*.up\": \"colwise\", \"*.gate\": \"colwise\", \"*.down\": \"rowwise\"}", NULL},
        {"{\"*.up\": \"rowwise\", \"*.gate\": \"colwise_rep\", \"*.down\": \"colwise\"}", NULL},
        {"{\"*.up\": \"replicate\", \"*.gate\": \"rowwise\", \"*.down\": \"rowwise_rep\"}", NULL},
        {"{\"*.up\": \"colwise\", \"*.gate\": \"rowwise\"}", "mlp.up and mlp.gate leave other parts"},
    };
    for (size_t i = 0; i < sizeof plans / sizeof *plans; i++) {
        OWNED(ar_check_report_destroy) ar_check_report *r = check_built(build_gated, plans[i].text, false, layouts, 2);
        cr_assert_eq(r == NULL, plans[i].error != NULL, "%s: %s", plans[i].text, ar_error_message());
        cr_expect(!plans[i].error || strstr(ar_error_message(), plans[i].error), "%s", ar_error_message());
        for (size_t k = 0; r && k < 2; k++)
            cr_expect_eq(r->run[k].result, AR_CHECK_SAME, "%s, layout %zu: %s %s", plans[i].text, k,
                         r->run[k].first.tensor, r->run[k].error ? r->run[k].error : "");
    }
}

/* --- wrong plans -------------------------------------------------------------------------------------------------- */

CLAIM(terms_that_nobody_adds_up_are_proved_wrong_where_they_are)
{
    static const ar_parallel layouts[] = {{.tp = 1}, {.tp = 2}};
    static const struct {
        const char *layer, *text;
    } rows[] = {{"net.down:fwd", "{\"rules\": [{\"modules\": \"*.up\", \"style\": \"colwise\"}, "
                                 "{\"modules\": \"*.down\", \"style\": \"rowwise\", \"output\": \"P(sum)\"}]}"},
                {"net.up:fwd", "{\"net.up\": \"local_rowwise\", \"net.down\": \"colwise_rep\"}"}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        OWNED(ar_check_report_destroy) ar_check_report *r = check_built(build, rows[i].text, false, layouts, 2);
        cr_assert_not_null(r, "%s", ar_error_message());
        cr_expect_eq(r->run[0].result, AR_CHECK_SAME);
        cr_expect_eq(r->run[1].result, AR_CHECK_DIFFERENT);
        cr_expect_str_eq(r->run[1].first.tensor, rows[i].layer);
    }
}

CLAIM(what_cannot_be_built_is_refused_by_rule_and_layer)
{
    static const ar_parallel tp2 = {.tp = 2};
    static const struct {
        builder build;
        const char *rules, *message; /* rules: a list, or a whole object */
    } rows[] = {
        {build, "{\"modules\": \"*.dwn\", \"style\": \"rowwise\"}",
         "p.json: rule 1, '*.dwn': no layer has this name; the layers of net are net.norm, net.up, net.act, net.drop, "
         "net.down"},
        {build, "{\"modules\": \"net\", \"style\": \"prepare\", \"input\": [[\"S(1)\", \"R\"]]}",
         "p.json: rule 1, 'net': no module with this name is prepared"},
        {build, "{\"modules\": \"*.norm\", \"style\": \"colwise\"}",
         "p.json: net.norm is colwise; a norm is replicate or"},
        {build, "{\"modules\": \"*.up\", \"style\": \"sequence\"}",
         "p.json: net.up is sequence; a linear layer is colwise"},
        {build, "{\"modules\": \"*.drop\", \"style\": \"rowwise\"}",
         "p.json: net.drop is rowwise; what works element by element is replicate or sequence"},
        {build, "{\"modules\": \"*.up\", \"style\": \"vocab\"}", "p.json: net.up is vocab; a linear layer is colwise"},
        {build,
         "{\"modules\": \"*.up\", \"style\": \"colwise\"}, "
         "{\"modules\": \"*.down\", \"style\": \"rowwise\", \"input\": \"R\"}",
         "p.json: rule 2, '*.down': the input of net.down is declared R; S(-1) would fit"},
        {build, "{\"modules\": \"*.up\", \"style\": \"colwise\", \"input\": \"P(sum)\"}",
         "p.json: rule 1, '*.up': the input of net.up is declared P(sum); R would fit"},
        {build, "{\"modules\": \"*.up\", \"style\": \"colwise\", \"output\": \"P(sum)\"}",
         "p.json: rule 1, '*.up': the output of net.up is declared P(sum); R, S(-1) and S(1) are possible"},
        {build, "{\"modules\": \"*.up\", \"style\": \"rowwise\", \"output\": \"S(0)\"}",
         "p.json: rule 1, '*.up': the output of net.up is declared S(0); R, S(-1), S(1) and P(sum) are possible"},
        {build, "{\"modules\": \"*.up\", \"style\": \"rowwise\", \"output\": \"P(sum)\", \"use_local_output\": false}",
         "p.json: rule 1, '*.up': the output of net.up is declared P(sum); R, S(-1) and S(1) are possible"},
        {build_block, "{\"*.attn.q\": \"colwise\", \"*.attn.out\": \"rowwise\"}",
         "p.json: net.attn.k is replicate, but net.attn.q, which has the same input, is colwise or leaves another"},
        {build_block, "{\"*.mlp.gate\": \"colwise\", \"*.mlp.up\": \"colwise_rep\"}",
         "p.json: net.mlp.up is colwise, but net.mlp.gate, which has the same input, is colwise or leaves another"},
        {build_block, "{\"rules\": [{\"modules\": \"*.attn.[qkv]\", \"style\": \"colwise\", \"output\": \"S(1)\"}]}",
         "p.json: net.attn.q leaves S(1), but a query sees all keys"},
        {build_block, "{\"*.attn.[qkv]\": \"local_rowwise\"}",
         "p.json: rule 1, '*.attn.[qkv]': the output of net.attn.q is declared P(sum); R, S(-1) and S(1) are possible"},
        {build_block, "{\"*.attn\": \"colwise\"}",
         "p.json: rule 1, '*.attn': no layer has this name; the layers of net are net.norm, "
         "net.attn.q, net.attn.k, net.attn.v, net.attn.out, net.mlp.gate"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char text[400];
        snprintf(text, sizeof text, strncmp(rows[i].rules, "{\"modules", 9) == 0 ? "{\"rules\": [%s]}" : "%s",
                 rows[i].rules);
        cr_expect_null(check_built(rows[i].build, text, false, &tp2, 1), "%s", text);
        cr_expect_says(rows[i].message);
    }
}

CLAIM(what_does_not_divide_is_an_error_of_that_layout)
{
    static const ar_parallel layouts[] = {{.tp = 3}, {.tp = 2}};
    OWNED(ar_check_report_destroy)
    ar_check_report *r = check_built(build, "{\"net.norm\": \"sequence_parallel\"}", false, layouts, 2);
    cr_assert_not_null(r, "%s", ar_error_message());
    cr_expect_eq(r->run[0].result, AR_CHECK_ERROR);
    cr_expect_not_null(strstr(r->run[0].error, "3"), "%s", r->run[0].error);
    cr_expect_eq(r->run[1].result, AR_CHECK_SAME);
}

/* --- modules of one's own that are prepared ----------------------------------------------------------------------- */

/* norm - own (a function of each element) - up - down - out (R) */
static ar_status build_prepared(void *user, ar_ctx *ctx, ar_module **module, ar_loss **loss)
{
    ar_plan_walk w = {.plan = ((const given *)user)->plan};
    ar_module *m[7] = {NULL};
    ar_status st = AR_OK;
    AR_TRY_TO(made, st, ar_plan_norm_create(&m[0], ctx, &w, "net.norm", AR_NORM_RMS, WIDTH, 1e-5));
    AR_TRY_TO(made, st, ar_plan_prepare_create(&m[1], ctx, &w, "net.own", 0, "x"));
    AR_TRY_TO(made, st, ar_activation_create(&m[2], ctx, "net.own", AR_ACT_SILU, AR_HELD_WHOLE));
    AR_TRY_TO(made, st, ar_plan_prepare_create(&m[3], ctx, &w, "net.own", AR_PLAN_OUTPUT, NULL));
    AR_TRY_TO(made, st, ar_plan_linear_create(&m[4], ctx, &w, "net.up", WIDTH, FFN, true));
    AR_TRY_TO(made, st, ar_plan_linear_create(&m[5], ctx, &w, "net.down", FFN, WIDTH, true));
    AR_TRY_TO(made, st, ar_plan_redistribute_create(&m[6], ctx, &w, "net.out", (ar_placement){AR_REPLICATE, 0}));
    AR_TRY_TO(made, st, ar_plan_end(&w, "net"));
made:
    AR_TRY(ar_sequential_made(module, "net", m, 7, st));
    return ar_squared_error_create(loss, ctx, "loss");
}

#define PREPARED(rule)                                                                                                        \
    "{\"rules\": [{\"modules\": \"*.norm\", \"style\": \"sequence\"}, {\"modules\": \"*.own\", \"style\": \"prepare\", " rule \
    "}, {\"modules\": \"*.up\", \"style\": \"colwise\"}, {\"modules\": \"*.down\", \"style\": \"rowwise\"}]}"

CLAIM(arguments_of_a_module_of_ones_own_are_prepared_by_position_or_name)
{
    static const char *const rules[] = {"\"input\": [[\"S(1)\", \"R\"]]", "\"named_input\": {\"x\": [\"S(1)\", \"R\"]}",
                                        "\"named_input\": {\"x\": [\"S(1)\", \"R\"]}, \"output\": [\"R\", \"S(1)\"]"};
    char text[600];
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        snprintf(text, sizeof text, PREPARED("%s"), rules[i]);
        expect_same_bits(build_prepared, text);
    }
}

/* The whole arrives, and is declared to be terms of a sum. */
static const char wrong_from[] = "{\"rules\": [{\"modules\": \"*.own\", \"style\": \"prepare\", "
                                 "\"input\": [[\"P(sum)\", \"R\"]]}]}";

static ar_status pass_checked(ar_ctx *ctx, void *user)
{
    OWNED(ar_module_destroy) ar_module *m = NULL;
    OWNED(ar_loss_destroy) ar_loss *loss = NULL;
    ar_batch b;
    ar_tensor x, y;
    ar_status st = build_prepared(user, ctx, &m, &loss);
    if (st == AR_OK)
        st = ar_module_fresh(m, ctx, 1);
    if (st == AR_OK)
        st = batch(user, 1, &b);
    if (st == AR_OK)
        st = ari_batch_input(ctx, &x, &b);
    if (st == AR_OK)
        st = ar_module_forward(m, ctx, NULL, &y, &x, &b);
    return st;
}

CLAIM(a_wrong_from_is_an_error_of_a_checking_context_a_finding_and_a_difference)
{
    static const ar_parallel tp2 = {.tp = 2};
    SCOPED(ar_plan_fini) ar_plan plan = plan_of(wrong_from);
    given g = {.plan = &plan};
    const ar_run checked = {.parallel.tp = 2, .placements = AR_DECLARED_CHECKED};
    cr_expect_eq(rank_run(&checked, pass_checked, &g), AR_ERR_DATA);
    cr_expect_says("net.own, redistribution (forward): the value is R, and is declared P(sum)");
    cr_expect_says("rank ");
    const ar_module_case c = {.name = "net", .build = build_prepared, .batch = batch, .user = &g};
    const ar_run run = {.steps = 1, .parallel = tp2, .optimizer = ar_optimizer_defaults(AR_OPTIMIZER_SGD)};
    ar_module_inspection *m = NULL;
    cr_assert_ok(ar_inspect_module(&m, &c, &run));
    cr_expect_geq(m->lint->count, 1u);
    if (m->lint->count > 0) {
        cr_expect_str_eq(m->lint->finding[0].module, "net.own");
        cr_expect_str_eq(m->lint->finding[0].has, "R");
        cr_expect_str_eq(m->lint->finding[0].needs, "P(sum)");
    }
    ar_module_inspection_destroy(m);
    OWNED(ar_check_report_destroy) ar_check_report *r = check_built(build_prepared, wrong_from, false, &tp2, 1);
    cr_assert_not_null(r, "%s", ar_error_message());
    cr_expect_eq(r->run[0].result, AR_CHECK_DIFFERENT);
}

/* --- one layer ---------------------------------------------------------------------------------------------------- */

CLAIM(a_plan_by_calls_holds_its_own_rules_alone)
{
    SCOPED(ar_plan_fini) ar_plan p;
    ar_plan_walk w = {.plan = &p};
    ar_embedding_split tokens;
    ar_linear_split head;
    cr_assert_ok(ar_plan_empty(&p, "mine"));
    cr_assert_ok(ar_plan_add(&p, AR_ARCH_LLAMA, "words", AR_STYLE_ROWWISE));
    cr_assert_ok(ar_plan_add(&p, AR_ARCH_LLAMA, "answer", AR_STYLE_COLWISE));
    cr_expect_eq(p.rules, 2u);
    cr_assert_ok(ari_plan_embedding(&tokens, &w, "words"));
    cr_expect_eq(tokens, AR_EMBEDDING_VOCAB);
    cr_expect_eq(ar_plan_end(&w, "chat"), AR_ERR_NOT_FOUND);
    cr_expect_str_eq(ar_error_message(),
                     "mine: rule 2, 'answer': no layer has this name; the layers of chat are words");
    cr_assert_ok(ari_plan_head(&head, &w, "answer"));
    cr_expect(head.style == AR_STYLE_COLWISE && head.output.kind == AR_SHARD);
    cr_expect_eq(ari_plan_held(&w), AR_HELD_SHARD);
    cr_expect_ok(ar_plan_end(&w, "chat"));
    cr_expect_refused(ari_plan_head(&head, &w, "other"), AR_ERR_UNSUPPORTED,
                      "other: S(-1) arrives, and a head takes R");
    w.placement = (ar_placement){AR_INVARIANT, 0};
    cr_expect_eq(ari_plan_head(&head, &w, "answer"), AR_OK, "I is R here: %s", ar_error_message());
    w.placement = (ar_placement){AR_PARTIAL_SUM, 0};
    cr_expect_eq(ari_plan_head(&head, &w, "answer"), AR_ERR_ARG);
    cr_expect_str_eq(ar_error_message(), "answer: what arrives is said to be P(sum); R, S(-1) and S(1) are possible");
}

CLAIM(embeddings_and_heads_are_cut_as_those_of_models)
{
    static const struct {
        const char *style, *output;
        int tokens, head; /* split and style; -1: refused */
    } rows[] = {{"vocab", "R", AR_EMBEDDING_VOCAB, AR_STYLE_COLWISE},
                {"rowwise", "R", AR_EMBEDDING_VOCAB, -1},
                {"hidden", "R", AR_EMBEDDING_HIDDEN, -1},
                {"colwise", "R", AR_EMBEDDING_HIDDEN, AR_STYLE_COLWISE},
                {"colwise", "S(-1)", -1, AR_STYLE_COLWISE},
                {"replicate", "R", AR_EMBEDDING_WHOLE, AR_STYLE_REPLICATE},
                {"replicate", "S(-1)", -1, -1},
                {"vocab", "S(1)", -1, -1},
                {"sequence", "R", -1, -1}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char text[200];
        ar_embedding_split tokens = 0;
        ar_linear_split head = {0};
        snprintf(text, sizeof text, "{\"rules\": [{\"modules\": \"t\", \"style\": \"%s\", \"output\": \"%s\"}]}",
                 rows[i].style, rows[i].output);
        SCOPED(ar_plan_fini) ar_plan p = plan_of(text);
        ar_plan_walk w = {.plan = &p}, other = w;
        cr_expect_eq(ari_plan_embedding(&tokens, &w, "t"), rows[i].tokens < 0 ? AR_ERR_UNSUPPORTED : AR_OK, "%s", text);
        cr_expect(rows[i].tokens < 0 || (int)tokens == rows[i].tokens, "%s", text);
        cr_expect_eq(ari_plan_head(&head, &other, "t"), rows[i].head < 0 ? AR_ERR_UNSUPPORTED : AR_OK, "%s", text);
        cr_expect(rows[i].head < 0 || (int)head.style == rows[i].head, "%s", text);
    }
}

static ar_status build_under_sp(ar_comm *world, void *user)
{
    ar_ctx_options o = {.tp = world, .sp = true};
    ar_ctx *ctx = NULL;
    ar_plan_walk w = {0};
    ar_module *m = NULL;
    (void)user;
    ar_status st = ar_device_cpu_create(&o.device, 1);
    if (st == AR_OK)
        st = ar_ctx_create(&ctx, &o);
    if (st == AR_OK)
        st = ar_plan_linear_create(&m, ctx, &w, "l", 4, 4, false);
    ar_module_destroy(m);
    ar_ctx_destroy(ctx);
    ar_device_destroy(o.device);
    return st;
}

CLAIM(sequence_parallelism_is_the_plans_to_say)
{
    cr_expect_refused(ar_sim_run(1, NULL, build_under_sp, NULL, NULL), AR_ERR_UNSUPPORTED,
                      "l: the context has sequence parallelism (sp)");
}

EVERY_CLAIM(plan_walk)

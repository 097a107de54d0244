/* SPDX-License-Identifier: Apache-2.0 */
/* A module of one's own whose layers are split as a plan says: an MLP in both orders, with its norm on all positions or
 * on a rank's own, and a plan that is wrong.
 *
 *     planned_mlp              the plans below
 *     planned_mlp PLAN.json..  those of files; exit status 0: right, 1: wrong, 2: cannot be run */
#include "anyrank/activation.h"
#include "anyrank/check_module.h"
#include "anyrank/plan_walk.h"
#include <stdio.h>
#include <string.h>

enum { SAMPLES = 6, POSITIONS = 8, WIDTH = 16, FFN = 24 };
static float x[SAMPLES * POSITIONS * WIDTH], y[SAMPLES * POSITIONS * WIDTH];

/* y = down(gelu(up(norm(x)))) */
static ar_status build(void *plan, ar_ctx *ctx, ar_module **module, ar_loss **loss)
{
    ar_plan_walk w = {.plan = (const ar_plan *)plan};
    ar_module *m[5] = {NULL};
    ar_status st = AR_OK;
    AR_TRY_TO(made, st, ar_plan_norm_create(&m[0], ctx, &w, "norm", AR_NORM_LAYER, WIDTH, 1e-5));
    AR_TRY_TO(made, st, ar_plan_linear_create(&m[1], ctx, &w, "mlp.up", WIDTH, FFN, true));
    AR_TRY_TO(made, st, ar_plan_activation_create(&m[2], ctx, &w, "mlp.act", AR_ACT_GELU_TANH));
    AR_TRY_TO(made, st, ar_plan_linear_create(&m[3], ctx, &w, "mlp.down", FFN, WIDTH, true));
    AR_TRY_TO(made, st, ar_plan_redistribute_create(&m[4], ctx, &w, "out", (ar_placement){AR_REPLICATE, 0}));
    AR_TRY_TO(made, st, ar_plan_end(&w, "net"));
made:
    AR_TRY(ar_sequential_made(module, "net", m, 5, st));
    return ar_squared_error_create(loss, ctx, "loss");
}

static ar_status batch(void *plan, int step, ar_batch *b)
{
    (void)plan, (void)step;
    *b = (ar_batch){.batch = SAMPLES,
                    .seq = 1,
                    .input = x,
                    .sample_ndim = 2,
                    .sample_shape = {POSITIONS, WIDTH},
                    .target = y,
                    .target_width = POSITIONS * WIDTH};
    return AR_OK;
}

/* 0: every layout has one rank's bits; 1: one has others; 2: an error. */
static int check(ar_plan *plan, const char *name)
{
    const ar_parallel layouts[] = {{.tp = 2}, {.tp = 4}, {.tp = 2, .dp = 2, .micro_batches = 2}};
    const ar_module_case c = {.name = name, .build = build, .batch = batch, .user = plan};
    const ar_check_module_options o = {
        .run = {.steps = 2, .optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW)}, .parallel = layouts, .layouts = 3};
    ar_check_report *r = NULL;
    char text[4096];
    if (ar_check_module(&r, &c, &o) != AR_OK)
        return 2;
    ar_check_module_text(r, text, sizeof text);
    printf("%s\n", text);
    const int verdict = r->result == AR_CHECK_SAME ? 0 : r->result == AR_CHECK_DIFFERENT ? 1 : 2;
    ar_check_report_destroy(r);
    return verdict;
}

static const struct {
    const char *name, *text;
    int verdict;
} plans[] = {
    {"column-row",
     "{\"rules\": [{\"modules\": \"*.up\", \"style\": \"colwise\"},"
     " {\"modules\": \"*.down\", \"style\": \"rowwise\"}]}",
     0},
    {"row-column",
     "{\"rules\": [{\"modules\": \"*.up\", \"style\": \"rowwise\"},"
     " {\"modules\": \"*.down\", \"style\": \"colwise\"}]}",
     0},
    {"sequence",
     "{\"rules\": [{\"modules\": \"norm\", \"style\": \"sequence\"},"
     " {\"modules\": \"*.up\", \"style\": \"colwise\", \"input\": \"S(1)\"},"
     " {\"modules\": \"*.down\", \"style\": \"rowwise\", \"output\": \"S(1)\"}]}",
     0},
    {"not-summed",
     "{\"rules\": [{\"modules\": \"*.up\", \"style\": \"colwise\"},"
     " {\"modules\": \"*.down\", \"style\": \"rowwise\", \"output\": \"P(sum)\"}]}",
     1},
};

int main(int argc, char **argv)
{
    const int given = argc - 1, n = given > 0 ? given : (int)(sizeof plans / sizeof *plans);
    int worst = 0;
    for (int i = 0; i < SAMPLES * POSITIONS * WIDTH; i++) {
        x[i] = (float)((i * 7919 + 104729) % 1000) / 500.0f - 1.0f;
        y[i] = (float)((i * 104729 + 7919) % 1000) / 500.0f - 1.0f;
    }
    for (int i = 0; i < n; i++) {
        const char *name = given > 0 ? argv[i + 1] : plans[i].name;
        ar_plan plan = {.rules = 0};
        int verdict = 2;
        if (!(given > 0 ? ar_plan_load(&plan, name) : ar_plan_parse(&plan, plans[i].text, strlen(plans[i].text), name)))
            verdict = check(&plan, name);
        if (verdict == 2)
            printf("%s\n", ar_error_message());
        ar_plan_fini(&plan);
        if (given == 0)
            verdict = verdict != plans[i].verdict;
        worst = verdict > worst ? verdict : worst;
    }
    return worst;
}

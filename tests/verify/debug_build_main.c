/* SPDX-License-Identifier: Apache-2.0 */
/* A library built without NDEBUG: a run whose plan declares that the terms of a sum arrive, where the whole does, ends
 * with an error on its first pass; a release build trusts the plan, and so does a run that asks for it. */
#undef NDEBUG
#include "ref/arith/context.c" /* in place of the library's */

#include <stdio.h>
#include <string.h>

#include "anyrank/plan_walk.h"
#include "anyrank/training.h"

enum { SAMPLES = 3, WIDTH = 8 };

#define RULE(from) \
    "{\"rules\": [{\"modules\": \"net.own\", \"style\": \"prepare\", \"input\": [[\"" from "\", \"R\"]]}]}"

static ar_status build(void *plan, ar_ctx *ctx, ar_module **module, ar_loss **loss)
{
    ar_plan_walk w = {.plan = plan};
    ar_module *m[2] = {NULL};
    ar_status st = AR_OK;
    AR_TRY_TO(made, st, ar_plan_norm_create(&m[0], ctx, &w, "net.norm", AR_NORM_LAYER, WIDTH, 1e-5));
    AR_TRY_TO(made, st, ar_plan_prepare_create(&m[1], ctx, &w, "net.own", 0, NULL));
made:
    AR_TRY(ar_sequential_made(module, "net", m, 2, st));
    return ar_squared_error_create(loss, ctx, "loss");
}

static ar_status batch(void *plan, int step, ar_batch *b)
{
    static const float x[SAMPLES * WIDTH] = {1, 2, 4, 3, 5, 1, 2, 7, 4, 4, 1, 2, 9, 1, 3, 2, 8, 1, 2, 3, 4, 1, 5, 6};
    (void)plan, (void)step;
    *b = (ar_batch){.batch = SAMPLES, .seq = 1, .input = x, .sample_ndim = 1, .sample_shape = {WIDTH}};
    b->target = x;
    b->target_width = WIDTH;
    return AR_OK;
}

static ar_status train(const char *rule, ar_declared_check placements)
{
    ar_plan plan;
    ar_training_report *r = NULL;
    ar_training_options o = ar_training_defaults();
    const ar_module_case c = {.name = "net", .build = build, .batch = batch, .user = &plan};
    o.module = &c;
    o.run.steps = 1;
    o.run.parallel.tp = 2;
    o.run.placements = placements;
    ar_status st = ar_plan_parse(&plan, rule, strlen(rule), "p.json");
    if (st == AR_OK)
        st = ar_train_run(&r, &o);
    ar_training_report_destroy(r);
    ar_plan_fini(&plan);
    return st;
}

int main(void)
{
    static const char expected[] = "net.own, redistribution (forward): the value is R, and is declared P(sum)";
    const ar_status right = train(RULE("R"), AR_DECLARED_BY_BUILD), wrong = train(RULE("P(sum)"), AR_DECLARED_BY_BUILD);
    const bool named = strstr(ar_error_message(), expected) && strstr(ar_error_message(), "rank ");
    const ar_status trusted = train(RULE("P(sum)"), AR_DECLARED_TRUSTED);
    printf("right %d, wrong %d (%s), trusted %d\n", right, wrong, named ? "named" : ar_error_message(), trusted);
    return right == AR_OK && wrong == AR_ERR_DATA && named && trusted == AR_OK ? 0 : 1;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Step that is analysed without running it, as the options describe it. */
#include <math.h>

#include "anyrank/config.h"
#include "cli/plan/plan.h"
#include "cli/shared/command.h"
#include "ref/io/json.h"
#include "verify/run/run.h"

enum { LONGEST_DEFAULT = 4096, DEFAULT_BATCH = 8 };

void ari_planned_set_defaults(ar_parallel *p)
{
    p->zero = p->zero > 0 ? p->zero : 0;
    p->schedule = (unsigned)p->schedule < AR_PP_SCHEDULES ? p->schedule : AR_PP_1F1B;
    if (p->recompute.part == ARI_RECOMPUTE_NOT_GIVEN)
        p->recompute.part = AR_RECOMPUTE_NONE;
}

ar_status ari_planned_begin(ari_step_case *c, ar_config *config, const ari_run_values *r, const ari_common *common)
{
    char path[4096];
    c->run = (ar_run){0};
    if (r->run.optimizer.shards && !r->muon)
        return ar_error_set(AR_ERR_ARG, "--muon-shards goes with --muon");
    AR_TRY(ari_run_config(config, path, sizeof path, &r->run));
    *c = (ari_step_case){.run = ari_run_of(r, common), .config = config};
    ar_run *run = &c->run;
    run->batch = run->batch ? run->batch : DEFAULT_BATCH;
    if (run->seq == 0)
        run->seq = config->max_positions < LONGEST_DEFAULT ? config->max_positions : LONGEST_DEFAULT;
    run->clip = isnan(run->clip) ? 1.0 : run->clip;
    run->dropout = isnan(run->dropout) ? 0.0 : run->dropout;
    run->optimizer = ar_optimizer_defaults(r->muon ? AR_OPTIMIZER_MUON : AR_OPTIMIZER_ADAMW);
    run->optimizer.shards = r->run.optimizer.shards;
    run->steps = 1;
    AR_TRY(ari_run_check_loss(run, config));
    return ari_layout_load(r, run);
}

void ari_planned_end(ari_step_case *c)
{
    ari_layout_unload(&c->run);
}

ar_status ari_planned_case(ari_step_case *c, ar_config *config, const ari_run_values *r, const ari_common *common)
{
    c->run = (ar_run){0};
    AR_TRY(ari_layout_check(r));
    AR_TRY(ari_planned_begin(c, config, r, common));
    return ar_run_check(&c->run, config);
}

json_t *ari_planned_json(const char *command, const ari_step_case *c)
{
    const ar_run *run = &c->run;
    json_t *o = ari_json_begin(command);
    json_object_set_new(o, "model", ari_json_text(c->config->name));
    json_object_set_new(o, "layout", ari_layout_json(&run->parallel, run->batch, ari_layout_of_run));
    json_object_set_new(o, "plan", ari_plan_json(&run->plan));
    json_object_set_new(o, "batch", json_integer((json_int_t)run->batch));
    json_object_set_new(o, "seq", json_integer((json_int_t)run->seq));
    json_object_set_new(o, "notes", ari_config_notes(NULL, c->config));
    return o;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/plan/plan.h"

#include <math.h>

#include "cli/options/run.h"
#include "cli/options/subcommand.h"
#include "cli/shared/table.h"
#include "ref/core/size.h"
#include "ref/io/json.h"
#include "run/run.h"
#include "sim/plan/bytes.h"

typedef ari_plan_values plan_values;

enum { LONGEST_DEFAULT = 4096, DEFAULT_BATCH = 8 };

#define ARI_VALUES plan_values
static const ari_option options[] = {
    ARI_OPTION_INT("gpus", gpus, 1, ARI_MOST_GPUS, "N", "compare all layouts of so many GPUs; a given extent is fixed",
                   .more = "Without it the layout that the extents give is planned in depth."),
    ARI_OPTION_STRING("cluster", cluster, "SPEC",
                      "what they are and how they are joined: a machine's name, or words as '8x inside=2us:300GB/s "
                      "between=5us:25GB/s flops=400T memory=80GB' (default h100)",
                      .choices = ar_sim_cluster_names),
    ARI_OPTION_GROUP(ari_pipeline_options, r),
    ARI_OPTION_FLAG("no-flash", no_flash, "attention that stores its scores (default: flash attention)"),
    ARI_OPTION_FLAG("hierarchical", hierarchical,
                    "collectives over nodes go inside them first, then between them (default: one ring)"),
    ARI_OPTION_FLAG("shared-links", shared_links,
                    "collectives that are in flight at once on one kind of link share its rate (default: each has it)"),
    ARI_OPTION_ENUM("table", table, ari_plan_table_names,
                    "memory: of a rank by tp; scaling: time by tp; decision: the best layout by number of GPUs"),
    ARI_OPTION_FLAG("all", all,
                    "every layout, also those that cannot be, with the reason (default: the best of each "
                    "tp x cp x pp x dp)"),
    ARI_OPTION_INT("top", top, 0, 1 << 24, "N", "layouts that are listed; 0: all (default 10)"),
    ARI_OPTION_FILE("csv", csv, "FILE",
                    "write the layouts as rows of numbers; with --pipeline the schedule, as --schedule-pp reads it",
                    .written = true),
    ARI_OPTION_FILE("html", html, "FILE.html", "write the layouts as a page to filter and sort, which needs no network",
                    .written = true),
    ARI_OPTION_FILE("svg", svg, "FILE.svg", "write memory and time of the layouts that are listed as a picture",
                    .written = true),
    ARI_OPTION_FLAG("pipeline", pipeline,
                    "the schedule of the ranks of --pp as a picture of text, what of the time they wait, and how many "
                    "micro-batches they have in flight"),
    ARI_OPTION_FLAG("flow", flow,
                    "the operations of one rank: shapes, placements, collectives with their bytes, multiply-adds"),
    ARI_OPTION_FLAG("backward", backward,
                    "the whole step: backward pass, sums of gradients and update too (default: the forward pass)"),
    ARI_OPTION_FLAG("each-layer", each_layer, "a line for every layer (default: equal layers in one)"),
    ARI_OPTION_INT("rank", rank, 0, 1 << 24, "R",
                   "whose: ranks are numbered over tp, then over cp, then over dp (default 0)"),
    ARI_OPTION_FLAG("markdown", markdown, "the table as Markdown"),
    ARI_OPTION_ENUM("numerics", r.run.numerics, ari_numerics_names,
                    "exact: sums of integers, with the exchanges of exponents that they need; native: fp32 (default "
                    "exact)"),
    ARI_PLANNED_OPTIONS(3, "ZeRO: 1 shares optimizer states over --dp, 2 gradients too, 3 weights too (default 0)"),
    ARI_OPTION_INT("dp-replicate", r.run.parallel.dp_replicate, 1, 4096, "R",
                   "with --zero: the ranks of --dp are R groups, each of which shares out by itself (default 1; a "
                   "search also tries groups within nodes)"),
    {0},
};

static const ari_positional positionals[] = {
    ARI_POSITIONAL("MODEL", FOLDER, r.run.model,
                   "a folder with a Hugging Face config.json, that file, or a bundled "
                   "name; no weights are read",
                   .required = true, .choices = ari_model_names),
    {0},
};

void ari_planned_one(ar_parallel *p)
{
    p->zero = p->zero > 0 ? p->zero : 0;
    p->schedule = (unsigned)p->schedule < AR_PP_SCHEDULES ? p->schedule : AR_PP_1F1B;
    if (p->recompute.what == ARI_RECOMPUTE_NOT_GIVEN)
        p->recompute.what = AR_RECOMPUTE_NONE;
}

ar_status ari_planned_begin(ari_step_case *c, ar_config *config, const ari_run_values *r, const ari_common *common)
{
    char path[4096];
    c->run.plan = (ar_plan){0};
    AR_TRY(ari_run_config(config, path, sizeof path, &r->run));
    *c = (ari_step_case){.run = ari_run_of(r, common), .config = config};
    ar_run *run = &c->run;
    run->batch = run->batch ? run->batch : DEFAULT_BATCH;
    if (run->seq == 0)
        run->seq = config->max_positions < LONGEST_DEFAULT ? config->max_positions : LONGEST_DEFAULT;
    run->clip = isnan(run->clip) ? 1.0 : run->clip;
    run->dropout = isnan(run->dropout) ? 0.0 : run->dropout;
    run->optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    run->steps = 1;
    return ari_layout_load(r, run);
}

ar_status ari_planned_case(ari_step_case *c, ar_config *config, const ari_run_values *r, const ari_common *common)
{
    c->run.plan = (ar_plan){0};
    AR_TRY(ari_layout_check(r));
    AR_TRY(ari_planned_begin(c, config, r, common));
    return ar_run_check(&c->run, config);
}

json_t *ari_planned_json(const char *command, const ari_step_case *c)
{
    const ar_run *run = &c->run;
    json_t *o = ari_json_begin(command);
    json_object_set_new(o, "model", ari_json_text(c->config->name));
    json_object_set_new(o, "layout", ari_layout_json(&run->parallel, run->batch, ARI_LAYOUT_OF_RUN));
    json_object_set_new(o, "plan", ari_plan_json(&run->plan));
    json_object_set_new(o, "batch", json_integer((json_int_t)run->batch));
    json_object_set_new(o, "seq", json_integer((json_int_t)run->seq));
    json_object_set_new(o, "notes", ari_config_notes(NULL, c->config));
    return o;
}

static ar_status flow_options(ari_flow_options *o, const plan_values *v, const ar_parallel *p)
{
    const int world = ar_parallel_world(p);
    if (v->rank >= world)
        return ar_error_set(AR_ERR_ARG, "--rank %d: the layout has %d rank%s, numbered from 0", v->rank, world,
                            world == 1 ? "" : "s");
    *o = (ari_flow_options){.rank = v->rank, .passes_only = !v->backward, .each_layer = v->each_layer};
    return AR_OK;
}

static json_t *as_json(const plan_values *v, const ari_flow *f, const ari_step_case *c, uint64_t bytes)
{
    const ar_run *run = &c->run;
    json_t *o = ari_planned_json("plan", c);
    json_object_set_new(o, "numerics", json_string(ari_numerics_names[run->numerics]));
    ari_loss_json(o, &run->loss);
    json_object_set_new(o, "rank", json_integer(v->rank));
    json_object_set_new(o, "bytes", json_pack("{s:I}", "predicted", (json_int_t)bytes));
    return ari_json_whole(o, ari_flow_json(f, c));
}

static ar_status print(FILE *to, const plan_values *v, const ari_flow *f, const ari_step_case *c, uint64_t bytes)
{
    const ar_run *run = &c->run;
    AR_TRY(ari_flow_print(to, f, c, v->markdown));
    ari_plan_print(to, &run->plan);
    if (v->backward)
        fprintf(to, "all ranks together, start and step: %s\n", ARI_BYTES(bytes));
    fprintf(to, "%s, %s, %s numerics, %zu x %zu tokens: rank %d of %d\n", c->config->name,
            ARI_LAYOUT(&run->parallel, run->batch), ari_numerics_names[run->numerics], run->batch, run->seq, v->rank,
            ar_parallel_world(&run->parallel));
    return AR_OK;
}

/* Refuses what is about layouts compared. */
static ar_status check_one(const plan_values *v)
{
    if (v->gpus || v->cluster || v->table >= 0 || v->all || (v->csv && v->flow) || v->html || v->svg || v->top >= 0 ||
        v->no_flash || v->hierarchical || v->shared_links)
        return ar_error_set(
            AR_ERR_ARG,
            "%s shows the operations of one layout; --gpus, --cluster, --table, --all, --top, %s--html, "
            "--svg, --no-flash, --hierarchical and --shared-links are about what layouts take: leave one "
            "out",
            v->flow ? "--flow" : "--pipeline", v->flow ? "--csv, " : "");
    return AR_OK;
}

static ar_status check_pipeline(const plan_values *v)
{
    AR_TRY(check_one(v));
    if (v->flow || v->backward || v->each_layer || v->markdown || v->rank > 0)
        return ar_error_set(AR_ERR_ARG, "--pipeline shows all ranks of a schedule; --flow, --backward, --each-layer, "
                                        "--markdown and --rank list the operations of one: leave one out");
    return AR_OK;
}

static ar_status run_flow(const plan_values *v)
{
    ar_config config;
    ari_step_case c = {.run.plan = {0}};
    ari_flow_options o;
    ari_flow f = {.row = NULL};
    ari_run_values r = v->r;
    uint64_t bytes = 0;
    ar_status st = AR_OK;
    ari_planned_one(&r.run.parallel);
    AR_TRY_TO(done, st, check_one(v));
    AR_TRY_TO(done, st, ari_planned_case(&c, &config, &r, &v->common));
    AR_TRY_TO(done, st, flow_options(&o, v, &c.run.parallel));
    if (!v->common.quiet)
        json_decref(ari_config_notes(stderr, &config));
    AR_TRY_TO(done, st, ari_traffic_bytes(&bytes, &c));
    AR_TRY_TO(done, st, ari_flow_init(&f, &c, &o));
    if (ari_wants_text(&v->common))
        AR_TRY_TO(done, st, print(stdout, v, &f, &c, bytes));
    if (v->common.json)
        st = ari_json_end(as_json(v, &f, &c, bytes), &v->common);
done:
    ari_flow_fini(&f);
    ari_layout_unload(&c.run);
    return st;
}

static ar_status run(void *values, int *exit_code)
{
    const plan_values *v = values;
    (void)exit_code;
    if (!v->pipeline)
        return v->flow ? run_flow(v) : ari_plan_layouts(v);
    AR_TRY(check_pipeline(v));
    return ari_plan_pipeline(v);
}

static const plan_values defaults = {.r =
                                         ARI_RUN_NOT_GIVEN(.run.parallel = {.zero = -1,
                                                                            .schedule = ARI_PP_SCHEDULE_NOT_GIVEN,
                                                                            .recompute.what = ARI_RECOMPUTE_NOT_GIVEN}),
                                     .table = -1,
                                     .top = -1};

const ari_args_spec ari_plan_spec = {
    .command = "plan",
    .summary = "Says what layouts of a model take, and what one does, from its config alone: no weights, no run.",
    .example = "anyrank plan llama-3-8b --gpus 64 --cluster h100 --batch 512 --seq 8192\n"
               "anyrank plan llama-3-70b --tp 8 --pp 4 --dp 2 --sp --batch 128 --seq 8192\n"
               "anyrank plan llama-3-8b --gpus 64 --table decision\n"
               "anyrank plan llama-3-8b --pipeline --pp 4 --schedule-pp zero-bubble --micro-batches 8\n"
               "anyrank plan llama-demo --flow --tp 4 --sp\n"
               "anyrank plan MODEL --flow --backward --tp 8 --dp 4 --sp --numerics native --markdown\n"
               "anyrank plan config.json --flow --tp 8 --batch 16 --seq 8192 --json -",
    .options = options,
    .positionals = positionals,
    .common_at = offsetof(plan_values, common),
    .size = sizeof(plan_values),
    .defaults = &defaults,
    .run = run,
};

/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/plan/plan.h"

#include "cli/options/args.h"

typedef ari_plan_values plan_values;

#define ARI_VALUES plan_values
static const ari_option options[] = {
    ARI_OPTION_SECTION("cluster"),
    ARI_OPTION_INT("gpus", gpus, 1, ARI_MAX_GPUS, "N", "compare all layouts of so many GPUs; a given extent is fixed",
                   .details = "Without it the layout that the extents give is planned in depth."),
    ARI_OPTION_STRING("cluster", cluster, "SPEC",
                      "what they are and how they are joined: a machine's name, or words as '8x inside=2us:300GB/s "
                      "between=5us:25GB/s flops=400T memory=80GB' (default h100)",
                      .choices = ar_sim_cluster_names),
    ARI_OPTION_GROUP(ari_pipeline_options, r),
    ARI_OPTION_SECTION("assumptions"),
    ARI_OPTION_FLAG("no-flash", no_flash, "attention that stores its scores (default: flash attention)"),
    ARI_OPTION_FLAG("muon", r.muon, "matrices under Muon, with a momentum alone (default: all under AdamW)"),
    ARI_MUON_SHARDS_OPTION(r.run.optimizer.shards),
    ARI_OPTION_FLAG("hierarchical", hierarchical,
                    "collectives over nodes go inside them first, then between them (default: one ring)"),
    ARI_OPTION_FLAG("shared-links", shared_links,
                    "collectives that are in flight at once on one kind of link share its rate (default: each has it)"),
    ARI_OPTION_ENUM("system", system, ari_system_names,
                    "look for what this system can do, and print its flags (default: all; memory as Megatron-LM's)"),
    ARI_OPTION_SECTION("tables"),
    ARI_OPTION_ENUM("table", table, ari_plan_table_names,
                    "memory: of a rank by tp; scaling: time by tp; decision: the best layout by number of GPUs"),
    ARI_OPTION_FLAG("all", show_all,
                    "every layout, also those that cannot be, with the reason (default: the best of each "
                    "tp x cp x pp x dp)"),
    ARI_OPTION_INT("top", top, 0, 1 << 24, "N", "layouts that are listed; 0: all (default 10)"),
    ARI_OPTION_STRING("why", why, "LAYOUT",
                      "with --gpus: the best layout of these extents, as 'tp=8 pp=16', beside the first, kind by kind"),
    ARI_OPTION_SECTION("output"),
    ARI_OPTION_FILE("csv", csv, "FILE",
                    "write the layouts as rows of numbers; with --pipeline the schedule, as --schedule-pp reads it",
                    .written = true),
    ARI_OPTION_SECTION("in depth"),
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
    ARI_OPTION_SECTION("numerics"),
    ARI_OPTION_ENUM("numerics", r.run.numerics, ari_numerics_names,
                    "exact: sums of integers, with the exchanges of exponents that they need; native: fp32 (default "
                    "exact)"),
    ARI_PLANNED_OPTIONS(3, "ZeRO: 1 shares optimizer states over --dp, 2 gradients too, 3 weights too (default 0)"),
    ARI_OPTION_SECTION("memory"),
    ARI_OPTION_INT("dp-replicate", r.run.parallel.dp_replicate, 1, 4096, "R",
                   "with --zero: the ranks of --dp are R groups, each of which shares out by itself (default 1; a "
                   "search also tries groups within nodes)"),
    {0},
};

ARI_MODEL_POSITIONAL(ARI_MODEL_CONFIG, true);

/* Bits for the requested results, in the order of ari_plan_table, and sets of them. */
enum { FLOW = 1, PIPELINE = 2, DEPTH = 4, SEARCH = 8, MEMORY = 16, SCALING = 32, DECISION = 64 };
enum { TABLES = MEMORY | SCALING | DECISION, LAYOUTS = DEPTH | SEARCH | TABLES, BY_TP = MEMORY | SCALING };
static const char *const names[] = {"--flow",
                                    "--pipeline",
                                    "one layout in depth",
                                    "--gpus",
                                    "--table memory, which is of one sample of tp=1, 2, 4, ..",
                                    "--table scaling, which is of one sample on tp=1, 2, 4, ..",
                                    "--table decision"};

/* Refuses options that would say nothing. */
static ar_status check_use(const plan_values *v, int mode)
{
    const ar_parallel *p = &v->r.run.parallel;
    const bool chooses = ari_layout_given(&v->r) || p->virtual_stages > 0 || p->ep > 0 || p->etp > 0 ||
                         p->dispatch != AR_DISPATCH_ALL_TO_ALL || p->zigzag || p->forward_first ||
                         p->schedule != ARI_PP_SCHEDULE_NOT_GIVEN || p->recompute.part != ARI_RECOMPUTE_NOT_GIVEN;
    const struct {
        const char *names;
        bool is_set;
        int serves;
    } uses[] = {
        {"--flow", v->flow, FLOW},
        {"--backward, --each-layer, --markdown, --rank", v->backward || v->each_layer || v->markdown || v->rank, FLOW},
        {"--gpus", v->gpus > 0, SEARCH | TABLES},
        {"--cluster", v->cluster != NULL, LAYOUTS},
        {"--table", v->table >= 0, TABLES},
        {"--no-flash", v->no_flash, LAYOUTS},
        {"--hierarchical, --shared-links", v->hierarchical || v->shared_links, LAYOUTS & ~MEMORY},
        {"--system", v->system >= 0, LAYOUTS & ~BY_TP},
        {"--all, --top, --why", v->show_all || v->top >= 0 || v->why, SEARCH},
        {"--csv", v->csv != NULL, SEARCH | PIPELINE},
        {"--batch", v->r.run.batch > 1, ~BY_TP},
        {"--tp, --cp, --pp, --dp and what else chooses a layout", chooses, ~BY_TP}};
    for (size_t i = 0; i < sizeof uses / sizeof *uses; i++) {
        if (uses[i].is_set && !(uses[i].serves >> mode & 1))
            return ar_error_set(AR_ERR_ARG, "%s: of no use to %s; %s", uses[i].names, names[mode],
                                1 << mode != DEPTH        ? "leave one out"
                                : uses[i].serves & SEARCH ? "give --gpus N too"
                                                          : "give --flow too");
    }
    return AR_OK;
}

static ar_status run_plan(void *values, int *exit_code)
{
    const plan_values *v = values;
    const int layouts = v->table >= 0 ? 4 + v->table : v->gpus > 0 ? 3 : 2;
    (void)exit_code;
    AR_TRY(check_use(v, v->pipeline ? 1 : v->flow ? 0 : layouts));
    return v->pipeline ? ari_plan_pipeline(v) : v->flow ? ari_plan_flow(v) : ari_plan_layouts(v);
}

static const plan_values defaults = {.r =
                                         ARI_RUN_NOT_GIVEN(.run.parallel = {.zero = -1,
                                                                            .schedule = ARI_PP_SCHEDULE_NOT_GIVEN,
                                                                            .recompute.part = ARI_RECOMPUTE_NOT_GIVEN}),
                                     .table = -1,
                                     .top = -1,
                                     .system = -1};

const ari_args_spec ari_plan_spec = {
    .command = "plan",
    .summary = "Says what layouts of a model take, and what one does, from its config alone: no weights, no run.",
    .example = "anyrank plan llama-3-8b --gpus 64 --cluster h100 --batch 512 --seq 8192\n"
               "anyrank plan llama-3-70b --tp 8 --pp 4 --dp 2 --sp --batch 128 --seq 8192\n"
               "anyrank plan llama-3-8b --gpus 64 --table decision\n"
               "anyrank plan llama-3-8b --pipeline --pp 4 --schedule-pp zero-bubble --micro-batches 8\n"
               "anyrank plan MODEL --flow --backward --tp 8 --dp 4 --sp --numerics native --markdown\n"
               "anyrank plan config.json --flow --tp 8 --batch 16 --seq 8192 --json -",
    .options = options,
    .positionals = positionals,
    .size = sizeof(plan_values),
    .defaults = &defaults,
    .run = run_plan,
};

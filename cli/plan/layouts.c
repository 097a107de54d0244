/* SPDX-License-Identifier: Apache-2.0 */
/* The cost of layouts: builds the request from the options and prints the answer. */

#include "cli/plan/plan.h"
#include "cli/shared/command.h"
#include "cli/shared/progress.h"
#include "ref/core/size.h"
#include "ref/core/text.h"
#include "ref/models/model_private.h"
#include "sim/sim_private.h"

const char *const ari_plan_table_names[] = {"memory", "scaling", "decision", NULL};

/* --- the question ------------------------------------------------------------------------------------------------- */

static bool is_search(const ari_plan_values *v)
{
    return v->gpus > 0;
}

/* True if a table varies tp for one sample. */
static bool is_by_tp(const ari_plan_values *v)
{
    return v->table == ARI_PLAN_MEMORY || v->table == ARI_PLAN_SCALING;
}

static bool recompute_given(const ari_plan_values *v)
{
    return v->r.run.parallel.recompute.part != ARI_RECOMPUTE_NOT_GIVEN;
}

static bool schedule_given(const ari_plan_values *v)
{
    return v->r.run.parallel.schedule != ARI_PP_SCHEDULE_NOT_GIVEN;
}

/* Checks that the ranks of the given extents divide the number of ranks, or equal it if every extent is given. */
static ar_status check_extents(const ari_plan_values *v)
{
    const ari_choice choice = ari_choice_of(&v->r.run.parallel);
    char extents_text[ARI_CHOICE_TEXT] = "";
    ari_text text = ari_text_in(extents_text, sizeof extents_text);
    int remaining = v->gpus, axes = 0;
    bool divides = true;
    for (int i = 0; i < ARI_LAYOUT_AXES; i++) {
        const int n = choice.extent[i];
        if (n > 0)
            ari_say(&text, "%s%s=%d", axes++ ? " " : "", ari_layout_axes[ari_planned_axes[i]].name, n);
        divides = divides && remaining % ari_at_least_one(n) == 0;
        remaining = divides ? remaining / ari_at_least_one(n) : remaining;
    }
    if (!divides)
        return ar_error_set(AR_ERR_ARG, "--gpus %d cannot be divided by %s; use %s %d", v->gpus, extents_text,
                            axes > 1 ? "extents whose product divides" : "one that divides", v->gpus);
    if (axes == ARI_LAYOUT_AXES && remaining > 1)
        return ar_error_set(AR_ERR_ARG, "%s are %d ranks, not --gpus %d: leave one out, which then is what remains",
                            extents_text, v->gpus / remaining, v->gpus);
    return AR_OK;
}

static ar_status check_values(const ari_plan_values *v)
{
    if (!is_search(v) && v->table < 0 && !ari_layout_given(&v->r))
        return ar_error_set(AR_ERR_ARG,
                            "how many GPUs? --gpus N compares their layouts; --tp, --cp, --pp and --dp give "
                            "one layout, planned in depth; --flow lists the operations of one");
    if (v->why)
        AR_TRY(ari_why_read(&(ari_choice){.ep = 1}, v->why, v->gpus));
    return is_search(v) ? check_extents(v) : AR_OK;
}

static ar_status check_sequence(const ari_plan_request *a)
{
    const ar_run *run = &a->search.base.step.run;
    if (a->config.learned_positions && run->seq > a->config.max_positions)
        return ar_error_set(AR_ERR_SHAPE, "a sequence of %zu is longer than the %zu positions of %s", run->seq,
                            a->config.max_positions, a->config.name);
    if (!a->v->common.quiet && a->config.rope.kind && run->seq > a->config.max_positions)
        fprintf(stderr, "note: a sequence of %zu is longer than the %zu positions of %s\n", run->seq,
                a->config.max_positions, a->config.name);
    return AR_OK;
}

/* Returns the number of ranks given by the extents. */
static ar_status count_ranks(ari_plan_request *a)
{
    if (a->v->gpus == 0)
        return ari_planned_world(&a->search.ranks, &a->search.base);
    a->search.ranks = a->v->gpus;
    return AR_OK;
}

/* Sets up the requested search: given extents, stages and forms are fixed. */
static void fix_given(ari_search *s, const ari_plan_values *v)
{
    const ar_parallel *p = &v->r.run.parallel;
    s->fixed = ari_choice_of(p); /* 0 for each extent that is not given */
    s->sp = p->sp || s->base.step.run.parallel.sp ? 1 : -1;
    s->zero = p->zero;
    s->recompute = recompute_given(v) ? (int)p->recompute.part : -1;
    s->schedule = schedule_given(v) ? (int)p->schedule : -1;
    s->every = v->show_all;
}

/* Begins a request. Without a batch there is one sequence per GPU. */
static ar_status begin_request(ari_plan_request *a, const ari_plan_values *v)
{
    ar_run *run = &a->search.base.step.run;
    *a = (ari_plan_request){.v = v, .search.base.flash = !v->no_flash};
    AR_TRY(check_values(v));
    AR_TRY(ar_sim_cluster_parse(&a->search.time.cluster, v->cluster ? v->cluster : "h100"));
    ari_sim_cluster_describe(&a->search.time.cluster, a->cluster, sizeof a->cluster);
    if (a->search.time.cluster.gpu > 0)
        a->machine = ar_sim_cluster_names[a->search.time.cluster.gpu - 1];
    if (v->hierarchical && a->search.time.cluster.gpu > 0)
        return ar_error_set(AR_ERR_ARG, "--hierarchical is about clusters of given rates, as \"h100 flops=400T\": on a "
                                        "named GPU collectives use all ports of a node");
    a->search.time.hierarchical = v->hierarchical;
    a->search.time.shared_links = v->shared_links;
    AR_TRY(ari_planned_begin(&a->search.base.step, &a->config, &v->r, &v->common));
    AR_TRY(count_ranks(a));
    if (is_by_tp(v))
        run->batch = 1;
    else if (v->r.run.batch == 0 && run->batch < (size_t)a->search.ranks)
        run->batch = (size_t)a->search.ranks;
    run->parallel.overlap = v->r.run.parallel.overlap;
    if (!is_by_tp(v))
        ari_search_account(&a->search, v->system);
    if (v->r.run.ddp.bucket_bytes == ARI_NOT_GIVEN)
        run->ddp.bucket_bytes = ARI_BUCKETS_USUAL;
    if (!v->common.quiet)
        json_decref(ari_config_notes(stderr, &a->config));
    fix_given(&a->search, v);
    AR_TRY(check_sequence(a));
    return ari_config_parameters(&a->config, &a->parameters);
}

/* --- a layout in depth -------------------------------------------------------------------------------------------- */

/* Returns the layout of the options. By default a micro-batch has one sample. */
static ari_choice resolve_choice(const ari_plan_request *a)
{
    const ar_run *run = &a->search.base.step.run;
    const int micro = a->v->r.run.parallel.micro_batches;
    ari_choice c = ari_choice_of(&run->parallel);
    c.zero = c.zero > 0 ? c.zero : 0;
    c.micro_batches = ari_at_least_one(micro > 0 ? micro : (int)(run->batch / (size_t)c.dp));
    return c;
}

/* Refuses options that would have no effect, as `check` does. A search chooses what the user left open: without --cp,
 * --cp-inner and --zigzag apply to every cp that it tries, and --schedule-pp and --virtual-stages to every pp. */
static ar_status check_options(const ari_plan_request *a)
{
    ari_run_values r = a->v->r;
    ar_parallel *p = &r.run.parallel;
    if (is_search(a->v) || a->v->table >= 0)
        *p = (ar_parallel){.cp = p->cp,
                           .cp_inner = p->cp > 0 ? p->cp_inner : 0,
                           .zigzag = p->cp > 0 && p->zigzag,
                           .dispatch = p->ep == 1 ? p->dispatch : AR_DISPATCH_ALL_TO_ALL,
                           .micro_batches = p->micro_batches,
                           .recompute = p->recompute,
                           .pp = p->pp,
                           .schedule = p->pp == 0                                      ? AR_PP_1F1B
                                       : schedule_given(a->v) || p->virtual_stages < 2 ? p->schedule
                                                                                       : AR_PP_INTERLEAVED,
                           .virtual_stages = p->pp > 0 ? p->virtual_stages : 0,
                           .forward_first = p->forward_first && p->micro_batches > 0};
    else
        p->micro_batches = resolve_choice(a).micro_batches;
    if (!is_search(a->v) && !recompute_given(a->v))
        p->recompute.part = AR_RECOMPUTE_NONE;
    if ((unsigned)p->schedule >= AR_PP_SCHEDULES)
        p->schedule = AR_PP_1F1B;
    p->dp_replicate = 0;
    p->zero = 0; /* sharded over dp and cp here: ari_planned_check */
    return ari_layout_check(&r);
}

static ar_status run_depth(const ari_plan_request *a)
{
    const ari_choice c = resolve_choice(a);
    ari_depth d;
    AR_TRY(ari_depth_of(&d, &a->search, &c, NULL));
    if (ari_prints_text(&a->v->common))
        AR_TRY(ari_depth_print(stdout, a, &d));
    if (!a->v->common.json)
        return AR_OK;
    json_t *layouts = json_pack("{s:[o]}", "layouts", ari_depth_json(&d));
    return ari_json_end(ari_json_merge(ari_plan_request_json(a), layouts), &a->v->common);
}

/* --- all layouts -------------------------------------------------------------------------------------------------- */

static ar_status layouts_json(json_t *layouts, const ari_plan_request *a, const ari_ranking *r)
{
    for (size_t i = 0; i < r->n; i++) {
        const ari_candidate *f = &r->layout[i];
        const ari_planned p = ari_choice_planned(&a->search.base, &f->choice);
        const bool deep = f->legal == AR_OK && i < ari_ranking_shown(a, r);
        ari_depth d;
        if (deep)
            AR_TRY(ari_depth_of(&d, &a->search, &f->choice, NULL));
        json_array_append_new(layouts, deep ? ari_depth_json(&d) : ari_candidate_json(f, &p));
    }
    return AR_OK;
}

static ar_status save_ranking(const ari_plan_request *a, const ari_ranking *r)
{
    json_t *o = ari_plan_request_json(a), *layouts = json_array();
    ar_status st = layouts_json(layouts, a, r);
    if (st == AR_OK && o && r->n > 0 && r->layout[0].legal == AR_OK)
        st = ari_why_json(o, a, r);
    o = ari_json_merge(o, json_pack("{s:{s:I, s:I, s:I, s:I, s:I}, s:o}", "searched", "equal", (json_int_t)r->equal,
                                    "meshes", (json_int_t)r->meshes, "layouts", (json_int_t)r->layouts, "legal",
                                    (json_int_t)r->legal, "fitting", (json_int_t)r->fitting, "layouts", layouts));
    if (st == AR_OK)
        return ari_json_end(o, &a->v->common);
    json_decref(o);
    return st;
}

static ar_status run_search(const ari_plan_request *a)
{
    ARI_ENDED(ari_ranking_fini) ari_ranking r = {0};
    const ar_status st = ari_search_run(&r, &a->search);
    ari_progress_end(a->search.user);
    AR_TRY(st);
    if (r.layouts == 0)
        return ar_error_set(AR_ERR_INDIVISIBLE, "no cp that %d GPUs can have is a number of groups of --cp-inner %d",
                            a->search.ranks, a->search.fixed.cp_inner);
    if (r.legal == 0 && !a->v->show_all)
        return ar_error_set(AR_ERR_INDIVISIBLE,
                            "no layout of %d GPUs is legal: %s (--all lists every one with its reason)",
                            a->search.ranks, r.refused);
    if (ari_prints_text(&a->v->common))
        AR_TRY(ari_ranking_print(stdout, a, &r));
    if (a->v->csv)
        AR_TRY(ari_ranking_csv(a->v->csv, &a->search.base, &r));
    return a->v->common.json ? save_ranking(a, &r) : AR_OK;
}

static ar_status run_table(const ari_plan_request *a)
{
    json_t *rows = NULL;
    FILE *out = ari_prints_text(&a->v->common) ? stdout : NULL;
    AR_TRY(ari_plan_table_run(&rows, out, a));
    json_t *o = a->v->common.json ? ari_plan_request_json(a) : NULL;
    if (o)
        json_object_set(o, "rows", rows);
    json_decref(rows);
    return a->v->common.json ? ari_json_end(o, &a->v->common) : AR_OK;
}

ar_status ari_plan_layouts(const ari_plan_values *v)
{
    ari_plan_request a;
    ari_progress progress;
    ar_status st = begin_request(&a, v);
    ari_progress_begin(&progress, &v->common);
    a.search.progress = ari_progress_show;
    a.search.user = &progress;
    if (st == AR_OK)
        st = check_options(&a);
    if (st == AR_OK)
        st = v->table >= 0 ? run_table(&a) : is_search(v) ? run_search(&a) : run_depth(&a);
    ari_layout_unload(&a.search.base.step.run);
    return st;
}

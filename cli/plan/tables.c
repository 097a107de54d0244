/* SPDX-License-Identifier: Apache-2.0 */
/* Tables of a model's layouts: memory and time by tp, and the best layout by number of GPUs. */

#include "cli/plan/plan.h"
#include "cli/shared/progress.h"
#include "ref/core/size.h"
#include "ref/models/model_private.h"

static const double GB = 1e-9;
enum { MOST_TP = 1 << 16, MOST_SHOWN = 32 }; /* largest tp that is tried, and largest that is shown without --gpus */

/* Sets *can to whether the model supports this tp; returns errors that say nothing about that. */
static ar_status can_have(bool *can, const ari_plan_request *a, int tp)
{
    const ar_plan *plan = &a->search.base.step.run.plan;
    const ar_status st = ari_config_check_ranks(&a->config, tp, plan);
    *can = st == AR_OK;
    return *can || ari_is_verdict(st) ? AR_OK : st;
}

/* Returns a layout with only tp, for a step without a given layout. */
static ari_choice choice_of(const ari_plan_request *a, int tp, bool sp, ar_recompute recompute)
{
    ari_choice c = ari_choice_of(&a->search.base.step.run.parallel);
    c.tp = tp;
    c.sp = sp && tp > 1;
    c.zero = 0;
    c.recompute = recompute;
    return c;
}

static double states(const ari_memory *m)
{
    return m->bytes[ARI_MEMORY_WEIGHTS] + m->bytes[ARI_MEMORY_GRADIENTS] + m->bytes[ARI_MEMORY_MASTER] +
           m->bytes[ARI_MEMORY_OPTIMIZER];
}

/* Estimates the bytes of activations; -1: the layout is impossible, for example because tp does not divide the
 * sequence. */
static ar_status estimate_activations(double *bytes, const ari_plan_request *a, int tp, bool sp, ar_recompute recompute)
{
    const ari_choice c = choice_of(a, tp, sp, recompute);
    const ari_planned p = ari_choice_planned(&a->search.base, &c);
    ari_memory m;
    *bytes = -1.0;
    if (ari_planned_check(&p) != AR_OK)
        return AR_OK;
    AR_TRY(ari_memory_production(&m, &p));
    *bytes = ari_memory_activations(&m);
    return AR_OK;
}

static const char *gigabytes(char text[ARI_NUMBER], double bytes)
{
    snprintf(text, ARI_NUMBER, bytes < 0.0 ? "" : "%.3f", bytes * GB);
    return text;
}
#define GIGABYTES(bytes) gigabytes((char[ARI_NUMBER]){0}, (bytes))

static json_t *number_json(double x)
{
    return x < 0.0 ? json_null() : json_real(x);
}

/* --- memory by tp ------------------------------------------------------------------------------------------------- */

static ar_status memory_row(ari_table *t, json_t *rows, const ari_plan_request *a, int tp)
{
    const ari_choice c = choice_of(a, tp, false, AR_RECOMPUTE_NONE);
    const ari_planned p = ari_choice_planned(&a->search.base, &c);
    ari_memory m;
    double plain = 0.0, sp = 0.0, full = 0.0;
    AR_TRY(ari_memory_production(&m, &p));
    AR_TRY(estimate_activations(&plain, a, tp, false, AR_RECOMPUTE_NONE));
    AR_TRY(estimate_activations(&sp, a, tp, true, AR_RECOMPUTE_NONE));
    AR_TRY(estimate_activations(&full, a, tp, true, AR_RECOMPUTE_FULL));
    const double parameters = m.bytes[ARI_MEMORY_WEIGHTS] / 2.0;
    ari_table_row(t, "%d\t%s\t%s\t%s\t%s\t%s\t%s", tp, ARI_COUNT((uint64_t)parameters), GIGABYTES(states(&m)),
                  GIGABYTES(16.0 * (double)a->parameters / tp), GIGABYTES(plain), GIGABYTES(sp), GIGABYTES(full));
    json_array_append_new(rows, json_pack("{s:i, s:f, s:f, s:f, s:o, s:o, s:o}", "tp", tp, "parameters", parameters,
                                          "states", states(&m), "divided", 16.0 * (double)a->parameters / tp,
                                          "activations", number_json(plain), "activations_sp", number_json(sp),
                                          "activations_sp_full", number_json(full)));
    return AR_OK;
}

/* --- time by tp --------------------------------------------------------------------------------------------------- */

static ar_status scaling_row(ari_table *t, json_t *rows, const ari_plan_request *a, int tp, double *one_rank)
{
    const ari_choice c = choice_of(a, tp, (a->search.base.step.run.seq % (size_t)tp) == 0, AR_RECOMPUTE_NONE);
    ari_depth d;
    double bytes = 0.0;
    bool inter_node = false;
    AR_TRY(ari_depth_of(&d, &a->search, &c, NULL));
    for (int i = 0; i < d.time.traffic.n; i++) {
        bytes += d.time.traffic.row[i].bytes;
        inter_node = inter_node || d.time.traffic.row[i].inter_node;
    }
    const double computing = d.found.seconds > 0.0 ? d.time.seconds[ARI_TIME_PRODUCTS] / d.found.seconds : 1.0;
    *one_rank = *one_rank > 0.0 ? *one_rank : d.found.seconds * tp;
    const double speed = *one_rank / d.found.seconds;
    ari_table_row(t, "%d\t%s\t%s\t%.0f %%\t%.2f\t%s\t%s\t%s", tp,
                  tp == 1      ? ""
                  : inter_node ? "between nodes"
                               : "inside",
                  ARI_SECONDS(d.found.seconds), 100.0 * computing, speed, ARI_BYTES((uint64_t)d.found.bytes),
                  ARI_BYTES((uint64_t)bytes), d.found.fits ? "" : "does not fit");
    json_array_append_new(rows, json_pack("{s:i, s:b, s:f, s:f, s:f, s:f, s:f, s:b}", "tp", tp, "between_nodes",
                                          inter_node, "seconds", d.found.seconds, "computing", computing, "speedup",
                                          speed, "bytes", d.found.bytes, "sent_bytes", bytes, "fits", d.found.fits));
    return AR_OK;
}

static ar_status rows_by_tp(ari_table *t, json_t *rows, const ari_plan_request *a, bool scaling)
{
    const int max_gpus = a->v->gpus > 0 ? a->v->gpus : MOST_SHOWN;
    double one_rank = 0.0;
    for (int tp = 1; tp <= max_gpus && tp <= MOST_TP; tp++) {
        bool can = false;
        if (tp & (tp - 1))
            continue; /* nodes and models go by powers of two */
        AR_TRY(can_have(&can, a, tp));
        if (can)
            AR_TRY(scaling ? scaling_row(t, rows, a, tp, &one_rank) : memory_row(t, rows, a, tp));
    }
    return AR_OK;
}

/* --- the best layout by number of GPUs ---------------------------------------------------------------------------- */

static ar_status decision_row(ari_table *t, json_t *rows, const ari_plan_request *a, int ranks, size_t seq)
{
    ari_plan_request request = *a;
    ari_search *s = &request.search;
    ARI_ENDED(ari_ranking_fini) ari_ranking r;
    s->base.step.run.seq = seq;
    s->ranks = ranks;
    s->first_only = true;
    const ar_status st = ari_search_run(&r, s);
    s->first_only = false;
    AR_TRY(st);
    if (r.n == 0 || r.layout[0].legal != AR_OK)
        return AR_OK;
    const ari_candidate *best_layout = &r.layout[0];
    ari_table_row(t, "%d\t%zu", ranks, seq);
    AR_TRY(ari_layout_cells(t, &request, best_layout));
    if (!a->v->common.json)
        return AR_OK;
    ari_depth d;
    AR_TRY(ari_depth_of(&d, s, &best_layout->choice, NULL));
    json_array_append_new(
        rows, json_pack("{s:i, s:I, s:o}", "gpus", ranks, "seq", (json_int_t)seq, "best", ari_depth_json(&d)));
    return AR_OK;
}

/* Adds rows from one GPU to all GPUs, then for longer sequences on all GPUs. */
static ar_status decision_rows(ari_table *t, json_t *rows, const ari_plan_request *a)
{
    static const size_t longer[] = {32768, 131072};
    const size_t seq = a->search.base.step.run.seq;
    const int max_ranks = a->search.ranks;
    for (int ranks = 1; ranks <= max_ranks; ranks = ranks == max_ranks      ? ranks + 1
                                                    : 2 * ranks < max_ranks ? 2 * ranks
                                                                            : max_ranks)
        AR_TRY(decision_row(t, rows, a, ranks, seq));
    for (size_t i = 0; i < sizeof longer / sizeof *longer && !a->config.learned_positions; i++) {
        if (longer[i] > seq)
            AR_TRY(decision_row(t, rows, a, max_ranks, longer[i]));
    }
    return AR_OK;
}

/* --- together ----------------------------------------------------------------------------------------------------- */

static const ari_column memory_columns[] = {{"tp", ARI_RIGHT},
                                            {"parameters of a rank", ARI_RIGHT},
                                            {"2+2+12 GB", ARI_RIGHT},
                                            {"16P/tp GB", ARI_RIGHT},
                                            {"activations GB", ARI_RIGHT},
                                            {"with sp GB", ARI_RIGHT},
                                            {"sp, recomputed GB", ARI_RIGHT}};
static const ari_column scaling_columns[] = {
    {"tp", ARI_RIGHT},       {"links", ARI_LEFT},   {"step", ARI_RIGHT},         {"computing", ARI_RIGHT},
    {"speed-up", ARI_RIGHT}, {"memory", ARI_RIGHT}, {"a rank sends", ARI_RIGHT}, {"", ARI_LEFT}};
static void print_notes(FILE *out, ari_plan_table which)
{
    static const char *const notes[] = {
        [ARI_PLAN_MEMORY] =
            "one sample; 16P/tp would be right if all were sharded: norms, biases of row-parallel layers "
            "and copies of KV heads are on every rank",
        [ARI_PLAN_SCALING] = "one sample a step, with sp where tp divides the sequence; speed-up over one rank",
        [ARI_PLAN_DECISION] = "the fastest layout that fits"};
    fprintf(out, "%s\n", notes[which]);
}

ar_status ari_plan_table_run(json_t **result, FILE *out, const ari_plan_request *a)
{
    ari_table memory = ARI_TABLE(memory_columns), scaling = ARI_TABLE(scaling_columns);
    ari_column columns[2 + ARI_LAYOUT_COLUMNS] = {{"GPUs", ARI_RIGHT}, {"seq", ARI_RIGHT}};
    ari_table decision = {.columns = columns, .n = 2 + ari_layout_columns(columns + 2, &a->config)};
    const ari_plan_table which = (ari_plan_table)a->v->table;
    ari_table *t = which == ARI_PLAN_MEMORY ? &memory : which == ARI_PLAN_SCALING ? &scaling : &decision;
    json_auto_t *rows = json_array();
    const int max_gpus = which == ARI_PLAN_DECISION || a->v->gpus > 0 ? a->search.ranks : MOST_SHOWN;
    if (out)
        ari_plan_request_print(out, a, max_gpus, which != ARI_PLAN_DECISION);
    const ar_status st =
        which == ARI_PLAN_DECISION ? decision_rows(t, rows, a) : rows_by_tp(t, rows, a, which == ARI_PLAN_SCALING);
    ari_progress_end(a->search.user);
    const ar_status printed = ari_table_end(t, st == AR_OK ? out : NULL, 2);
    AR_TRY(st);
    AR_TRY(printed);
    if (out)
        print_notes(out, which);
    ARI_GIVE(result, rows);
    return AR_OK;
}

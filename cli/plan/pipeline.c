/* SPDX-License-Identifier: Apache-2.0 */
/* `anyrank plan --pipeline`: a layout's schedule drawn as text, its bubble, and the micro-batches in flight. */
#include <stdlib.h>
#include <string.h>

#include "anyrank/config.h"
#include "cli/plan/plan.h"
#include "cli/shared/command.h"
#include "ref/core/size.h"
#include "ref/core/text.h"
#include "ref/models/parallel_private.h"
#include "ref/pipeline/schedule_private.h"
#include "ref/placement/context_private.h"

enum { LABEL = 24, MOST_COLUMNS = 2000 };

typedef struct computed {
    ar_pp_operation operation;
    double begin, end;
} computed;

/* The schedule to show, and each rank's times. Unit of time: the forward pass of one micro-batch through this many
 * layers. */
typedef struct shown {
    ar_pipeline_schedule *schedule;
    ar_pipeline_shape shape;
    ar_pp_run run;
    computed *computations[AR_MAX_STAGES]; /* computations, in their order */
    size_t count[AR_MAX_STAGES], layers[AR_MAX_STAGES], unit;
} shown;

static void shown_fini(shown *s)
{
    for (int r = 0; r < AR_MAX_STAGES; r++)
        free(s->computations[r]);
    ari_pipeline_schedule_destroy(s->schedule);
}

static void listen(void *user, int rank, const ar_pp_operation *o, double begin, double end)
{
    shown *s = user;
    if (o->kind <= AR_PP_BACKWARD_WEIGHT)
        s->computations[rank][s->count[rank]++] = (computed){*o, begin, end};
}

static size_t common_divisor(size_t a, size_t b)
{
    return b == 0 ? a : common_divisor(b, a % b);
}

/* Sets a stage's times to its number of layers, at least one: for the forward pass, for the input's gradient, and for
 * the weights' gradients. */
static void stage_times(ar_pp_times *times, shown *s, const ar_parallel *p, const ar_config *c)
{
    for (int i = 0; i < s->shape.stages; i++) {
        size_t first_layer = 0;
        ari_stage_layers(&first_layer, &s->layers[i], &p->stages, c->layers, (size_t)s->shape.stages, (size_t)i);
        s->unit = common_divisor(s->layers[i] > 0 ? s->layers[i] : 1, s->unit);
    }
    for (int i = 0; i < s->shape.stages; i++) {
        const double duration = (double)(s->layers[i] > 0 ? s->layers[i] : 1) / (double)s->unit;
        times[i] = (ar_pp_times){duration, duration, duration, 0};
    }
}

static ar_status shown_init(shown *s, const ar_parallel *p, const ar_config *c)
{
    ar_pp_times times[AR_MAX_STAGES];
    AR_TRY(ari_parallel_schedule(&s->schedule, p));
    s->shape = ari_pipeline_schedule_shape(s->schedule);
    stage_times(times, s, p, c);
    for (int r = 0; r < s->shape.ranks; r++) {
        size_t n = 0;
        ari_pipeline_schedule_rank(s->schedule, r, &n);
        AR_TRY(ari_alloc((void **)&s->computations[r], n, sizeof *s->computations[r], "a schedule"));
    }
    return ari_pipeline_schedule_run(&s->run, s->schedule, times, listen, s);
}

/* --- text --------------------------------------------------------------------------------------------------------- */

/* Writes "F3", or "5F3" if ranks have several stages. */
static int label(char text[LABEL], const shown *s, const ar_pp_operation *o)
{
    const bool several = s->shape.stages > s->shape.ranks;
    return several ? snprintf(text, LABEL, "%d%s%d", o->stage, ari_pp_kind_name(o->kind), o->micro)
                   : snprintf(text, LABEL, "%s%d", ari_pp_kind_name(o->kind), o->micro);
}

/* Columns of a unit of time: the longest label and a space. */
static size_t unit_columns(const shown *s)
{
    char text[LABEL];
    const ar_pp_operation longest = {AR_PP_FORWARD, s->shape.stages - 1, s->shape.micro_batches - 1};
    return (size_t)label(text, s, &longest) + 1;
}

static void print_row(FILE *out, char *row, const shown *s, int rank)
{
    const size_t unit = unit_columns(s);
    size_t end = 0;
    for (size_t i = 0; i < s->count[rank]; i++) {
        const computed *c = &s->computations[rank][i];
        char text[LABEL];
        const size_t begin = (size_t)(c->begin + 0.5) * unit, length = (size_t)label(text, s, &c->operation);
        memset(row + end, ' ', begin - end);
        end = (size_t)(c->end + 0.5) * unit;
        memset(row + begin, '-', end - begin);
        memcpy(row + begin, text, length);
        row[end - 1] = ' ';
    }
    fprintf(out, "  rank %-3d  %.*s\n", rank, (int)end - 1, row); /* the last character is followed by a space */
}

static ar_status print_picture(FILE *out, const shown *s)
{
    ARI_OWNED char *row = NULL;
    const double columns = s->run.makespan * (double)unit_columns(s);
    if (columns > MOST_COLUMNS) {
        fprintf(out, "  a picture of %.0f columns, at most %d: --json and --csv have the lists\n", columns,
                MOST_COLUMNS);
        return AR_OK;
    }
    AR_TRY(ari_alloc((void **)&row, (size_t)(columns + 1), 1, "a picture"));
    for (int r = 0; r < s->shape.ranks; r++)
        print_row(out, row, s, r);
    return AR_OK;
}

static ar_status print_table(FILE *out, const shown *s)
{
    static const ari_column columns[] = {{"rank", ARI_RIGHT},     {"stages", ARI_LEFT}, {"layers", ARI_LEFT},
                                         {"computes", ARI_RIGHT}, {"waits", ARI_RIGHT}, {"most in flight", ARI_RIGHT}};
    ari_table t = ARI_TABLE(columns);
    for (int r = 0; r < s->shape.ranks; r++) {
        char stages[512] = "", layers[512] = "";
        ari_text a = ari_text_in(stages, sizeof stages), b = ari_text_in(layers, sizeof layers);
        for (int i = r; i < s->shape.stages; i += s->shape.ranks) {
            ari_say(&a, "%s%d", i > r ? ", " : "", i);
            ari_say(&b, "%s%zu", i > r ? ", " : "", s->layers[i]);
        }
        ari_table_row(&t, "%d\t%s\t%s\t%.0f\t%.0f\t%zu", r, stages, layers, s->run.rank[r].busy,
                      s->run.makespan - s->run.rank[r].busy, s->run.rank[r].in_flight);
    }
    return ari_table_end(&t, out, 2);
}

static size_t most_in_flight(const shown *s)
{
    size_t max_in_flight = 0;
    for (int r = 0; r < s->shape.ranks; r++)
        max_in_flight = s->run.rank[r].in_flight > max_in_flight ? s->run.rank[r].in_flight : max_in_flight;
    return max_in_flight;
}

static bool has_empty_stage(const shown *s)
{
    for (int i = 0; i < s->shape.stages; i++)
        if (s->layers[i] == 0)
            return true;
    return false;
}

static ar_status print_pipeline(FILE *out, const shown *s, const ari_step_case *c)
{
    AR_TRY(print_picture(out, s));
    AR_TRY(print_table(out, s));
    fprintf(out,
            "a unit of time: %zu layer%s forward, or for the gradients of its input (I), or of its weights (W); B is I "
            "and W; transfers take none%s\n",
            s->unit, ARI_PLURAL(s->unit), has_empty_stage(s) ? "; a stage without layers counts as one layer" : "");
    fprintf(out, "%s, %s: %.0f units, bubble %.1f %% of the time that ranks compute, at most %zu in flight\n",
            c->config->name, ARI_LAYOUT(&c->run.parallel, c->run.batch), s->run.makespan, 100 * s->run.bubble,
            most_in_flight(s));
    return AR_OK;
}

/* --- JSON --------------------------------------------------------------------------------------------------------- */

static json_t *operation_json(const ar_pp_operation *o)
{
    return json_sprintf("%d%s%d", o->stage, ari_pp_kind_name(o->kind), o->micro);
}

static json_t *rank_json(const shown *s, int rank)
{
    size_t n = 0;
    const ar_pp_operation *list = ari_pipeline_schedule_rank(s->schedule, rank, &n);
    json_t *stages = json_array(), *layers = json_array(), *operations = json_array(), *times = json_array();
    for (int i = rank; i < s->shape.stages; i += s->shape.ranks) {
        json_array_append_new(stages, json_integer(i));
        json_array_append_new(layers, json_integer((json_int_t)s->layers[i]));
    }
    for (size_t i = 0; i < n; i++)
        json_array_append_new(operations, operation_json(&list[i]));
    for (size_t i = 0; i < s->count[rank]; i++) {
        const computed *c = &s->computations[rank][i];
        json_array_append_new(times, json_pack("{s:o, s:f, s:f}", "operation", operation_json(&c->operation), "begin",
                                               c->begin, "end", c->end));
    }
    return json_pack("{s:i, s:o, s:o, s:o, s:o, s:f, s:f, s:I}", "rank", rank, "stages", stages, "layers", layers,
                     "operations", operations, "computations", times, "computes", s->run.rank[rank].busy, "waits",
                     s->run.makespan - s->run.rank[rank].busy, "in_flight", (json_int_t)s->run.rank[rank].in_flight);
}

static json_t *as_json(const shown *s, const ari_step_case *c)
{
    json_t *ranks = json_array();
    for (int r = 0; r < s->shape.ranks; r++)
        json_array_append_new(ranks, rank_json(s, r));
    json_t *pipeline =
        json_pack("{s:I, s:f, s:f, s:I, s:o}", "unit_layers", (json_int_t)s->unit, "makespan", s->run.makespan,
                  "bubble", s->run.bubble, "in_flight", (json_int_t)most_in_flight(s), "ranks", ranks);
    return ari_json_merge(ari_planned_json("plan", c), json_pack("{s:o}", "pipeline", pipeline));
}

/* --- the command -------------------------------------------------------------------------------------------------- */

static ar_status show(const ari_plan_values *v, shown *s, const ari_step_case *c)
{
    AR_TRY(shown_init(s, &c->run.parallel, c->config));
    if (v->csv)
        AR_TRY(ari_pipeline_schedule_write(v->csv, s->schedule, false));
    if (ari_prints_text(&v->common))
        AR_TRY(print_pipeline(stdout, s, c));
    return v->common.json ? ari_json_end(as_json(s, c), &v->common) : AR_OK;
}

/* Reads the layout's step. Without a batch each micro-batch has one sample. */
static ar_status step_of(ari_step_case *c, ar_config *config, const ari_run_values *r, const ari_common *common)
{
    const ar_parallel *p = &c->run.parallel;
    AR_TRY(ari_layout_check(r));
    AR_TRY(ari_planned_begin(c, config, r, common));
    if (r->run.batch == 0)
        c->run.batch = (size_t)p->dp * (size_t)p->micro_batches;
    return ar_run_check(&c->run, config);
}

ar_status ari_plan_pipeline(const ari_plan_values *v)
{
    ari_run_values r = v->r;
    ar_parallel *p = &r.run.parallel;
    ARI_ENDED(ari_planned_end) ari_step_case c = {.run.plan = {0}};
    ar_config config;
    ARI_OWNED shown *s = NULL;
    if (p->pp < 2)
        return ar_error_set(AR_ERR_ARG,
                            "--pipeline shows the schedule of the ranks of --pp: give --pp N of at least 2");
    ari_planned_set_defaults(p);
    AR_TRY(ari_alloc_zero((void **)&s, 1, sizeof *s, "a schedule"));
    AR_TRY(step_of(&c, &config, &r, &v->common));
    const ar_status st = show(v, s, &c);
    shown_fini(s);
    return st;
}

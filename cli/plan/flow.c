/* SPDX-License-Identifier: Apache-2.0 */
/* `anyrank plan --flow`: the operations of one rank, as text, Markdown, JSON. */
#include <string.h>

#include "cli/plan/plan.h"
#include "cli/shared/command.h"
#include "ref/core/size.h"
#include "ref/core/text.h"
#include "ref/io/json.h"
#include "ref/placement/placement_private.h"
#include "verify/bytes/bytes.h"
#include "verify/lint/flow.h"

static const char *const often_names[] = {
    [ARI_AT_START] = "at the start",  [ARI_EACH_PASS] = "micro-batch", [ARI_EACH_VERSION] = "weight version",
    [ARI_EACH_MICRO] = "micro-batch", [ARI_EACH_STEP] = "step",        [ARI_EACH_VERIFIED_STEP] = "verified step"};

enum { CELL = 400 };

/* --- cells -------------------------------------------------------------------------------------------------------- */

/* The axes that have more than one rank, in the order of the placements. */
static int axes_of(int axis[ARI_PLACED_AXES], const ari_step_case *c)
{
    int n = 0;
    for (int i = 0; i < ARI_PLACED_AXES; i++) {
        if (ari_axis_ranks(&c->run.parallel, i) > 1)
            axis[n++] = i;
    }
    return n;
}

/* "[4, 256, 768] S(1)": what the rank holds, and how the ranks hold the whole. */
static void say_value(ari_text *cell, const ari_op_value *v, const ari_step_case *c)
{
    int axis[ARI_PLACED_AXES];
    const int axes = axes_of(axis, c);
    char text[AR_PLACEMENT_TEXT];
    if (v->experts > 0)
        ari_say(cell, "%zu of ", v->experts);
    for (int d = 0; d < v->ndim; d++)
        ari_say(cell, "%s%zu", d == 0 ? "[" : ", ", v->local[d]);
    ari_say(cell, "]");
    for (int i = 0; i < axes; i++) {
        if (axis[i] != ARI_AXIS_PP || v->at[axis[i]].kind != AR_INVARIANT) /* a value of one stage */
            ari_say(cell, " %s", ari_placed_along(text, v, axis[i]));
    }
}

static void values_cell(char cell[CELL], const ari_op_value *v, int n, const ari_step_case *c)
{
    char last[CELL] = "";
    ari_text all = ari_plain_text_in(cell, CELL);
    for (int i = 0; i < n; i++) {
        char one[CELL];
        ari_text text = ari_plain_text_in(one, CELL);
        say_value(&text, &v[i], c);
        if (strcmp(one, last) != 0) /* equal ones once */
            ari_say(&all, "%s%s", i > 0 ? "; " : "", one);
        memcpy(last, one, sizeof last);
    }
}

/* "2 all_reduce tp 10.2 kB, 4 reduce_scatter tp 3.1 MB beside": bytes that the rank sends; calls of one kind together;
 * those that go beside products. */
static void calls_cell(char cell[CELL], const ari_operation *op)
{
    ari_text all = ari_plain_text_in(cell, CELL);
    for (int i = 0; i < op->calls;) {
        const ari_op_call *first = &op->call[i];
        double sent = 0.0;
        int n = 0;
        for (; i < op->calls && op->call[i].kind == first->kind && op->call[i].over == first->over; i++) {
            sent += ari_call_sent(&op->call[i]);
            n += (int)(op->call[i].repeats * ari_call_chunks(&op->call[i]));
        }
        ari_say(&all, "%s", cell[0] ? ", " : "");
        if (n > 1)
            ari_say(&all, "%d ", n);
        ari_say(&all, "%s %s %s%s", ari_call_name(first->kind), ari_over_name(first->over), ARI_BYTES((uint64_t)sent),
                first->queue == ARI_ON_TP ? " beside" : "");
    }
}

/* --- text and Markdown -------------------------------------------------------------------------------------------- */

enum { COLUMNS = 7 };
static const ari_column columns[COLUMNS] = {
    {"module", ARI_LEFT}, {"operation", ARI_LEFT},     {"input", ARI_LEFT},         {"weight", ARI_LEFT},
    {"output", ARI_LEFT}, {"communication", ARI_LEFT}, {"multiply-adds", ARI_RIGHT}};

static void cells_of(char cell[COLUMNS][CELL], const ari_flow_row *row, const ari_step_case *c)
{
    const ari_operation *op = &row->op;
    ari_flow_title(cell[0], CELL, c->config, row);
    snprintf(cell[1], CELL, "%s%s", ari_operation_name(op->kind),
             op->recomputed                                                       ? " (again)"
             : op->kind == ARI_OPERATION_PRODUCT && op->pass == ARI_PASS_BACKWARD ? " (dX)"
                                                                                  : "");
    values_cell(cell[2], op->input, op->inputs, c);
    values_cell(cell[3], op->weight, op->weights, c);
    values_cell(cell[4], op->output, op->outputs, c);
    calls_cell(cell[5], op);
    snprintf(cell[6], CELL, "%s", op->multiply_adds > 0.0 ? ARI_COUNT((uint64_t)op->multiply_adds) : "");
}

/* Explains the placements shown after shapes. */
static void print_legend(FILE *to, const ari_step_case *c)
{
    int axis[ARI_PLACED_AXES];
    const int axes = axes_of(axis, c);
    if (axes == 0)
        return;
    fprintf(to, "Behind a rank's shape, how the ranks of");
    for (int i = 0; i < axes; i++)
        fprintf(to, "%s %s", i > 0 ? "," : "", ari_axis_name(axis[i]));
    fprintf(to, " hold the whole: R each all of it, I as well (its gradient is whole too), S(d) cut along dimension d, "
                "P each a term of the sum.\n");
    if (ari_experts_routed(&c->run.parallel) || ari_experts_whole(&c->run.parallel))
        fprintf(to, "V: each rank its own experts, and the rows that come for them.\n");
}

static void print_totals(FILE *to, const ari_flow *f)
{
    for (int i = 0; i <= ARI_PASS_STEP; i++) {
        const ari_flow_total *t = &f->total[i];
        if (t->calls > 0 || t->multiply_adds > 0.0)
            fprintf(to, "%s: %s multiply-adds, %zu collective%s in which the rank sends %s\n",
                    ari_operation_pass_name((ari_operation_pass)i), ARI_COUNT((uint64_t)t->multiply_adds), t->calls,
                    ARI_PLURAL(t->calls), ARI_BYTES((uint64_t)t->bytes));
    }
}

/* Rows [from, to) of one pass. */
static ar_status print_pass(FILE *out, const ari_flow *f, const ari_step_case *c, size_t from, size_t to, bool markdown)
{
    ari_table table = {.columns = columns, .n = COLUMNS};
    for (size_t i = from; i < to; i++) {
        char cell[COLUMNS][CELL];
        cells_of(cell, &f->row[i], c);
        for (int k = 0; k < COLUMNS; k++)
            ari_table_cell(&table, "%s", cell[k]);
    }
    fprintf(out, markdown ? "**%s**\n\n" : "%s\n", ari_operation_pass_name(f->row[from].op.pass));
    AR_TRY(markdown ? ari_table_markdown(&table, out) : ari_table_end(&table, out, 2));
    fprintf(out, "\n");
    return AR_OK;
}

static ar_status print_rows(FILE *to, const ari_flow *f, const ari_step_case *c, bool markdown)
{
    for (size_t from = 0, end; from < f->count; from = end) {
        for (end = from; end < f->count && f->row[end].op.pass == f->row[from].op.pass; end++)
            ;
        AR_TRY(print_pass(to, f, c, from, end, markdown));
    }
    if (f->micro_batches > 1)
        fprintf(to, "The passes are those of the first of %zu micro-batches.\n", f->micro_batches);
    if (ari_step_counts(c))
        fprintf(to, "Before them a step goes forward once, to count the routes of all tokens; totals have that too.\n");
    print_legend(to, c);
    print_totals(to, f);
    return AR_OK;
}

/* --- JSON --------------------------------------------------------------------------------------------------------- */

/* By axis. */
static json_t *placement_json(const ari_op_value *v)
{
    json_t *o = json_object();
    char text[AR_PLACEMENT_TEXT];
    for (int axis = 0; axis < ARI_PLACED_AXES; axis++)
        json_object_set_new(o, ari_axis_name(axis), json_string(ari_placed_along(text, v, axis)));
    return o;
}

static json_t *values_json(const ari_op_value *v, int n)
{
    json_t *a = json_array();
    for (int i = 0; i < n; i++)
        json_array_append_new(
            a, json_pack("{s:o, s:o, s:s, s:o, s:I}", "shape", ari_json_sizes(v[i].shape, (size_t)v[i].ndim), "local",
                         ari_json_sizes(v[i].local, (size_t)v[i].ndim), "dtype", ar_dtype_name(v[i].dtype), "placement",
                         placement_json(&v[i]), "copies", (json_int_t)v[i].copies));
    return a;
}

static json_t *calls_json(const ari_operation *op, const ar_config *config)
{
    json_t *a = json_array();
    for (int i = 0; i < op->calls; i++) {
        const ari_op_call *call = &op->call[i];
        char tag[240];
        size_t bytes = 0;
        const ar_status st = ari_call_bytes(&bytes, call);
        (void)st; /* the walk has multiplied the same */
        ari_operation_tag(tag, sizeof tag, config, op, call, ARI_EVERY_EXPERT);
        json_array_append_new(a, json_pack("{s:s, s:s, s:I, s:I, s:s, s:I, s:I, s:s, s:I, s:o, s:s, s:o}", "collective",
                                           ari_call_name(call->kind), "group", ari_over_name(call->over), "ranks",
                                           (json_int_t)call->ranks, "elements", (json_int_t)call->elements, "dtype",
                                           ar_dtype_name(call->dtype), "repeats", (json_int_t)call->repeats, "chunks",
                                           (json_int_t)ari_call_chunks(call), "queue", ari_call_queue_name(call->queue),
                                           "bytes", (json_int_t)bytes, "bytes_per_rank",
                                           ari_json_number(ari_call_sent(call)), "each", often_names[call->often],
                                           "tag", ari_json_text(tag)));
    }
    return a;
}

static json_t *row_json(const ari_flow_row *row, const ari_step_case *c)
{
    const ari_operation *op = &row->op;
    char title[CELL], made[AR_PLACEMENT_TEXT];
    ari_flow_title(title, sizeof title, c->config, row);
    json_t *layers = op->layer == ARI_NO_LAYER
                         ? json_null()
                         : json_pack("[I, I]", (json_int_t)op->layer, (json_int_t)(op->layer + row->layers - 1));
    return json_pack("{s:s, s:b, s:o, s:s, s:o, s:o, s:o, s:s, s:o, s:o, s:o}", "pass",
                     ari_operation_pass_name(op->pass), "recomputed", op->recomputed, "module",
                     ari_json_text_or_null(title), "operation", ari_operation_name(op->kind), "layers", layers,
                     "inputs", values_json(op->input, op->inputs), "weights", values_json(op->weight, op->weights),
                     "made", ari_placement_name(made, op->produced_as), "outputs", values_json(op->output, op->outputs),
                     "communication", calls_json(op, c->config), "multiply_adds", ari_json_number(op->multiply_adds));
}

/* "flow", an array of operations, and "totals". */
static json_t *flow_json(const ari_flow *f, const ari_step_case *c)
{
    json_t *rows = json_array(), *totals = json_object();
    for (size_t i = 0; i < f->count; i++)
        json_array_append_new(rows, row_json(&f->row[i], c));
    for (int i = 0; i <= ARI_PASS_STEP; i++)
        json_object_set_new(totals, ari_operation_pass_name((ari_operation_pass)i),
                            json_pack("{s:o, s:I, s:o}", "multiply_adds", ari_json_number(f->total[i].multiply_adds),
                                      "collectives", (json_int_t)f->total[i].calls, "bytes_per_rank",
                                      ari_json_number(f->total[i].bytes)));
    return json_pack("{s:I, s:o, s:o}", "micro_batches", (json_int_t)f->micro_batches, "flow", rows, "totals", totals);
}

/* --- the command -------------------------------------------------------------------------------------------------- */

static ar_status flow_options(ari_flow_options *o, const ari_plan_values *v, const ar_parallel *p)
{
    const int world = ar_parallel_world(p);
    if (v->rank >= world)
        return ar_error_set(AR_ERR_ARG, "--rank %d: the layout has %d rank%s, numbered from 0", v->rank, world,
                            ARI_PLURAL(world));
    *o = (ari_flow_options){.rank = v->rank, .passes_only = !v->backward, .each_layer = v->each_layer};
    return AR_OK;
}

static json_t *as_json(const ari_plan_values *v, const ari_flow *f, const ari_step_case *c, uint64_t bytes)
{
    const ar_run *run = &c->run;
    json_t *o = ari_planned_json("plan", c);
    json_object_set_new(o, "numerics", json_string(ari_numerics_names[run->numerics]));
    ari_loss_json(o, &run->loss);
    json_object_set_new(o, "rank", json_integer(v->rank));
    json_object_set_new(o, "bytes", json_pack("{s:I}", "predicted", (json_int_t)bytes));
    return ari_json_whole(o, flow_json(f, c));
}

static ar_status print_flow(FILE *to, const ari_plan_values *v, const ari_flow *f, const ari_step_case *c,
                            uint64_t bytes)
{
    const ar_run *run = &c->run;
    AR_TRY(print_rows(to, f, c, v->markdown));
    ari_plan_print(to, &run->plan);
    if (v->backward)
        fprintf(to, "all ranks together, start and step: %s\n", ARI_BYTES(bytes));
    fprintf(to, "%s, %s, %s numerics, %zu x %zu tokens: rank %d of %d\n", c->config->name,
            ARI_LAYOUT(&run->parallel, run->batch), ari_numerics_names[run->numerics], run->batch, run->seq, v->rank,
            ar_parallel_world(&run->parallel));
    return AR_OK;
}

ar_status ari_plan_flow(const ari_plan_values *v)
{
    ar_config config;
    ARI_ENDED(ari_planned_end) ari_step_case c = {.run.plan = {0}};
    ari_flow_options o;
    ARI_ENDED(ari_flow_fini) ari_flow f = {.row = NULL};
    ari_run_values r = v->r;
    uint64_t bytes = 0;
    ari_planned_one(&r.run.parallel);
    AR_TRY(ari_planned_case(&c, &config, &r, &v->common));
    AR_TRY(flow_options(&o, v, &c.run.parallel));
    if (!v->common.quiet)
        json_decref(ari_config_notes(stderr, &config));
    AR_TRY(ari_bytes_predict(&bytes, &(ari_bytes_case){.run = c.run, .config = c.config}));
    AR_TRY(ari_flow_init(&f, &c, &o));
    if (ari_wants_text(&v->common))
        AR_TRY(print_flow(stdout, v, &f, &c, bytes));
    return v->common.json ? ari_json_end(as_json(v, &f, &c, bytes), &v->common) : AR_OK;
}

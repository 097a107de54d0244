/* SPDX-License-Identifier: Apache-2.0 */
/* `anyrank plan --flow`: prints the operations of one rank, recorded from a step without data, as text, Markdown or
 * JSON. */
#include <stdlib.h>
#include <string.h>

#include "anyrank/config.h"
#include "cli/plan/plan.h"
#include "cli/shared/command.h"
#include "ref/comm/call.h"
#include "ref/core/size.h"
#include "ref/core/text.h"
#include "ref/io/json.h"
#include "ref/models/parallel_private.h"
#include "ref/placement/placement_private.h"
#include "ref/record/ledger.h"
#include "verify/bytes/bytes.h"
#include "verify/lint/lint.h"
#include "verify/run/cluster_run.h"

enum { CELL = 400, TITLE = 240 };
typedef enum flow_pass { FLOW_START, FLOW_FORWARD, FLOW_BACKWARD, FLOW_STEP, FLOW_PASSES } flow_pass;
static const char *const pass_names[FLOW_PASSES] = {"start", "forward", "backward", "step"};

/* An operation, and the consecutive layers that do the same. */
typedef struct flow_row {
    const ari_ledger_operation *op;
    const ari_lint_placed *placed;
    size_t first_layer, layers; /* layers 0: in no layer */
    size_t repeats;             /* number of such operations: broadcasts of this many experts */
} flow_row;

typedef struct flow_total {
    size_t calls;
    double bytes, multiply_adds;
} flow_total;

typedef struct flow {
    const ari_step_case *c;
    ari_ledger ledger;
    ari_lint_placed *placed; /* [ledger.operations] */
    flow_row *row;
    size_t rows, room;
    size_t micro_batches; /* micro-batches of the rank with the most */
    size_t samples;       /* samples of the first of them, over all ranks */
    flow_total total[FLOW_PASSES];
} flow;

static void flow_fini(flow *f)
{
    ari_ledger_fini(&f->ledger);
    free(f->placed);
    free(f->row);
}

/* --- recording ---------------------------------------------------------------------------------------------------- */

/* Keeps only the step of the first micro-batch: the others are equal. */
static void take_first(ar_run *r)
{
    ar_parallel *p = &r->parallel;
    const int pieces = ari_at_least_one(p->micro_batches), dp = ari_at_least_one(p->dp);
    const int few = ari_at_least_one(p->virtual_stages) > 1 ? ari_at_least_one(p->pp) : 1;
    size_t start = 0, count = 0, batch = 0;
    if (p->own_schedule || pieces <= few)
        return;
    for (int d = 0; d < dp; d++) {
        for (int i = 0; i < few; i++) {
            ari_parallel_rows(p, r->batch, d, i, &start, &count);
            batch += count;
        }
    }
    p->micro_batches = few;
    r->batch = batch;
}

static ar_status record(flow *f, const ari_step_case *c, int rank)
{
    ar_run run = c->run;
    ar_config config = *c->config;
    ARI_OWNED int64_t *ids = NULL;
    size_t n = 0;
    ari_dry_memory unused;
    ar_lint_report found = {0};
    take_first(&run);
    config.max_positions = config.learned_positions || config.max_positions > run.seq ? config.max_positions : run.seq;
    AR_TRY(ari_mul_size(&n, run.batch, run.seq));
    AR_TRY(ARI_ALLOC_ZERO(&ids, n, "the tokens of a dry run"));
    const ar_batch batch = {.batch = run.batch, .seq = run.seq, .input_ids = ids};
    const ari_cluster_options o = {.run = run, .config = &config, .batch = &batch, .ledger = &f->ledger};
    const ari_lint_layout layout = ari_lint_layout_of(&run.parallel);
    f->c = c;
    f->samples = run.batch / (size_t)ari_at_least_one(run.parallel.micro_batches);
    f->ledger.pass = 's';
    f->micro_batches = (size_t)ari_at_least_one(c->run.parallel.micro_batches);
    AR_TRY(ari_cluster_dry(&unused, &o, rank, NULL));
    AR_TRY(ARI_ALLOC_ZERO(&f->placed, f->ledger.operations, "placements"));
    const ar_status st = ari_lint_records(&found, &f->placed, &f->ledger, 1, &layout);
    free(found.finding); /* plan only shows placements; lint reports findings */
    return st;
}

/* --- rows --------------------------------------------------------------------------------------------------------- */

static flow_pass pass_of(const ari_ledger_operation *op)
{
    if (op->kind == ARI_LEDGER_BROADCAST || op->kind == ARI_LEDGER_AGREEMENT)
        return FLOW_START;
    return op->pass == 'b' || op->is_recomputed ? FLOW_BACKWARD : op->pass == 'f' ? FLOW_FORWARD : FLOW_STEP;
}

static const ari_ledger_call *call_of(const flow *f, const ari_ledger_operation *op, size_t i)
{
    return &f->ledger.call[op->first_call + i];
}

static const ari_ledger_param *param_of(const flow *f, const ari_ledger_operation *op, size_t i)
{
    return &f->ledger.param[f->ledger.use[op->first_use + i]];
}

static double elements_of(int ndim, const size_t *shape)
{
    double n = 1.0;
    for (int d = 0; d < ndim; d++)
        n *= (double)shape[d];
    return n;
}

static double width_of(const ari_ledger_value *v)
{
    return v->ndim > 0 ? (double)v->shape[v->ndim - 1] : 1.0;
}

/* Multiplies rows and widths of a product: for Y = X W^T and dX = dY W the rows of X, its width and Y's width; for dW =
 * dY^T X the rows and both widths. */
static double multiply_adds(const ari_ledger_operation *op)
{
    const ari_ledger_value *x = &op->input[0];
    if (op->kind == ARI_LEDGER_PRODUCT)
        return elements_of(x->ndim, x->shape) * width_of(&op->out[0]);
    if (op->kind == ARI_LEDGER_WEIGHT_GRADIENT && op->inputs == 2 && op->input[1].dtype != AR_I64)
        return elements_of(x->ndim, x->shape) * width_of(&op->input[1]);
    return op->multiply_adds;
}

/* Returns the bytes that all ranks of the group move together: (N-1)*D for a reduce-scatter, an all-gather or a
 * broadcast of D bytes, twice that for an all-reduce, D for a message; for an exchange N times the bytes that this rank
 * sends. */
static double group_bytes(const ari_ledger_call *c)
{
    const double full_bytes = (double)c->count * (double)ar_dtype_bytes(c->dtype), peers = (double)(c->ranks - 1);
    switch ((ari_kind)c->kind) {
    case ARI_ALL_REDUCE:
        return 2.0 * peers * full_bytes;
    case ARI_REDUCE_SCATTER:
    case ARI_ALL_GATHER:
    case ARI_BROADCAST:
        return peers * full_bytes;
    case ARI_SEND:
        return full_bytes;
    default:
        return (double)c->bytes * (double)c->ranks;
    }
}

/* Returns this rank's share of the group's bytes. */
static double sent_bytes(const ari_ledger_call *c)
{
    return c->kind == ARI_SEND ? group_bytes(c) : group_bytes(c) / (double)c->ranks;
}

/* Returns the position of a layer's number in a module's name, the first number between dots. SIZE_MAX: none. */
static size_t layer_at(const char *name, size_t *offset, size_t *digits)
{
    const size_t layer = ari_lint_layer(name);
    char number[32];
    snprintf(number, sizeof number, ".%zu", layer);
    const char *found = layer == SIZE_MAX ? NULL : strstr(name, number);
    *offset = found ? (size_t)(found - name) + 1 : strlen(name);
    *digits = found ? strlen(number) - 1 : 0;
    return layer;
}

/* A name with its layers, "*" of all of a model. */
static void say_path(ari_text *out, const flow *f, const flow_row *row, const char *name)
{
    size_t offset, digits;
    const size_t layer = layer_at(name, &offset, &digits);
    ari_say(out, "%.*s", (int)offset, name);
    if (layer == SIZE_MAX)
        return;
    if (row->layers == f->c->config->layers && row->layers > 1)
        ari_say(out, "*");
    else if (row->layers > 1)
        ari_say(out, "%zu-%zu", row->first_layer, row->first_layer + row->layers - 1);
    else
        ari_say(out, "%zu", row->first_layer);
    ari_say(out, "%s", name + offset + digits);
}

/* The parameter's module, or the parameter itself; an expert's for all experts. */
static void name_param(char out[TITLE], const ari_ledger_operation *op, const ari_ledger_param *p)
{
    ari_ledger_operation named = {.kind = op->kind};
    char name[TITLE];
    snprintf(named.name, sizeof named.name, "%s", p->name);
    ari_ledger_module(name, sizeof name, &named);
    const char *experts = strstr(name, "experts.");
    const size_t before = experts ? (size_t)(experts - name) + strlen("experts.") : 0;
    const size_t digits = experts ? strspn(name + before, "0123456789") : 0;
    if (digits > 0)
        snprintf(out, TITLE, "%.*s*%s", (int)before, name, name + before + digits);
    else
        snprintf(out, TITLE, "%s", name);
}

static bool sums_parameters(const ari_ledger_operation *op)
{
    return op->kind == ARI_LEDGER_GRADIENT_SUM || op->kind == ARI_LEDGER_WEIGHT_GATHER;
}

/* "layers.*.self_attn.q_proj, k_proj", "lm_head.weight and 3 more". */
static void title_of(char out[TITLE], const flow *f, const flow_row *row)
{
    const ari_ledger_operation *op = row->op;
    ari_text title = ari_plain_text_in(out, TITLE);
    char name[TITLE], first_name[TITLE] = "";
    if (op->uses == 0 || op->kind == ARI_LEDGER_GRADIENT_NORM || op->kind == ARI_LEDGER_ATTENTION) {
        ari_ledger_module(name, sizeof name, op);
        say_path(&title, f, row, name);
        return;
    }
    const size_t shown = sums_parameters(op) ? 1 : op->uses;
    for (size_t i = 0; i < shown; i++) {
        name_param(name, op, param_of(f, op, i));
        if (i == 0)
            say_path(&title, f, row, name);
        else if (strcmp(name, first_name) == 0) /* another expert's */
            break;
        else
            ari_say(&title, ", %s", strrchr(name, '.') ? strrchr(name, '.') + 1 : name);
        if (i == 0)
            memcpy(first_name, name, sizeof first_name);
    }
    if (op->uses > shown)
        ari_say(&title, " and %zu more", op->uses - shown);
}

static bool same_values(int n, const ari_ledger_value *a, const ari_ledger_value *b)
{
    for (int i = 0; i < n; i++) {
        if (a[i].dtype != b[i].dtype || a[i].ndim != b[i].ndim || memcmp(a[i].shape, b[i].shape, sizeof a->shape) != 0)
            return false;
    }
    return true;
}

static bool same_types(const flow *f, int n, const ari_lint_type *a, const ari_lint_type *b)
{
    for (int i = 0; i < n; i++) {
        for (int axis = 0; axis < ARI_PLACED_AXES; axis++) {
            if (ari_extent(&f->c->run.parallel, 1u << axis) == 1)
                continue;
            if (a[i].placement[axis].kind != b[i].placement[axis].kind ||
                !ari_lint_same(a[i].placement[axis], b[i].placement[axis]))
                return false;
        }
    }
    return true;
}

static bool same_calls(const flow *f, const ari_ledger_operation *a, const ari_ledger_operation *b)
{
    for (size_t i = 0; i < a->calls; i++) {
        const ari_ledger_call *x = call_of(f, a, i), *y = call_of(f, b, i);
        if (x->kind != y->kind || x->group != y->group || x->ranks != y->ranks || x->count != y->count ||
            x->dtype != y->dtype || x->bytes != y->bytes || strcmp(x->queue, y->queue) != 0)
            return false;
    }
    return true;
}

static bool same_names(const flow *f, const flow_row *a, const flow_row *b)
{
    char title[2][TITLE];
    flow_row normalized[2] = {*a, *b};
    normalized[0].first_layer = normalized[1].first_layer = 0;
    normalized[0].layers = normalized[1].layers = 1;
    title_of(title[0], f, &normalized[0]);
    title_of(title[1], f, &normalized[1]);
    return strcmp(title[0], title[1]) == 0;
}

/* Returns true if two rows differ only in their layers. */
static bool same_rows(const flow *f, const flow_row *a, const flow_row *b)
{
    const ari_ledger_operation *x = a->op, *y = b->op;
    if (x->kind != y->kind || x->pass != y->pass || x->is_recomputed != y->is_recomputed || x->inputs != y->inputs ||
        x->outputs != y->outputs || x->uses != y->uses || x->calls != y->calls)
        return false;
    for (size_t i = 0; i < x->uses && i < 4; i++) {
        const ari_ledger_param *p = param_of(f, x, i), *q = param_of(f, y, i);
        if (p->ndim != q->ndim || memcmp(p->local, q->local, sizeof p->local) != 0)
            return false;
    }
    return same_values(x->inputs, x->input, y->input) && same_values(x->outputs, x->out, y->out) &&
           same_calls(f, x, y) && same_types(f, x->inputs, a->placed->input_types, b->placed->input_types) &&
           same_types(f, x->outputs, a->placed->output_types, b->placed->output_types) && same_names(f, a, b);
}

/* Merges the rows [*before, first_row) and [first_row, rows) of two consecutive layers: if they are equal, the first
 * ones stand for both. */
static void end_layer(flow *f, size_t *before, size_t *first_row)
{
    const size_t n = f->rows - *first_row;
    bool equal = n > 0 && n == *first_row - *before && f->row[*first_row].layers > 0 && f->row[*before].layers > 0;
    for (size_t i = 0; equal && i < n; i++)
        equal = same_rows(f, &f->row[*before + i], &f->row[*first_row + i]);
    if (!equal) {
        *before = *first_row;
        *first_row = f->rows;
        return;
    }
    for (size_t i = 0; i < n; i++) {
        flow_row *row = &f->row[*before + i];
        const size_t layer = f->row[*first_row + i].first_layer;
        row->first_layer = layer < row->first_layer ? layer : row->first_layer;
        row->layers++;
    }
    f->rows = *first_row;
}

static void add_total(flow *f, const ari_ledger_operation *op)
{
    flow_total *t = &f->total[pass_of(op)];
    t->multiply_adds += multiply_adds(op);
    for (size_t i = 0; i < op->calls; i++, t->calls++)
        t->bytes += sent_bytes(call_of(f, op, i));
}

/* Returns true for a row of the table: an operation of the first micro-batch, other than reports and updates of single
 * parameters. */
static bool is_shown(const ari_ledger_operation *op, size_t sample)
{
    const bool silent = op->kind == ARI_LEDGER_REPORT || op->kind == ARI_LEDGER_UPDATE;
    return !silent && !op->counting && (op->pass == 's' || op->sample == sample);
}

static bool is_experts(const ari_ledger_param *p)
{
    return strstr(p->name, "experts.") != NULL;
}

/* Returns true if the row is joined to an earlier one: parameters of experts are broadcast expert by expert, and all
 * broadcasts of a part form one row. first_row: row of the layer. */
static bool joins_row(flow *f, const flow_row *row, size_t first_row)
{
    enum { PARTS_OF_EACH = 6 };
    char title[2][TITLE];
    if (row->op->kind != ARI_LEDGER_BROADCAST || !is_experts(param_of(f, row->op, 0)))
        return false;
    title_of(title[0], f, row);
    for (size_t i = f->rows; i > first_row && f->rows - i < PARTS_OF_EACH; i--) {
        flow_row *before = &f->row[i - 1];
        title_of(title[1], f, before);
        if (strcmp(title[0], title[1]) != 0)
            continue;
        before->repeats++;
        return true;
    }
    return false;
}

static ar_status make_rows(flow *f, bool passes_only, bool each_layer)
{
    size_t before = 0, first_row = 0, sample = SIZE_MAX, layer = SIZE_MAX;
    for (size_t i = 0; i < f->ledger.operations; i++) {
        const ari_ledger_operation *op = &f->ledger.operation[i];
        const size_t op_layer = ari_lint_layer(op->uses > 0 ? param_of(f, op, 0)->name : op->name);
        if (passes_only && pass_of(op) != FLOW_FORWARD)
            continue;
        sample = sample == SIZE_MAX && op->pass == 'f' ? op->sample : sample;
        if (op->kind != ARI_LEDGER_REPORT)
            add_total(f, op);
        if (!is_shown(op, sample))
            continue;
        if (op_layer != layer && !each_layer)
            end_layer(f, &before, &first_row);
        layer = op_layer;
        const flow_row row = {op, &f->placed[i], op_layer == SIZE_MAX ? 0 : op_layer, op_layer != SIZE_MAX, 1};
        if (joins_row(f, &row, first_row))
            continue;
        AR_TRY(ARI_GROW(&f->row, &f->room, f->rows, "the rows of a flow table"));
        f->row[f->rows++] = row;
    }
    if (!each_layer)
        end_layer(f, &before, &first_row);
    return AR_OK;
}

/* --- cells -------------------------------------------------------------------------------------------------------- */

/* Heads of features, [b, s, heads, d], are shown side by side. */
static int shown_shape(size_t out[AR_MAX_DIMS], const ari_ledger_value *v)
{
    memcpy(out, v->shape, sizeof v->shape);
    if (v->ndim != 4)
        return v->ndim;
    out[2] *= out[3];
    return 3;
}

/* Writes a placement, such as "S(1)"; "V" for values of each rank's own experts. */
static const char *placement_text(char out[AR_PLACEMENT_TEXT], ar_placement p)
{
    if (p.kind == AR_SHARD && p.dim == ARI_LINT_BY_EXPERT)
        snprintf(out, AR_PLACEMENT_TEXT, "V");
    else
        (void)ari_placement_name(out, p);
    return out;
}

/* Appends placements along the axes that have more than one rank. */
static void say_type(ari_text *cell, const ari_lint_type *type, const ar_parallel *p)
{
    char text[AR_PLACEMENT_TEXT];
    for (int axis = ARI_AXIS_DP; axis < ARI_PLACED_AXES; axis++) {
        if (ari_extent(p, 1u << axis) > 1)
            ari_say(cell, " %s", placement_text(text, type->placement[axis]));
    }
}

static void say_shape(ari_text *cell, int ndim, const size_t *shape)
{
    for (int d = 0; d < ndim; d++)
        ari_say(cell, "%s%zu", d == 0 ? "[" : ", ", shape[d]);
    ari_say(cell, ndim > 0 ? "]" : "[]");
}

static void values_cell(char cell[CELL], const flow *f, const ari_ledger_value *v, int n, const ari_lint_type *type,
                        const bool *is_known)
{
    char last_entry[CELL] = "";
    ari_text cell_text = ari_plain_text_in(cell, CELL);
    for (int i = 0; i < n; i++) {
        char entry[CELL];
        size_t shape[AR_MAX_DIMS];
        ari_text text = ari_plain_text_in(entry, CELL);
        const int ndim = shown_shape(shape, &v[i]);
        say_shape(&text, ndim, shape);
        if (is_known[i])
            say_type(&text, &type[i], &f->c->run.parallel);
        if (strcmp(entry, last_entry) != 0) /* equal entries are printed once */
            ari_say(&cell_text, "%s%s", i > 0 ? "; " : "", entry);
        memcpy(last_entry, entry, sizeof last_entry);
    }
}

static ari_lint_type type_of(const flow *f, const ari_ledger_param *p)
{
    const ari_lint_layout layout = ari_lint_layout_of(&f->c->run.parallel);
    ari_lint_type type;
    ari_lint_place_param(&type, p, &layout);
    for (int axis = 0; axis < ARI_LINT_AXES; axis++)
        type.placement[axis].kind =
            type.placement[axis].kind == AR_INVARIANT ? AR_REPLICATE : type.placement[axis].kind;
    return type;
}

/* Returns the number of experts that share a parameter's name. */
static size_t experts_of(const flow *f, const flow_row *row)
{
    char name[2][TITLE];
    size_t names = 0;
    if (row->op->uses < 2)
        return row->repeats;
    name_param(name[0], row->op, param_of(f, row->op, 0));
    for (size_t i = 0; i < row->op->uses; i++) {
        name_param(name[1], row->op, param_of(f, row->op, i));
        names += i == 0 || strcmp(name[0], name[1]) != 0;
        if (i > 0 && strcmp(name[0], name[1]) == 0)
            break;
    }
    return row->op->uses / names;
}

/* Writes parameters with their placements; experts' parameters of one shape appear once, with their number. */
static void weights_cell(char cell[CELL], const flow *f, const flow_row *row)
{
    const ari_ledger_operation *op = row->op;
    const size_t experts = op->uses > 0 && is_experts(param_of(f, op, 0)) ? experts_of(f, row) : 1;
    char last_entry[CELL] = "";
    ari_text cell_text = ari_plain_text_in(cell, CELL);
    cell[0] = '\0';
    for (size_t i = 0; i < op->uses && !sums_parameters(op) && op->kind != ARI_LEDGER_GRADIENT_NORM; i++) {
        const ari_ledger_param *p = param_of(f, op, i);
        const ari_lint_type type = type_of(f, p);
        char entry[CELL];
        ari_text text = ari_plain_text_in(entry, CELL);
        if (experts > 1)
            ari_say(&text, "%zu of ", experts);
        say_shape(&text, p->ndim, p->local);
        say_type(&text, &type, &f->c->run.parallel);
        if (strcmp(entry, last_entry) != 0)
            ari_say(&cell_text, "%s%s", i > 0 ? "; " : "", entry);
        memcpy(last_entry, entry, sizeof last_entry);
    }
}

/* Run of an operation's consecutive calls with the same kind, group and queue: its length, elements and bytes. */
typedef struct call_run {
    const ari_ledger_call *first_call;
    size_t calls, elements;
    double bytes, sent;
} call_run;

static call_run calls_alike(const flow *f, const ari_ledger_operation *op, size_t i, bool tags)
{
    call_run a = {.first_call = call_of(f, op, i)};
    for (; i < op->calls; i++, a.calls++) {
        const ari_ledger_call *c = call_of(f, op, i);
        if (c->kind != a.first_call->kind || c->group != a.first_call->group ||
            strcmp(c->queue, a.first_call->queue) != 0 ||
            (tags && (c->dtype != a.first_call->dtype || strcmp(c->tag, a.first_call->tag) != 0)))
            break;
        a.elements += c->kind == ARI_ALL_TO_ALL ? (size_t)group_bytes(c) / ar_dtype_bytes(c->dtype) : c->count;
        a.bytes += group_bytes(c);
        a.sent += sent_bytes(c);
    }
    return a;
}

static const char *group_name(const ari_ledger_call *c)
{
    return c->group < 0 ? "world" : ari_over_name((ari_over)c->group);
}

static bool is_beside(const ari_ledger_call *c)
{
    return strcmp(c->queue, "tp") == 0;
}

/* Writes the calls of a row, such as "2 all_reduce tp 10.2 kB, 4 reduce_scatter tp 3.1 MB beside": the bytes that the
 * rank sends; "beside" means overlapped with matmuls. */
static void calls_cell(char cell[CELL], const flow *f, const flow_row *row)
{
    const ari_ledger_operation *op = row->op;
    ari_text cell_text = ari_plain_text_in(cell, CELL);
    cell[0] = '\0';
    for (size_t i = 0; i < op->calls;) {
        const call_run a = calls_alike(f, op, i, false);
        ari_say(&cell_text, "%s", i > 0 ? ", " : "");
        if (a.calls * row->repeats > 1)
            ari_say(&cell_text, "%zu ", a.calls * row->repeats);
        ari_say(&cell_text, "%s %s %s%s", ari_kind_name((ari_kind)a.first_call->kind), group_name(a.first_call),
                ARI_BYTES((uint64_t)a.sent * row->repeats), is_beside(a.first_call) ? " beside" : "");
        i += a.calls;
    }
}

/* --- text and Markdown -------------------------------------------------------------------------------------------- */

enum { COLUMNS = 7 };
static const ari_column columns[COLUMNS] = {
    {"module", ARI_LEFT}, {"operation", ARI_LEFT},     {"input", ARI_LEFT},         {"weight", ARI_LEFT},
    {"output", ARI_LEFT}, {"communication", ARI_LEFT}, {"multiply-adds", ARI_RIGHT}};

static void cells_of(char cell[COLUMNS][CELL], const flow *f, const flow_row *row)
{
    const ari_ledger_operation *op = row->op;
    const double products = multiply_adds(op);
    title_of(cell[0], f, row);
    snprintf(cell[1], CELL, "%s%s", op->operation,
             op->is_recomputed                                   ? " (again)"
             : op->kind == ARI_LEDGER_PRODUCT && op->pass == 'b' ? " (dX)"
                                                                 : "");
    values_cell(cell[2], f, op->input, op->inputs, row->placed->input_types, row->placed->takes_known);
    weights_cell(cell[3], f, row);
    values_cell(cell[4], f, op->out, op->outputs, row->placed->output_types, row->placed->makes_known);
    calls_cell(cell[5], f, row);
    snprintf(cell[6], CELL, "%s", products > 0.0 ? ARI_COUNT((uint64_t)products) : "");
}

/* Explains the placements shown after shapes. */
static void print_legend(FILE *out, const ari_step_case *c)
{
    const ar_parallel *p = &c->run.parallel;
    bool any = false;
    for (int axis = ARI_AXIS_DP; axis < ARI_PLACED_AXES; axis++) {
        if (ari_extent(p, 1u << axis) == 1)
            continue;
        fprintf(out, any ? ", %s" : "Behind a rank's shape, how the ranks of %s", ari_axis_name(axis));
        any = true;
    }
    if (any)
        fprintf(out,
                " hold the whole: R each all of it, I as well (its gradient is whole too), S(d) cut along dimension d, "
                "P each a term of the sum.\n");
    if (ari_experts_separate(p))
        fprintf(out, "V: each rank its own experts, and the rows that come for them.\n");
}

static void print_totals(FILE *out, const flow *f)
{
    for (int i = 0; i < FLOW_PASSES; i++) {
        const flow_total *t = &f->total[i];
        if (t->calls > 0 || t->multiply_adds > 0.0)
            fprintf(out, "%s: %s multiply-adds, %zu collective%s in which the rank sends %s\n", pass_names[i],
                    ARI_COUNT((uint64_t)t->multiply_adds), t->calls, ARI_PLURAL(t->calls),
                    ARI_BYTES((uint64_t)t->bytes));
    }
}

/* Prints rows [first_row, end) of one pass. */
static ar_status print_pass(FILE *out, const flow *f, size_t first_row, size_t end, bool markdown)
{
    ari_table table = {.columns = columns, .n = COLUMNS};
    for (size_t i = first_row; i < end; i++) {
        char cell[COLUMNS][CELL];
        cells_of(cell, f, &f->row[i]);
        for (int k = 0; k < COLUMNS; k++)
            ari_table_cell(&table, "%s", cell[k]);
    }
    fprintf(out, markdown ? "**%s**\n\n" : "%s\n", pass_names[pass_of(f->row[first_row].op)]);
    AR_TRY(markdown ? ari_table_markdown(&table, out) : ari_table_end(&table, out, 2));
    fprintf(out, "\n");
    return AR_OK;
}

static ar_status print_rows(FILE *out, const flow *f, bool markdown)
{
    for (size_t first_row = 0, end; first_row < f->rows; first_row = end) {
        for (end = first_row; end < f->rows && pass_of(f->row[end].op) == pass_of(f->row[first_row].op); end++)
            ;
        AR_TRY(print_pass(out, f, first_row, end, markdown));
    }
    if (f->micro_batches > 1)
        fprintf(out, "The passes are those of the first of %zu micro-batches, and so are their totals.\n",
                f->micro_batches);
    print_legend(out, f->c);
    print_totals(out, f);
    return AR_OK;
}

/* --- JSON --------------------------------------------------------------------------------------------------------- */

/* Returns the placement by axis; null if it is unknown. */
static json_t *placement_json(const ari_lint_type *type, bool is_known)
{
    json_t *o = is_known ? json_object() : json_null();
    char text[AR_PLACEMENT_TEXT];
    for (int axis = 0; axis < ARI_PLACED_AXES && is_known; axis++)
        json_object_set_new(o, ari_axis_name(axis), json_string(placement_text(text, type->placement[axis])));
    return o;
}

/* Computes the shape over all ranks, whose parts have equal lengths except in samples. */
static void whole_shape(size_t out[AR_MAX_DIMS], const flow *f, const ari_lint_type *type)
{
    for (int axis = ARI_AXIS_DP; axis < ARI_PLACED_AXES; axis++) {
        const ar_placement p = type->placement[axis];
        const size_t ranks = (size_t)ari_extent(&f->c->run.parallel, 1u << axis);
        if (p.kind != AR_SHARD || p.dim >= AR_MAX_DIMS || ranks == 1)
            continue;
        out[p.dim] = axis == ARI_AXIS_DP && p.dim == 0 ? f->samples : out[p.dim] * ranks;
    }
}

static json_t *values_json(const flow *f, const ari_ledger_value *v, int n, const ari_lint_type *type,
                           const bool *is_known)
{
    json_t *a = json_array();
    for (int i = 0; i < n; i++) {
        size_t shape[AR_MAX_DIMS], full_shape[AR_MAX_DIMS];
        const int ndim = shown_shape(shape, &v[i]);
        memcpy(full_shape, shape, sizeof full_shape);
        if (is_known[i])
            whole_shape(full_shape, f, &type[i]);
        json_array_append_new(a,
                              json_pack("{s:o, s:o, s:s, s:o}", "shape",
                                        is_known[i] ? ari_json_sizes(full_shape, (size_t)ndim) : json_null(), "local",
                                        ari_json_sizes(shape, (size_t)ndim), "dtype", ar_dtype_name(v[i].dtype),
                                        "placement", placement_json(&type[i], is_known[i])));
    }
    return a;
}

static json_t *weights_json(const flow *f, const ari_ledger_operation *op)
{
    json_t *a = json_array();
    for (size_t i = 0; i < op->uses; i++) {
        const ari_ledger_param *p = param_of(f, op, i);
        const ari_lint_type type = type_of(f, p);
        json_array_append_new(
            a, json_pack("{s:s, s:o, s:o, s:o}", "name", p->name, "shape", ari_json_sizes(p->shape, (size_t)p->ndim),
                         "local", ari_json_sizes(p->local, (size_t)p->ndim), "placement", placement_json(&type, true)));
    }
    return a;
}

static json_t *calls_json(const flow *f, const ari_ledger_operation *op)
{
    json_t *a = json_array();
    for (size_t i = 0; i < op->calls;) {
        const call_run c = calls_alike(f, op, i, true);
        json_array_append_new(a,
                              json_pack("{s:s, s:s, s:i, s:I, s:I, s:s, s:s, s:o, s:o, s:o}", "collective",
                                        ari_kind_name((ari_kind)c.first_call->kind), "group", group_name(c.first_call),
                                        "ranks", c.first_call->ranks, "calls", (json_int_t)c.calls, "elements",
                                        (json_int_t)c.elements, "dtype", ar_dtype_name(c.first_call->dtype), "queue",
                                        c.first_call->queue, "bytes", ari_json_number(c.bytes), "bytes_per_rank",
                                        ari_json_number(c.sent), "tag", ari_json_text(c.first_call->tag)));
        i += c.calls;
    }
    return a;
}

static json_t *row_json(const flow *f, const flow_row *row)
{
    const ari_ledger_operation *op = row->op;
    char title[TITLE];
    title_of(title, f, row);
    json_t *layers = row->layers == 0 ? json_null()
                                      : json_pack("[I, I]", (json_int_t)row->first_layer,
                                                  (json_int_t)(row->first_layer + row->layers - 1));
    return json_pack("{s:s, s:b, s:o, s:s, s:o, s:o, s:o, s:o, s:o, s:o}", "pass", pass_names[pass_of(op)],
                     "recomputed", (int)op->is_recomputed, "module", ari_json_text_or_null(title), "operation",
                     op->operation, "layers", layers, "inputs",
                     values_json(f, op->input, op->inputs, row->placed->input_types, row->placed->takes_known),
                     "weights", weights_json(f, op), "outputs",
                     values_json(f, op->out, op->outputs, row->placed->output_types, row->placed->makes_known),
                     "communication", calls_json(f, op), "multiply_adds", ari_json_number(multiply_adds(op)));
}

/* "flow", an array of operations, and "totals". */
static json_t *flow_json(const flow *f)
{
    json_t *rows = json_array(), *totals = json_object();
    for (size_t i = 0; i < f->rows; i++)
        json_array_append_new(rows, row_json(f, &f->row[i]));
    for (int i = 0; i < FLOW_PASSES; i++)
        json_object_set_new(totals, pass_names[i],
                            json_pack("{s:o, s:I, s:o}", "multiply_adds", ari_json_number(f->total[i].multiply_adds),
                                      "collectives", (json_int_t)f->total[i].calls, "bytes_per_rank",
                                      ari_json_number(f->total[i].bytes)));
    return json_pack("{s:I, s:o, s:o}", "micro_batches", (json_int_t)f->micro_batches, "flow", rows, "totals", totals);
}

/* --- the command -------------------------------------------------------------------------------------------------- */

static json_t *as_json(const ari_plan_values *v, const flow *f, uint64_t bytes)
{
    const ar_run *run = &f->c->run;
    json_t *o = ari_planned_json("plan", f->c);
    json_object_set_new(o, "numerics", json_string(ari_numerics_names[run->numerics]));
    ari_loss_json(o, &run->loss);
    json_object_set_new(o, "rank", json_integer(v->rank));
    json_object_set_new(o, "bytes", json_pack("{s:I}", "predicted", (json_int_t)bytes));
    return ari_json_merge(o, flow_json(f));
}

static ar_status print_flow(FILE *out, const ari_plan_values *v, const flow *f, uint64_t bytes)
{
    const ar_run *run = &f->c->run;
    AR_TRY(print_rows(out, f, v->markdown));
    ari_plan_print(out, &run->plan);
    if (v->backward)
        fprintf(out, "all ranks together, start and step: %s\n", ARI_BYTES(bytes));
    fprintf(out, "%s, %s, %s numerics, %zu x %zu tokens: rank %d of %d\n", f->c->config->name,
            ARI_LAYOUT(&run->parallel, run->batch), ari_numerics_names[run->numerics], run->batch, run->seq, v->rank,
            ar_parallel_world(&run->parallel));
    return AR_OK;
}

ar_status ari_plan_flow(const ari_plan_values *v)
{
    ar_config config;
    ARI_ENDED(ari_planned_end) ari_step_case c = {.run.plan = {0}};
    ARI_ENDED(flow_fini) flow f = {.rows = 0};
    ari_run_values r = v->r;
    uint64_t bytes = 0;
    ari_planned_set_defaults(&r.run.parallel);
    AR_TRY(ari_planned_case(&c, &config, &r, &v->common));
    const int world = ar_parallel_world(&c.run.parallel);
    if (v->rank >= world)
        return ar_error_set(AR_ERR_ARG, "--rank %d: the layout has %d rank%s, numbered from 0", v->rank, world,
                            ARI_PLURAL(world));
    if (!v->common.quiet)
        json_decref(ari_config_notes(stderr, &config));
    AR_TRY(ari_bytes_predict(&bytes, &(ari_step_case){.run = c.run, .config = c.config}));
    AR_TRY(record(&f, &c, v->rank));
    AR_TRY(make_rows(&f, !v->backward, v->each_layer));
    if (ari_prints_text(&v->common))
        AR_TRY(print_flow(stdout, v, &f, bytes));
    return v->common.json ? ari_json_end(as_json(v, &f, bytes), &v->common) : AR_OK;
}

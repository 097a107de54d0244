/* SPDX-License-Identifier: Apache-2.0 */
/* Which value of the list is which: each is made once and taken afterwards, as it was made, on random layouts; what is
 * kept between the passes is what is known of a block; and every wrong number is seen. */
#include "tests/verify/support.h"

#include "support/layout_draw.h"
#include "support/together.h"

#include "ref/placement/placement_private.h"
#include "sim/plan/ops.h"

enum { DRAWS = 120, FIRST_SEED = 8800, WHOLE = 7 };

/* A value as it was made. */
typedef struct value {
    ari_op_value is;
    unsigned parts;  /* that have been made: bits of part_of */
    bool forward;    /* by the forward pass, */
    bool recomputed; /* or once more, */
    bool brought;    /* from other ranks */
    bool taken, kept;
    size_t at; /* records of operations before it */
} value;

/* The last operations of the forward pass, also again: what reads their inputs backward. */
enum { RECORDS = 512 };

typedef struct edges {
    const ari_step_case *c;
    ari_operation *forward; /* [RECORDS], the n-th at n mod RECORDS */
    size_t forwards;
    value *of; /* [n] by number */
    size_t n;
    bool stage;     /* the walk is of one rank: what its neighbours send is not made in it */
    size_t kept;    /* values of the first micro-batch that were made forward and are read backward */
    size_t changes; /* 0, or the edge that is changed, from 1 */
    size_t seen;    /* edges so far */
    char wrong[240];
} edges;

/* Of one parameter: q, k and v, or gate and up; or what of latent keys is normalised, and what their heads share. */
static unsigned part_of(ari_role role)
{
    static const unsigned parts[ARI_ROLES] = {
        [ARI_Q] = 1, [ARI_K] = 2, [ARI_V] = 4, [ARI_GATE] = 1, [ARI_UP] = 6, [ARI_KV_A_NORM] = 3, [ARI_K_SHARED] = 4};
    return parts[role] > 0 ? parts[role] : WHOLE;
}

static void blame(edges *e, const ari_operation *op, size_t id, const char *what)
{
    if (!e->wrong[0])
        snprintf(e->wrong, sizeof e->wrong, "value %zu, %s of role %d in layer %zd of micro-batch %zu, %s%s: %s", id,
                 ari_operation_name(op->kind), (int)op->role, (ssize_t)op->layer, op->micro,
                 ari_operation_pass_name(op->pass), op->recomputed ? " again" : "", what);
}

static bool outlives_passes(const ari_operation *op)
{
    return (op->pass != ARI_PASS_FORWARD && op->pass != ARI_PASS_BACKWARD) || op->kind == ARI_OPERATION_WEIGHT_GATHER ||
           op->kind == ARI_OPERATION_GRADIENT_SUM;
}

/* On an axis of one rank, or where each has the whole, nothing is placed. */
static bool same_placement(const edges *e, const ari_op_value *a, const ari_op_value *b, int axis)
{
    const ar_placement x = a->at[axis], y = b->at[axis];
    const bool whole = x.kind != AR_SHARD && x.kind != AR_PARTIAL_SUM && y.kind != AR_SHARD && y.kind != AR_PARTIAL_SUM;
    return whole || ari_axis_ranks(&e->c->run.parallel, axis) == 1 || ari_placement_same(x, y, a->ndim);
}

/* A part has fewer features than the value; an activation that follows a projection may be one. */
static bool same_value(const edges *e, const ari_op_value *made, const ari_op_value *taken)
{
    const bool part = part_of(made->role) != part_of(taken->role);
    bool same = made->ndim == taken->ndim && made->dtype == taken->dtype && (part || made->copies == taken->copies);
    for (int d = 0; d < made->ndim && same; d++)
        same = part && d == 2 ? (made->shape[d] < taken->shape[d]) == (made->local[d] < taken->local[d])
                              : made->shape[d] == taken->shape[d] && made->local[d] == taken->local[d];
    for (int axis = 0; axis < ARI_PLACED_AXES && same; axis++)
        same = same_placement(e, made, taken, axis);
    return same;
}

/* Parameters, ids, messages of another stage: what need not have been made. */
static bool is_given(const edges *e, const ari_operation *op, const ari_op_value *v)
{
    return outlives_passes(op) || (v->id == 0 && v->dtype == AR_I64) ||
           (e->stage && op->kind == ARI_OPERATION_RECEIVE && v->id > 0);
}

static value *find(edges *e, size_t id)
{
    return id > 0 && id <= e->n && e->of[id - 1].parts > 0 ? &e->of[id - 1] : NULL;
}

static void take(edges *e, const ari_operation *op, size_t id, const ari_op_value *as)
{
    value *v = find(e, id);
    if (!v || (as && (v->parts & part_of(as->role)) != part_of(as->role))) {
        blame(e, op, id, "it has not been made");
        return;
    }
    if (as && !same_value(e, &v->is, as))
        blame(e, op, id, "it has been made otherwise");
    if (as && as->of > 0 && op->kind != ARI_OPERATION_LOSS && (v->forward || v->recomputed))
        blame(e, op, id, "it is no gradient");
    v->taken = true;
    if (v->forward && op->pass == ARI_PASS_BACKWARD && !v->kept) {
        v->kept = true;
        e->kept += id <= ari_operations_values(e->c);
    }
}

static bool has_weight(const ari_operation *op, ari_role role)
{
    bool has = false;
    for (int i = 0; i < op->weights; i++)
        has = has || (op->weight[i].role == role && !op->weight[i].bias);
    return has;
}

/* The operation of the forward pass that a backward one belongs to, record *n; NULL: none, or one of long ago. */
static const ari_operation *forward_of(const edges *e, const ari_operation *op, size_t *n)
{
    const bool gradient = op->kind == ARI_OPERATION_WEIGHT_GRADIENT;
    for (*n = e->forwards; (*n)-- > 0 && *n + RECORDS >= e->forwards;) {
        const ari_operation *f = &e->forward[*n % RECORDS];
        if (f->layer == op->layer && f->micro == op->micro && f->stage == op->stage &&
            (gradient ? has_weight(f, op->role) : f->kind == op->kind && f->role == op->role))
            return f;
    }
    return NULL;
}

/* Backward an operation reads what its forward pass has taken, or that made again since: also where the operation that
 * took it is not needed again itself. */
static void expect_read(edges *e, const ari_operation *op, size_t id, int i)
{
    size_t n = 0;
    const ari_operation *f = forward_of(e, op, &n);
    const value *v = find(e, id);
    const bool again = f && v && (v->recomputed != f->recomputed || v->brought || (v->recomputed && v->at > n));
    if (f && v && !again && f->input[i].id != id && op->role != ARI_TOKENS)
        blame(e, op, id, "its forward pass has taken another");
}

static void expect_reads(edges *e, const ari_operation *op)
{
    const bool product = op->kind == ARI_OPERATION_WEIGHT_GRADIENT && op->inputs == 2;
    if (product)
        expect_read(e, op, op->input[0].id, 0);
    for (int i = 0; i < op->saves; i++)
        expect_read(e, op, op->saved[i], i);
}

static bool passes_on(const ari_operation *op, size_t id)
{
    bool has = false;
    for (int i = 0; i < op->inputs; i++)
        has = has || op->input[i].id == id;
    return has;
}

static void make(edges *e, const ari_operation *op, const ari_op_value *as)
{
    if (as->id == 0 || as->id > e->n) {
        blame(e, op, as->id, "no number of a value");
        return;
    }
    value *v = &e->of[as->id - 1];
    const unsigned parts = part_of(as->role);
    if (v->parts & parts)
        blame(e, op, as->id, "it has been made before");
    *v = (value){.is = *as,
                 .parts = v->parts | parts,
                 .forward = op->pass == ARI_PASS_FORWARD,
                 .recomputed = op->recomputed || op->regathered,
                 .brought = op->regathered,
                 .at = e->forwards};
}

/* What a gradient is the gradient of has been made before it, and is as large. */
static void refer(edges *e, const ari_operation *op, const ari_op_value *gradient)
{
    const value *v = find(e, gradient->of);
    if (gradient->of == 0)
        return;
    if (!v || !(v->forward || v->recomputed))
        blame(e, op, gradient->of, "a gradient of it, and it is none of the forward pass");
    else if (op->kind != ARI_OPERATION_LOSS && part_of(v->is.role) == part_of(gradient->role) &&
             memcmp(v->is.shape, gradient->shape, sizeof v->is.shape) != 0)
        blame(e, op, gradient->of, "a gradient of another shape");
}

/* Every number of an operation in turn may be changed, to one that no value has. */
static void change(edges *e, size_t *id)
{
    if (*id > 0 && ++e->seen == e->changes)
        *id = e->n;
}

static void change_edges(edges *e, ari_operation *op)
{
    for (int i = 0; i < op->inputs; i++)
        change(e, &op->input[i].id);
    for (int i = 0; i < op->saves; i++)
        change(e, &op->saved[i]);
    for (int i = 0; i < op->outputs; i++)
        change(e, &op->output[i].id);
}

static ar_status visit(void *user, const ari_operation *given)
{
    edges *e = user;
    ari_operation copy = *given;
    const ari_operation *op = &copy;
    change_edges(e, &copy);
    for (int i = 0; i < op->inputs; i++) {
        if (!is_given(e, op, &op->input[i]))
            take(e, op, op->input[i].id, &op->input[i]);
        refer(e, op, &op->input[i]);
    }
    for (int i = 0; i < op->saves; i++)
        take(e, op, op->saved[i], NULL);
    if (op->pass == ARI_PASS_FORWARD || op->recomputed)
        e->forward[e->forwards++ % RECORDS] = *op;
    else
        expect_reads(e, op);
    for (int i = 0; i < op->outputs; i++) {
        const ari_op_value *v = &op->output[i];
        refer(e, op, v);
        if (outlives_passes(op) || op->kind == ARI_OPERATION_WEIGHT_GRADIENT) {
            if (v->id != 0)
                blame(e, op, v->id, "a number of what outlives the passes");
        } else if (!passes_on(op, v->id) && op->kind != ARI_OPERATION_DEFERRED) {
            make(e, op, v);
        }
    }
    return AR_OK;
}

/* Nothing is made for nothing: but the loss, and in the parts that are computed again what they end with. */
static void expect_taken(edges *e, const ari_operation *op, const ari_op_value *v)
{
    const bool ends = op->kind == ARI_OPERATION_LOSS || op->recomputed || op->kind == ARI_OPERATION_SEND;
    if (v->id > 0 && !ends && !e->of[v->id - 1].taken)
        blame(e, op, v->id, "nothing takes it");
}

static ar_status visit_taken(void *user, const ari_operation *op)
{
    for (int i = 0; i < op->outputs; i++)
        expect_taken(user, op, &op->output[i]);
    return AR_OK;
}

/* The edges of one rank's list, of that list with what is alike visited once, or of all stages of a pipeline. */
typedef enum walk { OF_RANK, ONCE, OF_PIPELINE, WALKS } walk;
static ar_status go(walk k, const ari_step_case *c, int rank, ari_operation_visitor f, edges *e)
{
    return k == OF_RANK ? ari_operations(c, ARI_OPS_STEP, rank, f, e)
           : k == ONCE  ? ari_operations(c, ARI_OPS_ONCE, rank, f, e)
                        : ari_operations(c, ARI_OPS_PIPELINE, 0, f, e);
}

static edges edges_of(walk k, const ari_step_case *c, int rank, size_t changes)
{
    const int micro = c->run.parallel.micro_batches > 1 ? c->run.parallel.micro_batches : 1;
    edges e = {.c = c, .n = ari_operations_values(c) * (size_t)micro, .stage = k != OF_PIPELINE, .changes = changes};
    e.of = calloc(e.n, sizeof *e.of);
    e.forward = malloc(RECORDS * sizeof *e.forward);
    cr_assert(e.of && e.forward);
    cr_assert_ok(go(k, c, rank, visit, &e));
    if (!e.wrong[0])
        cr_assert_ok(go(k, c, rank, visit_taken, &e));
    free(e.of);
    free(e.forward);
    return e;
}

static layout_draw draw(int i)
{
    layout_draw d;
    layout_draw_make(&d, (layout_draw_kind)(i % 4), FIRST_SEED + (uint64_t)i);
    d.run.parallel.overlap = d.run.parallel.sp ? 1 + i % 5 : 1;
    if (i % 3 > 0)
        layout_draw_add_experts(&d, (uint64_t)i);
    return d;
}

Test(ops_edges, every_value_is_made_once_and_taken_as_it_was_made)
{
    char text[LAYOUT_DRAW_TEXT];
    size_t all = 0;
    for (int i = 0; i < DRAWS; i++) {
        const layout_draw d = draw(i);
        const ari_step_case c = {.config = &d.config, .run = d.run};
        const walk k = (walk)(i / 4 % WALKS);
        const edges e = edges_of(k, &c, i * 7 % ar_parallel_world(&d.run.parallel), 0);
        layout_draw_text(text, sizeof text, &d);
        cr_expect(!e.wrong[0], "draw %d, walk %d: %s\n%s", i, (int)k, e.wrong, text);
        all += e.seen;
    }
    cr_expect_gt(all, 100 * DRAWS);
}

CLAIM(every_changed_number_is_seen)
{
    for (int i = 0; i < 8; i++) {
        const layout_draw d = draw(i);
        const ari_step_case c = {.config = &d.config, .run = d.run};
        const size_t n = edges_of(OF_PIPELINE, &c, 0, 0).seen;
        for (size_t k = 1; k <= n; k += 1 + n / 20) {
            const edges e = edges_of(OF_PIPELINE, &c, 0, k);
            cr_expect(e.wrong[0], "draw %d: edge %zu of %zu", i, k, n);
        }
    }
}

/* Inputs of norms and products, of attention and of the activation; in the place of the last product's input, logits and
 * weights of the experts and what they make. Rows of experts are made again. A table of tokens and a head keep theirs too. What
 * is computed again begins with one value: the block's input, or that of its attention. */
CLAIM(blocks_keep_what_their_backward_passes_read)
{
    enum { LLAMA_BLOCK, GPT2_BLOCK, EXPERTS_BLOCK };
    const ar_config models[] = {config_of(LLAMA(31, 24, 36, 2, 24, 12, 4, false)), config_of(GPT2(31, 24, 36, 2, 4)),
                                config_of(MIXTRAL(31, 24, 36, 2, 4, 2, 5, 2))};
    static const struct {
        int model;
        ar_recompute what;
        size_t block;
    } cases[] = {{LLAMA_BLOCK, AR_RECOMPUTE_NONE, 11},     {GPT2_BLOCK, AR_RECOMPUTE_NONE, 8},
                 {EXPERTS_BLOCK, AR_RECOMPUTE_NONE, 13},   {LLAMA_BLOCK, AR_RECOMPUTE_FULL, 1},
                 {GPT2_BLOCK, AR_RECOMPUTE_FULL, 1},       {EXPERTS_BLOCK, AR_RECOMPUTE_FULL, 1},
                 {LLAMA_BLOCK, AR_RECOMPUTE_SELECTIVE, 7}, {GPT2_BLOCK, AR_RECOMPUTE_SELECTIVE, 6}};
    enum { LAYERS = 2, OUTSIDE = 3 }; /* what the final norm, the head and the loss take */
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const ari_step_case c = {.config = &models[cases[i].model],
                                 .run = {.parallel = {.recompute.what = cases[i].what}, .batch = 2, .seq = 12}};
        cr_expect_eq(edges_of(OF_RANK, &c, 0, 0).kept, LAYERS * cases[i].block + OUTSIDE, "case %zu: %zu", i,
                     edges_of(OF_RANK, &c, 0, 0).kept);
    }
}

/* Of the two passes alone, and on each rank of a pipeline, a value has the number that it has in the whole list. */
static ar_status hash_numbers(void *user, const ari_operation *op)
{
    size_t *sum = user;
    for (int i = 0; i < op->outputs && op->layer == 1 && op->micro == 0; i++)
        *sum += op->output[i].id * (size_t)(op->kind + 1);
    return AR_OK;
}

CLAIM(numbers_do_not_depend_on_the_walk)
{
    const ar_config c = config_of(LLAMA(31, 24, 36, 2, 24, 12, 4, false));
    ari_step_case one = {.config = &c, .run = {.batch = 2, .seq = 12}}, two = one;
    size_t all = 0, parts = 0, stage = 0;
    two.run.parallel = (ar_parallel){.pp = 2, .tp = 2};
    cr_assert_ok(ari_operations(&one, ARI_OPS_STEP, 0, hash_numbers, &all));
    cr_assert_ok(ari_operations(&one, ARI_OPS_BACKWARD, 0, hash_numbers, &parts));
    cr_assert_ok(ari_operations(&one, ARI_OPS_FORWARD, 0, hash_numbers, &parts));
    cr_expect_eq(parts, all);
    cr_assert_ok(ari_operations(&two, ARI_OPS_STEP, 0, hash_numbers, &stage));
    cr_expect_eq(stage, 0, "the second layer is on the second stage");
    cr_assert_ok(ari_operations(&two, ARI_OPS_STEP, 3, hash_numbers, &stage));
    cr_expect_gt(stage, 0);
    cr_assert_ok(ari_operations(&two, ARI_OPS_PIPELINE, 0, hash_numbers, &all));
}

EVERY_CLAIM(ops_edges)

/* SPDX-License-Identifier: Apache-2.0 */
/* What ZeRO-2 and -3 take of a step: whole gradients and weights of units, for as long as a unit needs them
 * (ref/train/units.c, ref/train/weights.c). It belongs to no micro-batch and to no part of a layer. */
#include "planner/own.h"

#include "ref/models/model.h"

static void hold(ari_account *a, double bytes)
{
    ari_account_life *life = a->life;
    a->life = &a->of_units;
    ari_account_take(a, ARI_MEMORY_UNITS, bytes);
    a->life = life;
    a->outside[ARI_MEMORY_UNITS] += bytes;
}

ari_account_unit *ari_account_unit_of(const ari_account *a, size_t layer)
{
    return &a->unit[layer == ARI_NO_LAYER ? a->config->layers : layer];
}

/* --- gradients ---------------------------------------------------------------------------------------------------- */

/* The end of the reduction that is under way. */
static void settle(ari_account *a)
{
    ari_account_unit *u = a->in_flight;
    if (!u)
        return;
    a->in_flight = NULL;
    hold(a, -u->bucket - (u->made ? u->gradients : 0.0));
    u->made = u->due = false;
}

static void make_gradients(ari_account *a, ari_account_unit *u)
{
    if (a->in_flight == u)
        settle(a);
    hold(a, u->made ? 0.0 : u->gradients);
    u->made = u->due = true;
}

static void reduce(ari_account *a, ari_account_unit *u)
{
    settle(a);
    u->due = false;
    hold(a, u->bucket);
    a->in_flight = u;
    if (!a->beside)
        settle(a);
}

/* --- weights ------------------------------------------------------------------------------------------------------ */

static void gather(ari_account *a, ari_account_unit *u)
{
    hold(a, u->weights);
    u->gathered = true;
}

/* The layers [*begin, *end) of the pass. */
static void layers_of(const ari_account *a, size_t *begin, size_t *end)
{
    const ar_parallel *p = &a->c->run.parallel;
    size_t count = 0;
    ar_stage_layers(begin, &count, &p->stages, a->config->layers, (size_t)ar_parallel_stages(p), a->stage);
    *end = *begin + count;
}

/* The unit that comes next in the pass; NULL: none. */
static ari_account_unit *next_of(const ari_account *a, size_t layer)
{
    size_t begin = 0, end = 0;
    layers_of(a, &begin, &end);
    if (a->pass == ARI_PASS_FORWARD)
        return layer + 1 < end ? &a->unit[layer + 1] : NULL;
    return layer > begin ? &a->unit[layer - 1] : NULL;
}

/* Values of their own beside what was gathered; then the next unit's on their way. */
static void take_weights(ari_account *a, ari_account_unit *u, ari_account_unit *next)
{
    if (a->zero < 3)
        return;
    if (!u->whole) {
        if (!u->gathered)
            gather(a, u);
        hold(a, u->weights);
        hold(a, -u->weights);
        u->gathered = false;
        u->whole = true;
    }
    if (next && a->beside && !next->gathered && !next->whole)
        gather(a, next);
}

static void release_weights(ari_account *a, ari_account_unit *u)
{
    hold(a, -u->operands - (u->whole ? u->weights : 0.0));
    u->operands = 0.0;
    u->whole = false;
}

bool ari_account_unit_keeps(ari_account *a, double bytes, bool passed)
{
    ari_account_unit *u = a->zero < 3 ? NULL : ari_account_unit_of(a, a->at);
    if (!u)
        return false;
    if (a->at == ARI_NO_LAYER && passed)
        return true;
    u->operands += bytes;
    hold(a, bytes);
    return true;
}

/* --- passes ------------------------------------------------------------------------------------------------------- */

static void begin_unit(ari_account *a, size_t layer)
{
    ari_account_unit *u = &a->unit[layer];
    a->at = layer;
    take_weights(a, u, next_of(a, layer));
    if (a->pass == ARI_PASS_BACKWARD && !(a->absent && a->part == AR_PP_BACKWARD_INPUT))
        make_gradients(a, u);
}

void ari_account_unit_ends(ari_account *a)
{
    if (a->at == ARI_NO_LAYER)
        return;
    ari_account_unit *u = &a->unit[a->at];
    a->at = ARI_NO_LAYER;
    release_weights(a, u);
    if (a->pass == ARI_PASS_BACKWARD && a->part == AR_PP_BACKWARD && a->beside)
        reduce(a, u);
}

/* A pass that others make through a micro-batch: of what is shared out all that they do. */
static void miss(ari_account *a)
{
    size_t begin = 0, end = 0;
    layers_of(a, &begin, &end);
    for (size_t i = begin; i < end && a->part != AR_PP_BACKWARD_WEIGHT; i++) {
        begin_unit(a, a->pass == ARI_PASS_FORWARD ? i : begin + end - 1 - i);
        ari_account_unit_ends(a);
    }
}

void ari_account_units_begin(ari_account *a)
{
    const bool weights = a->part == AR_PP_BACKWARD_WEIGHT,
               last = a->stage + 1 == (size_t)ar_parallel_stages(&a->c->run.parallel);
    size_t begin = 0, end = 0;
    if (a->zero < 2)
        return;
    layers_of(a, &begin, &end);
    for (size_t i = end; i-- > begin && weights;)
        make_gradients(a, &a->unit[i]);
    if (a->pass == ARI_PASS_BACKWARD && !(a->absent && a->part == AR_PP_BACKWARD_INPUT) &&
        (a->first_stage ? a->stage == 0 : last))
        make_gradients(a, ari_account_unit_of(a, ARI_NO_LAYER));
    if (a->absent)
        miss(a);
}

void ari_account_units_see(ari_account *a, const ari_operation *op)
{
    if (a->zero < 2)
        return;
    if (op->kind == ARI_OPERATION_GRADIENT_SUM) {
        ari_account_unit *u = ari_account_unit_of(a, op->layer);
        ari_account_backward_end(a);
        if (u->due)
            reduce(a, u);
        return;
    }
    if (a->absent || op->part == AR_PP_BACKWARD_WEIGHT || op->layer == a->at)
        return;
    ari_account_leave(a);
    if (op->pass == ARI_PASS_BACKWARD)
        ari_account_backward_end(a);
    ari_account_unit_ends(a);
    if (op->layer != ARI_NO_LAYER)
        begin_unit(a, op->layer);
}

void ari_account_units_step(ari_account *a, const ari_operation *op)
{
    if (a->zero < 2)
        return;
    ari_account_unit *root = ari_account_unit_of(a, ARI_NO_LAYER);
    if (op && op->kind == ARI_OPERATION_WEIGHT_GATHER) {
        take_weights(a, root, NULL);
        return;
    }
    ari_account_touch(a, sizeof(float)); /* the loss, beside what is still under way */
    settle(a);
    release_weights(a, root);
}

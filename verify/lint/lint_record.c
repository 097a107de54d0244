/* SPDX-License-Identifier: Apache-2.0 */
/* Walks through the records of all pipeline stages. A stage pauses while it waits for another stage's message. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/comm/call.h"
#include "ref/core/size.h"
#include "verify/lint/lint_impl.h"

static const ar_placement invariant = {AR_INVARIANT, 0}, term = {AR_PARTIAL_SUM, 0};

/* --- what has to be there ----------------------------------------------------------------------------------------- */

/* Checks that an operation has produced the input. */
static ar_status check_input(ari_lint_walk *w, const ari_ledger_operation *op, const ari_ledger_value *input)
{
    const ari_lint_value *v = ari_lint_value_of(w, input);
    if (input->id == 0)
        return AR_OK;
    if (!v->is_produced && op->pass == 'b' && !op->is_recomputed)
        return ari_lint_find_in_words(w, op, ARI_LINT_NO_AXIS, AR_LINT_missing_backward, "none", "its gradient",
                                      "pass the gradient of its output on to its input");
    if (!v->is_produced)
        return ari_lint_find_in_words(w, op, ARI_LINT_NO_AXIS, AR_LINT_missing_forward, "none", "one",
                                      "leave it out, or compute what it takes before it");
    return AR_OK;
}

/* Checks that only this operation produces the outputs. *is_repeated: the outputs exist already. */
static ar_status check_outputs(ari_lint_walk *w, const ari_ledger_operation *op, bool *is_repeated)
{
    *is_repeated = false;
    for (int i = 0; i < op->outputs; i++) {
        ari_lint_value *v = ari_lint_value_of(w, &op->out[i]);
        *is_repeated = *is_repeated || v->is_produced;
        v->is_produced = true;
    }
    return *is_repeated ? ari_lint_find_in_words(w, op, ARI_LINT_NO_AXIS, AR_LINT_repeated_operation, "twice", "once",
                                                 "leave one of the two out")
                        : AR_OK;
}

/* Returns the number of ranks of a group in the layout; 0: unknown. */
static size_t ranks_over(const ari_lint_walk *w, int group)
{
    size_t n = 1;
    if (group == ARI_OVER_COPIES || w->layout->replicates)
        return 0;
    if (group == ARI_OVER_EP)
        return ari_lint_size(w, ARI_LINT_EP);
    if (group < 0 || ari_over_experts((ari_over)group) || group == ARI_OVER_ENDS)
        return 0;
    for (int axis = 0; axis < ARI_PLACED_AXES; axis++)
        n *= ari_over_axes((ari_over)group) >> axis & 1 ? ari_lint_size(w, axis) : 1;
    return n;
}

/* Collectives are of all ranks of a group of the layout; between two stages of two. */
static ar_status check_groups(ari_lint_walk *w, const ari_ledger_operation *op)
{
    for (size_t i = 0; i < op->calls; i++) {
        const ari_ledger_call *call = &ari_lint_walked(w)->ledger->call[op->first_call + i];
        const bool message = call->kind == ARI_SEND || call->kind == ARI_RECV;
        const bool copies = call->group == ARI_OVER_COPIES && op->kind == ARI_LEDGER_ATTENTION;
        const size_t ranks = message ? 2 : copies ? (size_t)op->copies : ranks_over(w, call->group);
        char actual[AR_LINT_PLACED], required[AR_LINT_PLACED];
        if (ranks == 0 || ranks == (size_t)call->ranks)
            continue;
        snprintf(actual, sizeof actual, "%d ranks", call->ranks);
        snprintf(required, sizeof required, "%zu ranks of %s", ranks, ari_over_name((ari_over)call->group));
        int axis = 0;
        while (axis < ARI_LINT_EDP && !ari_lint_goes_along(w, call, axis))
            axis++;
        AR_TRY(ari_lint_find_in_words(w, op, axis, AR_LINT_wrong_group, actual, required,
                                      "make the call over the group of the layout"));
    }
    return AR_OK;
}

/* The operations of a layer are on one rank of the pipeline. */
static ar_status check_stage(ari_lint_walk *w, const ari_ledger_operation *op)
{
    const size_t layer = ari_lint_layer(op->name);
    char actual[AR_LINT_PLACED], required[AR_LINT_PLACED];
    if (layer >= w->layers || op->pass == 's')
        return AR_OK;
    size_t *rank = &w->layer_rank[layer];
    *rank = *rank == 0 ? w->current_rank + 1 : *rank;
    if (*rank == w->current_rank + 1)
        return AR_OK;
    snprintf(actual, sizeof actual, "stage %zu", w->current_rank);
    snprintf(required, sizeof required, "stage %zu", *rank - 1);
    return ari_lint_find_in_words(w, op, ARI_AXIS_PP, AR_LINT_wrong_stage, actual, required,
                                  "leave it to the stage that has its layers");
}

/* Checks an operation of a record that has every operation. *is_repeated: it was checked before. */
static ar_status check_complete(ari_lint_walk *w, const ari_ledger_operation *op, bool *is_repeated)
{
    for (int i = 0; i < op->inputs && op->kind != ARI_LEDGER_REPORT; i++)
        AR_TRY(check_input(w, op, &op->input[i]));
    AR_TRY(check_groups(w, op));
    AR_TRY(check_stage(w, op));
    return check_outputs(w, op, is_repeated);
}

/* --- the walk ----------------------------------------------------------------------------------------------------- */

static ar_status walk_operation(ari_lint_walk *w, const ari_ledger_operation *op)
{
    bool is_repeated = false;
    if (w->layout->complete)
        AR_TRY(check_complete(w, op, &is_repeated));
    if (is_repeated)
        return AR_OK;
    ari_lint_rank *r = ari_lint_walked(w);
    ari_lint_placed *p = r->placed ? &r->placed[r->next_op] : NULL;
    for (int i = 0; p && i < op->inputs; i++) {
        p->input_types[i] = ari_lint_value_of(w, &op->input[i])->type;
        p->takes_known[i] = ari_lint_is_known(w, &op->input[i]);
    }
    AR_TRY(ari_lint_operation(w, op));
    for (int i = 0; p && i < op->outputs; i++) {
        p->output_types[i] = ari_lint_value_of(w, &op->out[i])->type;
        p->makes_known[i] = ari_lint_is_known(w, &op->out[i]);
    }
    return AR_OK;
}

/* Walks a rank's record to its end, or to a message that has not been sent. */
static ar_status walk_rank(ari_lint_walk *w, bool *goes_on)
{
    ari_lint_rank *r = ari_lint_walked(w);
    for (; r->next_op < r->ledger->operations; r->next_op++) {
        const ari_ledger_operation *op = &r->ledger->operation[r->next_op];
        if (!ari_lint_await_inputs(w, op))
            return AR_OK;
        AR_TRY(walk_operation(w, op));
        *goes_on = true;
    }
    return AR_OK;
}

/* Checks that every use of a parameter has a gradient. */
static ar_status check_uses(ari_lint_walk *w, const ari_ledger_operation *op, const ari_ledger_param *recorded,
                            const ari_lint_param *p)
{
    char actual[AR_LINT_PLACED], required[AR_LINT_PLACED];
    if (!w->layout->complete || !recorded->trained || p->uses == p->gradients)
        return AR_OK;
    snprintf(actual, sizeof actual, "%d of its uses", p->gradients);
    snprintf(required, sizeof required, "%d", p->uses);
    return ari_lint_find_in_words(w, op, ARI_LINT_NO_AXIS, AR_LINT_missing_gradient, actual, required,
                                  "add the gradients of all uses of the parameter");
}

/* Checks parameters that two stages share outside of the layers: the terms of their gradient are reduced only if both
 * stages know of the sharing. */
static ar_status check_copies_of_stages(ari_lint_walk *w, const ari_ledger_param *p)
{
    ari_ledger_operation op = {
        .kind = ARI_LEDGER_WEIGHT_GRADIENT, .operation = ari_ledger_kind_name(ARI_LEDGER_WEIGHT_GRADIENT), .pass = 'b'};
    bool is_shared = false;
    for (size_t r = w->current_rank + 1;
         r < w->ranks && !p->is_tied && p->trained && ari_lint_layer(p->name) == SIZE_MAX; r++) {
        for (size_t i = 0; i < w->rank[r].ledger->params; i++)
            is_shared = is_shared || strcmp(w->rank[r].ledger->param[i].name, p->name) == 0;
    }
    snprintf(op.name, sizeof op.name, "%s", p->name);
    return is_shared
               ? ari_lint_find_in_words(w, &op, ARI_AXIS_PP, AR_LINT_unsummed_gradient, "P(sum)", "R",
                                        "mark the parameter as one of both ends: each stage has terms of its gradient")
               : AR_OK;
}

/* Reports gradients with partial sums that were not reduced, and shards that were not gathered. */
static ar_status check_sums(ari_lint_walk *w)
{
    const ari_lint_rank *r = ari_lint_walked(w);
    for (size_t i = 0; i < r->ledger->params; i++) {
        const int copies = ari_lint_copies_axis(w, &r->ledger->param[i]);
        ari_ledger_operation op = {.kind = ARI_LEDGER_WEIGHT_GRADIENT,
                                   .operation = ari_ledger_kind_name(ARI_LEDGER_WEIGHT_GRADIENT),
                                   .pass = 'b'};
        snprintf(op.name, sizeof op.name, "%s", r->ledger->param[i].name);
        AR_TRY(check_uses(w, &op, &r->ledger->param[i], &r->param[i]));
        AR_TRY(check_copies_of_stages(w, &r->ledger->param[i]));
        if (w->layout->complete && w->layout->zero && r->updated && copies != ARI_LINT_NO_AXIS &&
            ari_lint_size(w, copies) > 1 && !r->param[i].gathered && r->param[i].gradients > 0) {
            const ari_lint_verdict v = ari_lint_mismatch((ar_placement){AR_SHARD, 0}, invariant);
            AR_TRY(ari_lint_find(w, &op, copies, &v));
        }
        for (int axis = 0; axis < ARI_LINT_AXES && !r->param[i].judged; axis++) {
            const ari_lint_verdict v = {
                .broken = true, .rule = AR_LINT_unsummed_gradient, .actual = term, .required = invariant};
            if (r->param[i].partial[axis] && r->param[i].summed[axis] == 0)
                AR_TRY(ari_lint_find(w, &op, axis, &v));
        }
    }
    return AR_OK;
}

static ar_status walk_all(ari_lint_walk *w)
{
    for (bool goes_on = true; goes_on;) {
        goes_on = false;
        for (w->current_rank = 0; w->current_rank < w->ranks; w->current_rank++)
            AR_TRY(walk_rank(w, &goes_on));
    }
    for (w->current_rank = 0; w->current_rank < w->ranks; w->current_rank++) {
        const ari_lint_rank *r = ari_lint_walked(w);
        if (r->next_op < r->ledger->operations)
            AR_TRY(ari_lint_find_in_words(w, &r->ledger->operation[r->next_op], ARI_AXIS_PP, AR_LINT_unmatched_message,
                                          "nothing", "what is sent", "send it what the stage before it makes"));
        else
            AR_TRY(check_sums(w));
        const ari_ledger_operation loss = {.kind = ARI_LEDGER_LOSS, .operation = "loss", .pass = 'b'};
        if (w->layout->complete && r->losses != 0)
            AR_TRY(ari_lint_find_in_words(w, &loss, ARI_LINT_NO_AXIS, AR_LINT_missing_forward, "none", "one",
                                          "leave it out, or add it to the forward pass"));
    }
    return AR_OK;
}

ar_status ari_lint_records(ar_lint_report *r, ari_lint_placed *const *placed, const ari_ledger *records, size_t n,
                           const ari_lint_layout *layout)
{
    ARI_ENDED(ari_arena_free) ari_arena memory = {0};
    ari_lint_walk w = {.layout = layout, .report = r, .ranks = n};
    AR_TRY(ARI_TAKE(&w.rank, &memory, n, "lint"));
    for (w.current_rank = 0; w.current_rank < n; w.current_rank++) {
        ari_lint_rank *rank = ari_lint_walked(&w);
        rank->ledger = &records[w.current_rank];
        rank->placed = placed ? placed[w.current_rank] : NULL;
        AR_TRY(ARI_TAKE(&rank->value, &memory, rank->ledger->ids + 1, "the values of lint"));
        AR_TRY(ARI_TAKE(&rank->param, &memory, rank->ledger->params, "the parameters of lint"));
        for (size_t i = 0; i < rank->ledger->params; i++)
            ari_lint_place_param(&rank->param[i].type, &rank->ledger->param[i], layout);
    }
    for (size_t i = 0; i < n; i++) {
        for (size_t k = 0; k < records[i].operations; k++) {
            const size_t layer = ari_lint_layer(records[i].operation[k].name);
            w.layers = layer != SIZE_MAX && layer >= w.layers ? layer + 1 : w.layers;
        }
    }
    AR_TRY(ARI_TAKE(&w.layer_rank, &memory, w.layers, "the layers of lint"));
    const ar_status st = walk_all(&w);
    free(w.message);
    return st;
}

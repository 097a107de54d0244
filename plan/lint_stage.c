/* SPDX-License-Identifier: Apache-2.0 */
/* The stages of a pipeline: what goes from one to the next, and which of them has what. */
#include <stdio.h>

#include "plan/lint.h"

/* --- messages ----------------------------------------------------------------------------------------------------- */

/* What has been sent and nobody receives. */
static void lose(ari_lint_state *l)
{
    char has[AR_LINT_PLACED];
    snprintf(has, sizeof has, "sent by stage %zu", l->sent.stage);
    ari_lint_find(l->f, &l->sent, ARI_AXIS_PP, AR_LINT_unmatched_message, has, "received",
                  "receive it at the beginning of the stage that takes it, or do not send it");
    l->sending = false;
}

/* It is one call between two neighbours of the pipeline, of all that the rank has. */
static void check_call(ari_lint_state *l, const ari_operation *op, ari_call_kind kind)
{
    const ari_op_call *call = &op->call[0];
    const char *name = ari_call_name(kind);
    char has[AR_LINT_PLACED] = "none", needs[AR_LINT_PLACED];
    if (op->calls == 1 && call->kind == kind && call->over == ARI_OVER_PP && call->ranks == 2 &&
        (double)call->elements == ari_op_elements(&op->input[0]))
        return;
    if (op->calls > 1)
        snprintf(has, sizeof has, "%d of them", op->calls);
    else if (op->calls == 1)
        snprintf(has, sizeof has, "%s of %zu, %zu ranks of %s", ari_call_name(call->kind), call->elements, call->ranks,
                 ari_over_name(call->over));
    snprintf(needs, sizeof needs, "%s of %.0f, 2 ranks of pp", name, ari_op_elements(&op->input[0]));
    ari_lint_find(l->f, op, ARI_AXIS_PP, AR_LINT_unmatched_message, has, needs,
                  "move it from the one stage to the other, once");
}

void ari_lint_send(ari_lint_state *l, const ari_operation *op)
{
    check_call(l, op, ARI_CALL_SEND);
    l->at[0] = ari_lint_agree(l, op, &op->input[0], l->at[0]);
    l->at[0] = ari_lint_agree(l, op, &op->output[0], l->at[0]);
    l->sent = *op;
    l->sending = true;
}

/* Whether what has been sent last is meant for this stage. */
static bool arrives(const ari_lint_state *l, const ari_operation *op)
{
    const size_t from = op->pass == ARI_PASS_FORWARD ? op->stage - 1 : op->stage + 1;
    return l->sending && l->sent.pass == op->pass && l->sent.micro == op->micro && l->sent.stage == from;
}

void ari_lint_receive(ari_lint_state *l, const ari_operation *op)
{
    const ari_op_value *to = &op->output[0];
    check_call(l, op, ARI_CALL_RECV);
    if (arrives(l, op)) {
        l->at[0] = ari_lint_agree(l, op, to, ari_lint_stated(&l->sent.input[0]));
        l->sending = false;
        return;
    }
    if (l->sending)
        lose(l);
    ari_lint_find(l->f, op, ARI_AXIS_PP, AR_LINT_unmatched_message, "nothing", "what is sent",
                  op->pass == ARI_PASS_FORWARD ? "send it what the stage before makes"
                                               : "send it the gradient of the input of the stage after it");
    l->at[0] = ari_lint_stated(to);
}

/* --- what is where ------------------------------------------------------------------------------------------------ */

/* The stages [*first, *end) that may have an operation of a pass. */
static void stages_of(const ari_lint_state *l, const ari_operation *op, size_t *first, size_t *end)
{
    const ar_parallel *p = &l->c->run.parallel;
    const size_t n = (size_t)ar_parallel_stages(p);
    *first = 0;
    *end = n;
    if (op->layer != ARI_NO_LAYER) {
        for (size_t begin = 0, count = 0; *first < n; (*first)++) {
            ar_stage_layers(&begin, &count, &p->stages, l->c->config->layers, n, *first);
            if (op->layer < begin + count)
                break;
        }
        *end = *first + 1;
    } else if (op->kind == ARI_OPERATION_EMBEDDING || op->kind == ARI_OPERATION_POSITIONS) {
        *end = 1;
    } else if (op->kind == ARI_OPERATION_LOSS || op->kind == ARI_OPERATION_NORM || op->kind == ARI_OPERATION_PRODUCT) {
        *first = n - 1;
    }
}

void ari_lint_stage(ari_lint_state *l, const ari_operation *op)
{
    char has[AR_LINT_PLACED], needs[AR_LINT_PLACED];
    size_t first = 0, end = 0;
    if (l->size[ARI_AXIS_PP] == 1)
        return;
    if (l->sending && op->kind != ARI_OPERATION_RECEIVE)
        lose(l);
    if (op->pass != ARI_PASS_FORWARD && op->pass != ARI_PASS_BACKWARD)
        return;
    stages_of(l, op, &first, &end);
    if (op->stage >= first && op->stage < end)
        return;
    snprintf(has, sizeof has, "stage %zu", op->stage);
    snprintf(needs, sizeof needs, "stage %zu", first);
    ari_lint_find(l->f, op, ARI_AXIS_PP, AR_LINT_wrong_stage, has, needs,
                  "leave it to the stage that has its layers: the first also has the embedding, the last the head and "
                  "the loss");
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/lint/flow.h"

#include <stdio.h>
#include <string.h>

#include "ref/core/text.h"
#include "ref/models/family.h"
#include "ref/placement/placement_private.h"

/* "3"; "*": all of them. */
static void number_text(char out[24], size_t n)
{
    snprintf(out, 24, n == ARI_EVERY_EXPERT ? "*" : "%zu", n);
}

void ari_path_of(char *out, size_t cap, const ar_config *c, const char *layer, const char *expert, ari_role role)
{
    char path[160];
    ari_role_path(path, sizeof path, c->arch, layer, role);
    const char *star = ari_is_expert_part(role) ? strrchr(path, '*') : NULL;
    snprintf(out, cap, "%.*s%s%s", (int)(star ? star - path : (ptrdiff_t)strlen(path)), path, star ? expert : "",
             star ? star + 1 : "");
}

void ari_operation_tag(char *out, size_t cap, const ar_config *c, const ari_operation *op, const ari_op_call *call,
                       size_t expert)
{
    char layer[24], number[24];
    char bucket[40] = "", path[160] = "";
    const bool gathers = op->kind == ARI_OPERATION_WEIGHT_GATHER && call->role != ARI_NO_ROLE;
    if ((gathers || op->kind == ARI_OPERATION_GRADIENT_SUM) &&
        call->over != ARI_OVER_ENDS) /* it has other numbers at the other end */
        snprintf(bucket, sizeof bucket, "bucket %zu: ", op->bucket);
    number_text(layer, op->layer);
    number_text(number, call->experts > 0 ? call->expert + expert : op->expert);
    if (call->role != ARI_NO_ROLE)
        ari_path_of(path, sizeof path, c, layer, number, call->role);
    snprintf(out, cap, "%s%s%s", bucket, path, call->tag);
}

const char *ari_placed_along(char out[AR_PLACEMENT_TEXT], const ari_op_value *v, int axis)
{
    if (v->by_expert >> axis & 1)
        snprintf(out, AR_PLACEMENT_TEXT, "V");
    else
        (void)ari_placement_name(out, v->at[axis]);
    return out;
}

/* --- rows --------------------------------------------------------------------------------------------------------- */

/* "3", "0-62", or "*" for all layers of the model. */
static void layers_text(char out[48], const ar_config *c, const ari_flow_row *row)
{
    const size_t first = row->op.layer;
    if (row->layers == c->layers && first < c->layers)
        snprintf(out, 48, "*");
    else if (row->layers == 1)
        snprintf(out, 48, "%zu", first);
    else
        snprintf(out, 48, "%zu-%zu", first, first + row->layers - 1);
}

/* True if an operation concerns a parameter or a bucket: its output is one, or its gradient. */
static bool of_parameters(const ari_operation *op)
{
    return op->kind == ARI_OPERATION_WEIGHT_GRADIENT || op->kind == ARI_OPERATION_BROADCAST ||
           op->kind == ARI_OPERATION_GRADIENT_SUM || op->kind == ARI_OPERATION_WEIGHT_GATHER;
}

/* "stage 0 to 1". */
static void say_message(ari_text *out, const ari_operation *op)
{
    const bool up = op->pass == ARI_PASS_FORWARD, sends = op->kind == ARI_OPERATION_SEND;
    const size_t other = up == sends ? op->stage + 1 : op->stage - 1;
    ari_say(out, "stage %zu to %zu", sends ? op->stage : other, sends ? other : op->stage);
}

void ari_flow_title(char *out, size_t cap, const ar_config *c, const ari_flow_row *row)
{
    const ari_operation *op = &row->op;
    const bool message = op->kind == ARI_OPERATION_SEND || op->kind == ARI_OPERATION_RECEIVE;
    char layers[48], expert[24], path[160];
    ari_text title = ari_plain_text_in(out, cap);
    layers_text(layers, c, row);
    number_text(expert, of_parameters(op) && op->output[0].experts == 0 ? op->expert : ARI_EVERY_EXPERT);
    ari_path_of(path, sizeof path, c, layers, expert, op->role);
    if (message)
        say_message(&title, op);
    else
        ari_say(&title, "%s", path);
    for (int i = 1; i < op->weights; i++) { /* those that share the input of the first */
        ari_path_of(path, sizeof path, c, layers, expert, op->weight[i].role);
        const char *leaf = strrchr(path, '.');
        if (op->weight[i].role != op->weight[0].role)
            ari_say(&title, ", %s", leaf ? leaf + 1 : path);
    }
    if (!of_parameters(op))
        return;
    ari_say(&title, "%s", ari_param_suffix(op->role, op->output[0].bias));
    if (op->params > 1)
        ari_say(&title, " and %zu more", op->params - 1);
}

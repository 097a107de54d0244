/* SPDX-License-Identifier: Apache-2.0 */
/* The forward and the backward pass of a stage of a model, which may be all of it, module by module. */
#include "sim/plan/ops_impl.h"

#include <string.h>

/* --- blocks for further tokens ------------------------------------------------------------------------------------ */

/* Where what enters such a ari_op_builder_block, its head's input before, has a number of its own; else 0. */
static size_t entering(const ari_op_builder *w, size_t section)
{
    return section < ar_config_blocks(w->config) + 2 ? ari_op_builder_stream_value(w, section) : 0;
}

static ari_linear_ops joined_of(const ari_op_builder *w)
{
    const ar_placement stream = ari_op_builder_stream(w);
    return (ari_linear_ops){
        .part = {ARI_JOINED}, .n = 1, .split = {AR_STYLE_REPLICATE, stream, stream}, .module = ARI_JOINED};
}

static void further(ari_op_builder *w)
{
    const size_t entered = ari_op_builder_now(w);
    const ari_linear_ops joined = joined_of(w);
    ari_op_builder_embedding(w);
    ari_op_builder_norm(w, ARI_TOKENS_NORM, 0);
    const size_t tokens = ari_op_builder_now(w);
    ari_op_builder_take(w, entered);
    ari_op_builder_norm(w, ARI_ENTERED_NORM, 0);
    ari_op_builder_side_by_side(w, tokens, ari_op_builder_now(w));
    ari_op_builder_linear(w, &joined);
    ari_op_builder_block(w);
    ari_op_builder_norm(w, ARI_MTP_NORM, entering(w, w->edges.section + 1));
    if (!w->counting)
        ari_op_builder_loss(w);
}

/* Adds the gradient of what enters the next such ari_op_builder_block, if there is one. */
static void add_further(ari_op_builder *w, ari_role role)
{
    const size_t more = entering(w, w->edges.section + 1);
    if (more == 0)
        return;
    const size_t of = ari_op_builder_forward_of(w, ARI_OPERATION_NORM, role)->out[0];
    ari_operation *op =
        ari_op_builder_local(w, ARI_OPERATION_RESIDUAL, role, 2, w->config->hidden, ari_op_builder_stream(w));
    op->input[1].id = more;
    op->input[0].of = op->input[1].of = op->output[0].of = of;
    ari_op_builder_make(w);
}

static void further_backward(ari_op_builder *w)
{
    const ari_linear_ops joined = joined_of(w);
    const size_t layer = w->layer;
    ari_op_builder_loss_backward(w);
    add_further(w, ARI_MTP_NORM);
    ari_op_builder_unit_begins(w, layer);
    ari_op_builder_norm_backward(w, ARI_MTP_NORM, 0);
    ari_op_builder_block_backward(w);
    ari_op_builder_linear_backward(w, &joined, NULL, NULL);
    ari_op_builder_side_by_side(w, 0, 0);
    const ari_op_value tokens = w->edges.now.at[0], entered = w->edges.now.at[1];
    w->edges.now = (ari_values){.at = {entered}, .n = 1};
    ari_op_builder_norm_backward(w, ARI_ENTERED_NORM, ari_op_builder_stream_value(w, w->edges.section));
    w->edges.now = (ari_values){.at = {tokens}, .n = 1};
    ari_op_builder_norm_backward(w, ARI_TOKENS_NORM, 0);
    ari_op_builder_embedding_backward(w);
    ari_op_builder_unit_ends(w, layer);
}

/* --- a stage ------------------------------------------------------------------------------------------------------ */

static void end_forward(ari_op_builder *w)
{
    if (w->config->final_norm)
        ari_op_builder_norm(w, ARI_FINAL_NORM, entering(w, w->config->layers + 2));
    if (!w->counting)
        ari_op_builder_loss(w);
}

/* Goes to a section of a pass, and its layer. */
static void begin_section(ari_op_builder *w, size_t section)
{
    w->edges.section = section;
    w->edges.forwards = 0;
    memset(w->edges.made, 0, sizeof w->edges.made);
    const size_t after = w->config->layers + 1;
    ari_op_builder_layer(w, section == 0 || section == after ? ARI_NO_LAYER
                            : section < after                ? section - 1
                                                             : section - 2);
}

/* The forward pass's input to a section of the stage, possibly the one after its last: the neighbour's message, the
 * embedding's output, or a block's. */
static void take_stream(ari_op_builder *w, size_t section)
{
    size_t begin = 0, end = 0;
    ari_op_builder_stage_layers(w, w->stage, &begin, &end);
    if (section > begin + 1) {
        ari_op_builder_take(w, ari_op_builder_stream_value(w, section));
    } else if (w->stage > 0) {
        ari_op_builder_take(w, ari_op_builder_message_value(w, w->stage, true));
    } else {
        begin_section(w, 0);
        ari_op_builder_embedding(w);
    }
}

/* Goes to a section in the backward pass: through its forward pass, unseen. */
static void section_backward(ari_op_builder *w, size_t section, void (*forward)(ari_op_builder *w))
{
    const ari_values gradient = w->edges.now;
    const bool unseen = w->edges.unseen;
    w->pass = ARI_PASS_FORWARD;
    w->edges.unseen = true;
    if (section > 0)
        take_stream(w, section);
    begin_section(w, section);
    w->edges.entered = ari_op_builder_now(w);
    forward(w);
    w->pass = ARI_PASS_BACKWARD;
    w->edges.unseen = unseen;
    w->edges.now = gradient;
}

static void begin_backward(ari_op_builder *w)
{
    section_backward(w, w->config->layers + 1, end_forward);
    ari_op_builder_loss_backward(w);
    add_further(w, ARI_FINAL_NORM);
    if (w->config->final_norm)
        ari_op_builder_norm_backward(w, ARI_FINAL_NORM, 0);
}

/* The output of the stage's pass for its neighbour. */
static void take_sent(ari_op_builder *w)
{
    size_t begin = 0, end = 0;
    ari_op_builder_stage_layers(w, w->stage, &begin, &end);
    w->edges.unseen = true;
    if (w->pass == ARI_PASS_FORWARD)
        take_stream(w, end + 1);
    else if (begin < end)
        ari_op_builder_take(w, ari_op_builder_stream_value(w, begin + 1));
    else
        begin_backward(w);
    w->edges.unseen = false;
}

/* Stages exchange a block's input and output, each rank its own part. */
void ari_op_builder_message(ari_op_builder *w, bool sends)
{
    static const ari_call_queue queues[2][2] = {{ARI_ON_RECV_ACTIVATION, ARI_ON_SEND_ACTIVATION},
                                                {ARI_ON_RECV_GRADIENT, ARI_ON_SEND_GRADIENT}};
    const bool back = w->pass == ARI_PASS_BACKWARD, up = sends != back;
    const size_t to = !sends ? w->stage : back ? w->stage - 1 : w->stage + 1;
    if (up ? w->stage + 1 == w->stages : w->stage == 0)
        return;
    ari_op_builder_take(w, ari_op_builder_message_value(w, to, false));
    if (sends)
        take_sent(w);
    ari_operation *op = ari_op_builder_local(w, sends ? ARI_OPERATION_SEND : ARI_OPERATION_RECEIVE, ARI_NO_ROLE, 1,
                                             w->config->hidden, ari_op_builder_stream(w));
    const size_t *own = op->output[0].local;
    op->output[0].id = ari_op_builder_message_value(w, to, !sends);
    ari_op_builder_call(w, sends ? ARI_CALL_SEND : ARI_CALL_RECV, ARI_OVER_PP,
                        ari_op_builder_mul(w, ari_op_builder_mul(w, own[0], own[1]), own[2]), w->form.activations,
                        ARI_EACH_PASS, ARI_NO_ROLE, back ? "gradient" : "activation");
    op->call[0].queue = queues[back][sends];
    ari_op_builder_make(w);
}

static void after_blocks(ari_op_builder *w)
{
    const size_t layers = w->config->layers;
    begin_section(w, layers + 1);
    if (!w->counting || w->config->mtp > 0)
        end_forward(w);
    for (size_t i = 0; i < w->config->mtp && w->st == AR_OK; i++) {
        ari_op_builder_take(w, ari_op_builder_stream_value(w, layers + 2 + i));
        begin_section(w, layers + 2 + i);
        ari_op_builder_unit_begins(w, layers + i);
        further(w);
    }
}

void ari_op_builder_forward(ari_op_builder *w)
{
    size_t begin = 0, end = 0;
    ari_op_builder_stage_layers(w, w->stage, &begin, &end);
    take_stream(w, begin + 1);
    for (size_t i = begin; i < end && w->st == AR_OK; i++) {
        begin_section(w, i + 1);
        ari_op_builder_unit_begins(w, i);
        ari_op_builder_block(w);
    }
    if (w->stage + 1 == w->stages)
        after_blocks(w);
    else
        begin_section(w, 0);
}

void ari_op_builder_backward(ari_op_builder *w)
{
    size_t begin = 0, end = 0;
    ari_op_builder_stage_layers(w, w->stage, &begin, &end);
    ari_op_builder_take(w, ari_op_builder_message_value(w, w->stage, true));
    for (size_t i = w->config->mtp; i-- > 0 && w->stage + 1 == w->stages && w->st == AR_OK;) {
        section_backward(w, w->config->layers + 2 + i, further);
        further_backward(w);
    }
    if (w->stage + 1 == w->stages)
        begin_backward(w);
    for (size_t i = end; i-- > begin && w->st == AR_OK;) {
        section_backward(w, i + 1, ari_op_builder_block);
        ari_op_builder_unit_begins(w, i);
        ari_op_builder_block_backward(w);
        ari_op_builder_unit_ends(w, i);
    }
    begin_section(w, 0);
    if (w->stage == 0) {
        section_backward(w, 0, ari_op_builder_embedding);
        ari_op_builder_embedding_backward(w);
    }
    ari_op_builder_stage_blocks(w, w->stage, &begin, &end);
    ari_op_builder_stage_ends(w, begin, end);
}

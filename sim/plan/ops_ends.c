/* SPDX-License-Identifier: Apache-2.0 */
/* The ends of a model, which blocks for further tokens have too: rows of the table of tokens, and the LM head with its
 * loss. */
#include "sim/plan/ops_impl.h"

/* True in a block for a further token. */
static bool is_further(const ari_op_builder *w)
{
    return w->layer != ARI_NO_LAYER && w->layer >= w->config->layers;
}

/* --- embedding ---------------------------------------------------------------------------------------------------- */

static ari_op_value ids(ari_op_builder *w)
{
    ari_op_value v = ari_op_builder_activation(w, 1, ari_whole, 1);
    v.ndim = 2;
    v.dtype = AR_I64;
    return v;
}

/* By vocabulary a selection of bit patterns: one rank has a token's row, the others zeros. By hidden every rank has its
 * features of it. */
void ari_op_builder_embedding(ari_op_builder *w)
{
    static const ar_placement made[] = {[AR_EMBEDDING_VOCAB] = {AR_PARTIAL_SUM, 0},
                                        [AR_EMBEDDING_HIDDEN] = {AR_SHARD, 2},
                                        [AR_EMBEDDING_WHOLE] = {AR_INVARIANT, 0}};
    const size_t h = w->config->hidden, n = ari_op_builder_mul(w, w->tokens, h);
    const bool vocab = w->outer.tokens == AR_EMBEDDING_VOCAB;
    ari_operation *op = ari_op_builder_begin(w, ARI_OPERATION_EMBEDDING, is_further(w) ? ARI_MTP_TOKENS : ARI_TOKENS);
    op->input[op->inputs++] = ids(w);
    op->weight[op->weights++] = ari_op_builder_param(w, ARI_TOKENS, false);
    op->produced_as = made[w->outer.tokens];
    op->output[op->outputs++] = ari_op_builder_activation(w, h, vocab ? ari_op_builder_stream(w) : op->produced_as, 1);
    const bool words = w->form.activations == AR_F32; /* else bytes */
    if (vocab)
        ari_op_builder_call(w, w->form.sp ? ARI_CALL_REDUCE_SCATTER : ARI_CALL_ALL_REDUCE, ARI_OVER_TP,
                            ari_op_builder_mul(w, n, words ? 1 : ar_dtype_bytes(w->form.activations)),
                            words ? AR_I32 : AR_U8, ARI_EACH_PASS, ARI_TOKENS, ".weight");
    ari_op_builder_make(w);
    if (!vocab)
        ari_op_builder_exchange(w, made[w->outer.tokens], ari_op_builder_stream(w));
    if (!w->config->learned_positions)
        return;
    op = ari_op_builder_local(w, ARI_OPERATION_POSITIONS, ARI_POSITIONS, 1, h, ari_op_builder_stream(w));
    op->weight[op->weights++] = ari_op_builder_param(w, ARI_POSITIONS, false);
    ari_op_builder_make(w);
    ari_op_builder_dropout(w, ARI_EMBEDDED);
}

/* A token's row may be on any rank: each gets the gradients of all tokens, by hidden of its own features. */
void ari_op_builder_embedding_backward(ari_op_builder *w)
{
    const size_t h = w->config->hidden;
    const ari_op_value id = ids(w);
    static const ar_placement wanted[] = {[AR_EMBEDDING_VOCAB] = {AR_REPLICATE, 0},
                                          [AR_EMBEDDING_HIDDEN] = {AR_SHARD, 2},
                                          [AR_EMBEDDING_WHOLE] = {AR_INVARIANT, 0}};
    if (w->config->learned_positions)
        ari_op_builder_dropout(w, ARI_EMBEDDED);
    const ari_op_value own = ari_op_builder_held(w, ari_op_builder_activation(w, h, ari_op_builder_stream(w), 1), 0);
    ari_op_builder_exchange(w, own.at[ARI_AXIS_TP], wanted[w->outer.tokens]);
    const ari_op_value whole = ari_op_builder_held(w, ari_op_builder_activation(w, h, wanted[w->outer.tokens], 1), 0);
    ari_op_builder_weight_gradient(w, ARI_TOKENS, false, &id, &whole);
    if (w->config->learned_positions)
        ari_op_builder_weight_gradient(w, ARI_POSITIONS, false, NULL, &own);
}

/* --- head and loss ------------------------------------------------------------------------------------------------ */

/* A tied weight is the table of tokens. */
static ari_linear_ops head_of(const ari_op_builder *w)
{
    return (ari_linear_ops){.part = {w->config->tied ? ARI_TOKENS : ARI_HEAD},
                            .n = 1,
                            .split = ari_op_builder_placed_split(w->outer.head),
                            .module = is_further(w) ? ARI_MTP_HEAD : ARI_HEAD};
}

/* True if the loss works on shards of the logits. */
static bool loss_parallel(const ari_op_builder *w)
{
    return ari_op_builder_same(ari_op_builder_placed(w->outer.head.to), ari_by_features);
}

static ari_operation *loss_of(ari_op_builder *w)
{
    const size_t width = w->form.head ? w->config->vocab : w->config->hidden;
    const ar_placement logits = loss_parallel(w) ? ari_by_features : ari_whole;
    return ari_op_builder_local(w, ARI_OPERATION_LOSS, ARI_LOSS, 1, width,
                                w->form.head ? logits : ari_op_builder_stream(w));
}

/* Logits that stay sharded yield a maximum, a denominator and the target's bits for each token; with label smoothing
 * the exponent and the sum of the logits go with the first two. Without a head every element is a term. */
void ari_op_builder_loss(ari_op_builder *w)
{
    if (w->form.head) {
        const ari_linear_ops head = head_of(w);
        ari_op_builder_linear(w, &head);
    }
    ari_operation *op = loss_of(w);
    if (w->form.head) {
        op->output[0] = ids(w);
        op->output[0].dtype = AR_F32;
    }
    if (w->form.head && loss_parallel(w)) {
        op->produced_as = (ar_placement){AR_PARTIAL_SUM, 0};
        const size_t n = ari_op_builder_mul(w, w->c->run.loss.label_smoothing > 0.0 ? 2 : 1, w->tokens);
        ari_op_builder_call(w, ARI_CALL_ALL_REDUCE, ARI_OVER_TP, n, AR_I32, ARI_EACH_PASS, ARI_NO_ROLE, "loss max");
        ari_op_builder_call(w, ARI_CALL_ALL_REDUCE, ARI_OVER_TP, n, AR_I64, ARI_EACH_PASS, ARI_NO_ROLE, "loss sum");
        ari_op_builder_call(w, ARI_CALL_ALL_REDUCE, ARI_OVER_TP, w->tokens, AR_I32, ARI_EACH_PASS, ARI_NO_ROLE,
                            "loss target");
    }
    ari_op_builder_make(w);
}

void ari_op_builder_loss_backward(ari_op_builder *w)
{
    ari_op_builder_take(w, ari_op_builder_forward_of(w, ARI_OPERATION_LOSS, ARI_LOSS)->in[0]);
    loss_of(w);
    ari_op_builder_make(w);
    if (w->form.head) {
        const ari_linear_ops head = head_of(w);
        ari_op_builder_linear_backward(w, &head, NULL, NULL);
    }
}

void ari_op_builder_side_by_side(ari_op_builder *w, size_t tokens, size_t entered)
{
    const size_t h = w->config->hidden;
    const bool backward = w->pass == ARI_PASS_BACKWARD;
    ari_operation *op = ari_op_builder_begin(w, ARI_OPERATION_JOIN, ARI_JOINED);
    ari_op_value one = ari_op_builder_activation(w, h, op->produced_as, 1),
                 both = ari_op_builder_activation(w, ari_op_builder_mul(w, 2, h), op->produced_as, 1);
    both.id = backward ? ari_op_builder_now(w) : 0;
    op->inputs = backward ? 1 : 2;
    op->outputs = backward ? 2 : 1;
    (backward ? op->output : op->input)[0] = (backward ? op->output : op->input)[1] = one;
    (backward ? op->input : op->output)[0] = both;
    if (!backward) {
        op->input[0].id = tokens;
        op->input[1].id = entered;
    }
    ari_op_builder_make(w);
}

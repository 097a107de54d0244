/* SPDX-License-Identifier: Apache-2.0 */
/* What is known besides the tensor that differs: the reference's other tensors, and the gradients that a norm is of. */
#include "tests/verify/pattern_support.h"

/* Two shards and two copies on four ranks: squares 16, 36, 9 and 4. */
enum { TP = 4, GRADIENTS = 4 };
static const double held[GRADIENTS][TP] = {{1, 2, 4, 9}, {16, 9, 8, 3}, {9, 9, 9, 9}, {4, 4, 4, 4}};
static const ari_gradient gradients[GRADIENTS] = {{"model.layers.0.mlp.up_proj.weight", 2, 16.0, held[0]},
                                                  {"model.layers.0.mlp.down_proj.weight", 2, 36.0, held[1]},
                                                  {"model.layers.0.input_layernorm.weight", 1, 9.0, held[2]},
                                                  {"model.norm.weight", 1, 4.0, held[3]}};

VALUE(right_norm, sqrt(65.0))
VALUE(norm_of, sqrt((double)w->by[0]))
VALUE(mean_of_norms, (sqrt(30.0) + sqrt(24.0) + sqrt(25.0) + sqrt(25.0)) / TP)
VALUE(sum_of_norms, sqrt(30.0) + sqrt(24.0) + sqrt(25.0) + sqrt(25.0))

#define GRAD_NORM "grad_norm", 'c', ONE_VALUE(TP)
#define NORMS OF(right_norm), KNOWN(RANKS(0, 0, TP), .gradient = gradients, .gradients = GRADIENTS)

static const trace of_norms[] = {
    {"a copy a rank", GRAD_NORM, norm_of, BY(65 + 3 * 9), CAUSE("norm_counts_twice"), NORMS,
     HINT("input_layernorm.weight (1 parameter) counted once per rank")},
    {"another copy a rank", GRAD_NORM, norm_of, BY(65 + 3 * 4), CAUSE("norm_counts_twice"), NORMS,
     HINT("model.norm.weight (1 parameter) counted once per rank")},
    {"a shard twice", GRAD_NORM, norm_of, BY(65 + 36), CAUSE("norm_counts_twice"), NORMS,
     HINT("down_proj.weight (1 parameter) counted once more")},
    {"no copies", GRAD_NORM, norm_of, BY(65 - 13), CAUSE("norm_leaves_out"), NORMS, HINT("(2 parameters)")},
    {"rank 0's shards", GRAD_NORM, norm_of, BY(1 + 16 + 13), CAUSE("norm_leaves_out"), NORMS,
     HINT("the shards of all ranks of their group but rank 0")},
    {"all shards but rank 1's", GRAD_NORM, norm_of, BY(65 - 2 - 9), CAUSE("norm_leaves_out"), NORMS,
     HINT("the shards of rank 1 of their group")},
    {"all of it of each rank", GRAD_NORM, norm_of, BY(2 * 65), CAUSE("norm_counts_twice"), OF(right_norm),
     HINT("as if all parameters counted once per rank"),
     KNOWN(RANKS(2, 0, TP / 2), .gradient = gradients, .gradients = GRADIENTS)},
    {"no root", GRAD_NORM, norm_of, BY(65 * 65), CAUSE("norm_not_rooted"), NORMS, HINT("its root")},
    {"the mean of the ranks' norms", GRAD_NORM, mean_of_norms, CAUSE("norm_mean_of_ranks"), NORMS,
     HINT("the mean over 4 ranks")},
    {"the sum of the ranks' norms", GRAD_NORM, sum_of_norms, CAUSE("norm_sum_of_ranks"), NORMS,
     HINT("the sum over 4 ranks")},
    {"the norm of one gradient", GRAD_NORM, norm_of, BY(36), CAUSE("clipped_each"), NORMS,
     HINT("that of model.layers.0.mlp.down_proj.weight (1 parameter)")},
    {"a norm in sixteen bits", GRAD_NORM, norm_of, BY(64), CAUSE("low_precision"), NORMS,
     HINT("a number of bf16: it is 8")},
    {"a norm of nothing", GRAD_NORM, norm_of, BY(71), CAUSE("unknown"), NORMS, HINT("no parameter")},
};

/* On two ranks what both have: keys', values' and norms' gradients, with squares of 16, 25, 9 and 4. */
static const double of_two[][2] = {{16, 16}, {25, 25}, {9, 9}, {4, 4}, {8, 12}};
static const ari_gradient with_keys[] = {{"model.layers.0.self_attn.k_proj.weight", 2, 16.0, of_two[0]},
                                         {"model.layers.0.self_attn.v_proj.weight", 2, 25.0, of_two[1]},
                                         {"model.layers.0.input_layernorm.weight", 1, 9.0, of_two[2]},
                                         {"model.norm.weight", 1, 4.0, of_two[3]},
                                         {"model.layers.0.mlp.up_proj.weight", 2, 20.0, of_two[4]}};

VALUE(norm_with_keys, sqrt(74.0))

#define KEYS "grad_norm", 'c', ONE_VALUE(2), norm_of
#define WITH_KEYS OF(norm_with_keys), KNOWN(RANKS(0, 0, 2), .gradient = with_keys, .gradients = 5)

static const trace of_kinds[] = {
    {"keys and values of both ranks", KEYS, BY(74 + 41), CAUSE("norm_counts_twice"), WITH_KEYS,
     HINT("self_attn.k_proj and model.layers.0.self_attn.v_proj, in all layers, counted once per rank")},
    {"neither keys nor values", KEYS, BY(74 - 41), CAUSE("norm_leaves_out"), WITH_KEYS, HINT("without model.layers.0")},
    {"keys, values and a norm of both ranks", KEYS, BY(74 + 45), CAUSE("norm_counts_twice"), WITH_KEYS,
     HINT("k_proj, model.layers.0.self_attn.v_proj and model.norm, in all")},
    {"a norm of no kinds", KEYS, BY(74 + 43), CAUSE("unknown"), WITH_KEYS},
};

VALUE(other, noise(i + 9000))
VALUE(without_other, x - noise(i + 9000))
VALUE(with_six_others, x + 6.0f * noise(i + 9000))
VALUE(centred, x - 0.3f - 0.05f * noise(row_of(w, i) + 9000))
VALUE(largest_part, fmaxf(noise(i + 9000), x - noise(i + 9000)))
VALUE(largest_of_some, i % 3 ? fmaxf(noise(i + 9000), x - noise(i + 9000)) : fmaxf(x, 0.0f))
VALUE(smallest_part, fminf(noise(i + 9000), x - noise(i + 9000)))
VALUE(dropped, i % 5 == 0 ? 0.0f : 1.25f * noise(i + 9000))
VALUE(dropped_without_scale, i % 5 == 0 ? 0.0f : noise(i + 9000))

VALUE(weight_before, 0.1f * noise(i + 50))
VALUE(gradient, 0.02f * noise(i + 7000))

/* The update of such a weight: SGD's, or Adam's first one with that epsilon, and a decay. */
static float moved(size_t i, double rate, double eps)
{
    const float before = 0.1f * noise(i + 50), g = 0.02f * noise(i + 7000);
    const double own = (double)g, decay = 1e-3 * 0.01 * (double)before;
    return (float)((double)before - (eps > 0.0 ? decay + rate * own / (fabs(own) + eps) : rate * own));
}

VALUE(by_sgd, moved(i, 0.1, 0.0))
VALUE(by_half, moved(i, 0.05, 0.0))
VALUE(by_adam, moved(i, 1e-3, 1e-8))
VALUE(by_adam_of_large_eps, moved(i, 1e-3, 1e-2))
VALUE(by_slower_adam, moved(i, 0.7e-3, 1e-8))
VALUE(by_adam_upwards, moved(i, -1e-3, 1e-8))

/* Each query's softmax of its scores times `scale`, of its last `window` keys. */
static float probability(size_t index, double scale, size_t window)
{
    const size_t key = index % 8, query = index / 8 % 8, row = index - key;
    double sum = 0.0;
    for (size_t k = 0; k <= query; k++)
        sum += k + window > query ? exp(scale * (double)noise(row + k)) : 0.0;
    return key <= query && key + window > query ? (float)(exp(scale * (double)noise(index)) / sum) : 0.0f;
}

VALUE(softmax, probability(i, 1.0, 8))
VALUE(softmax_of, probability(i, (double)w->by[0], (size_t)w->by[1]))

VALUE(loss, 5.6789f)
VALUE(loss_by_96, (double)x *(92.0 / 96.0))
VALUE(loss_by_71, (double)x *(92.0 / 71.0))
VALUE(loss_off, (double)x * 1.0123)
VALUE(last_off, i + 1 == w->count ? x + 0.25f : x)

#define GATE "model.layers.0.mlp.gate_proj"
#define DROPOUT "transformer.h.0.mlp.dropout"
#define PROBS "model.layers.0.self_attn.probs"
#define LAYER "model.layers.1"
#define NORM "model.norm.weight", 'n', WHOLE(2, 128)
#define UPDATED \
    BESIDE("model.norm.weight:new", "model.norm.weight:grad", gradient), .before = weight_before, KNOWN(.step = 1)

#define BLOCK(name) name, 'f', WHOLE(2, 2, 8, 16), other
#define ATTENTION PROBS, 'f', SHARDED(2, 1, 2, 4, 8, 8), softmax_of, OF(softmax), BESIDE(PROBS ":fwd", "other", NULL)
#define LOSS "loss", 'f', ONE_VALUE(2)
#define TOKENS OF(loss), KNOWN(.batch = 4, .seq = 24)

static const trace traces[] = {
    {"copies of ranks that are another module's", GATE, 'f', SHARDED(2, 2, 2, 8, 16), other, CAUSE("other_module"),
     BESIDE(GATE ":fwd", "model.layers.0.mlp.up_proj:fwd", other)},
    {"copies of ranks that lack another module's", GATE, 'f', SHARDED(2, 2, 2, 8, 16), without_other, CAUSE("residual"),
     BESIDE(GATE ":fwd", "model.layers.0.mlp.up_proj:fwd", other)},
    {"six times too much of another module's", GATE, 'f', WHOLE(2, 2, 8, 16), with_six_others, CAUSE("residual_scale"),
     BESIDE(GATE ":fwd", "model.layers.0.mlp.up_proj:fwd", other)},
    {"gradients whose rows are centred", LAYER ".mlp.up_proj.weight", 'g', WHOLE(2, 8, 16), centred,
     CAUSE("vector_added"), HINT("one number in each of the 8 rows"), AMONG(LAYER ".mlp.up_proj.weight:grad")},
    {"the largest part for the sum", LAYER ".mlp.down_proj", 'f', WHOLE(2, 2, 8, 16), largest_part,
     CAUSE("reduction_operator"), HINT("the largest of 2 ranks' parts", "by MAX"), NEAR(0, 7, -4, "unknown")},
    {"the largest part where some have one alone", LAYER ".mlp", 'f', WHOLE(2, 2, 8, 16), largest_of_some,
     CAUSE("reduction_operator")},
    {"the smallest part for the sum", LAYER ".mlp.up_proj.weight", 'g', WHOLE(2, 8, 16), smallest_part,
     CAUSE("reduction_operator"), HINT("by MIN")},
    {"a layer's gradient without its residual", LAYER, 'b', WHOLE(2, 2, 8, 16), other, CAUSE("residual"),
     BESIDE(LAYER ":bwd", LAYER ".input_layernorm:bwd", other)},
    {"a layer's output without its residual", BLOCK(LAYER), CAUSE("residual"),
     BESIDE(LAYER ":fwd", LAYER ".mlp.down_proj:fwd", other)},
    {"a layer's output that is its attention's", BLOCK(LAYER), CAUSE("other_module"),
     BESIDE(LAYER ":fwd", LAYER ".self_attn.o_proj:fwd", other)},
    {"a module's output that is one of its parts'", BLOCK(LAYER ".self_attn.q_proj"), CAUSE("residual"),
     HINT("a part of this module alone"),
     BESIDE(LAYER ".self_attn.q_proj:fwd", LAYER ".self_attn.q_proj.base_layer:fwd", other)},
    {"a layer's output that is another layer's", BLOCK(LAYER), CAUSE("other_tensor"),
     BESIDE(LAYER ":fwd", "model.layers.0.mlp.down_proj:fwd", other)},
    {"the value of the step before", BLOCK(LAYER ".mlp"), CAUSE("stale_value"),
     BESIDE(LAYER ".mlp:fwd@2", LAYER ".mlp:fwd", other)},
    {"the value of the other pass", BLOCK(LAYER ".mlp"), CAUSE("other_point_of_step"),
     BESIDE(LAYER ".mlp:fwd", LAYER ".mlp:bwd", other)},
    {"values before dropout at zeros of both", DROPOUT, 'f', WHOLE(2, 2, 8, 16), dropped_without_scale, OF(dropped),
     CAUSE("dropout_without_scale"), BESIDE(DROPOUT ":fwd", "transformer.h.0.mlp.c_proj:fwd", other)},
    {"values before dropout", BLOCK(DROPOUT), OF(dropped), CAUSE("other_module"),
     BESIDE(DROPOUT ":fwd", "transformer.h.0.mlp.c_proj:fwd", other)},
    {"SGD by half its rate", NORM, by_half, OF(by_sgd), CAUSE("update_scaled"), UPDATED},
    {"Adam of a larger epsilon", NORM, by_adam_of_large_eps, OF(by_adam), CAUSE("adam_eps"), UPDATED},
    {"Adam of a smaller epsilon", NORM, by_adam, OF(by_adam_of_large_eps), CAUSE("adam_eps"), UPDATED},
    {"Adam of another rate", NORM, by_slower_adam, OF(by_adam), CAUSE("update_scaled"), UPDATED},
    {"Adam upwards", NORM, by_adam_upwards, OF(by_adam), CAUSE("update_sign"), UPDATED},
    {"half the scale", ATTENTION, BY(0.5f, 8), CAUSE("softmax_scale")},
    {"three times the scale", ATTENTION, BY(3, 8), CAUSE("softmax_scale")},
    {"a window of four keys", ATTENTION, BY(1, 4), CAUSE("attention_window")},
    {"a loss over all tokens", LOSS, loss_by_96, TOKENS, CAUSE("divisor_of_other_count")},
    {"a loss over fewer tokens", LOSS, loss_by_71, TOKENS, CAUSE("divisor_of_other_count")},
    {"a loss over no number of tokens", LOSS, loss_off, TOKENS, CAUSE("target_logit")},
    {"the last element alone is not an id of nobody", "model.embed_tokens.weight", 'n', WHOLE(2, 33, 16), last_off,
     CAUSE("few_elements"), BESIDE("model.embed_tokens.weight:new", "other", NULL)},
};

Test(pattern_known, every_trace_is_named)
{
    EXPECT_TRACES(of_norms);
    EXPECT_TRACES(of_kinds);
    EXPECT_TRACES(traces);
}

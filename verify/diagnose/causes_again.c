/* SPDX-License-Identifier: Apache-2.0 */
/* Causes of modules that were computed again with one fault. */
#define ARI_CAUSE_ROWS
#include "verify/diagnose/case.h"

#define ZERO "each zero where the reference is not"
#define AGAIN                                                                                                   \
    "computed again from the reference's inputs and weights, these values come out (but for {left:.1e} of the " \
    "difference's squares) with "
#define SUM "a sum of the reference's tensors: {wanted} in the reference, {other} here: "

static const ari_cause rows[] = {
    SECTION("A module computed again"),
    {"keys_masked", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(CUT) | IF(PADDED) | IF(ZERO), 0, "",
     AGAIN "{padding:.0f} keys at the end of a sample seen, which the reference masks: padding is attended to"},
    {"keys_masked", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(CUT) | IF(PADDED), 0, "",
     AGAIN "the last {padding:.0f} keys masked, {was:.0f} in the reference: a padding mask of another side or batch"},
    {"softmax_scale", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(ROOT) | IF(LOG), 0, "",
     "in each row the logarithms of the probabilities are {times:.4g} times as far apart: another scale before the "
     "softmax (1/sqrt(d) of one head's size d is the wanted one)" LOOK
     "`scale` of `scaled_dot_product_attention`, the local head count in it"},
    {"attention_window", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(CUT) | IF(LOG), 0, "",
     "no query sees more than {window:.0f} keys, up to itself: sliding_window on one side alone" LOOK
     "`sliding_window`"},
    {"alibi_slopes", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(FEATURES) | IF(ZERO), 0, "",
     AGAIN "no ALiBi bias" LOOK
           "slopes for the model's own number of heads, cut by the rank's first head; `alibi` in a kernel"},
    {"alibi_slopes", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(FEATURES) | IF(NEGATIVE), 0, "",
     AGAIN "ALiBi's bias of the other sign, which grows with the distance"},
    {"alibi_slopes", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(FEATURES) | IF(OF_TP), 0, "",
     AGAIN "ALiBi's slopes of the first heads on each of {now:.0f} shards of heads (tensor parallelism)"},
    {"alibi_slopes", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(FEATURES) | IF(ALL), 0, "",
     AGAIN "ALiBi's slopes of the other series for a number of heads that is no power of 2: one series, or two"},
    {"alibi_slopes", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(FEATURES) | IF(COUNT), 0, "",
     AGAIN "ALiBi's slopes of {now:.0f} heads in place of {was:.0f}"},
    {"alibi_slopes", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(FEATURES), 0, "",
     AGAIN "ALiBi's slopes times {times:.4g}"},
    {"softcap", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(CUT) | IF(ROOT) | IF(ZERO), 0, "",
     AGAIN "the scores not capped: attn_logit_softcapping, which some kernels do not have" LOOK
           "`attn_logit_softcapping`, `final_logit_softcapping`; kernels that have no cap"},
    {"softcap", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(CUT) | IF(ROOT), 0, "",
     AGAIN "scores capped at {factor:.4g}: attn_logit_softcapping"},
    {"softmax_scale", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(ROOT), 0, "",
     AGAIN "scores times {times:.4g}: another scale before the softmax (1/sqrt(d) of one head's size d is the wanted "
           "one)"},
    {"rope_theta", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(OF_THETA) | IF(FRACTION), 0, "",
     AGAIN "RoPE's frequencies divided by {factor:.4g}: rope_scaling on one side, or positions interpolated"},
    {"rope_theta", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(OF_THETA), 0, "", AGAIN "a rope_theta of {factor:.7g}"},
    {"dropout", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(FRACTION), 0, "",
     "each of attention's weights counts not at all or {factor:.4g} times: dropout of {rate:.3g} on one side alone"},
    {"dropout", K(NORM_AGAIN), ARI_IDENTITY + 6, ANY, 0, IF(FRACTION), 0, "",
     "each wrong row is a norm of the reference's two terms, of which each feature of {what} counts not at all or "
     "{factor:.4g} times: dropout of {rate:.3g} on one side alone"},
    {"sinks_missing", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(SOME) | IF(ZERO), 0, "",
     AGAIN "attention's sinks, a score of each head that has no value, left out of the softmax on one side" LOOK
           "`sinks` in an attention kernel that does not know them"},
    {"rope_missing", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(ZERO) | IF(ALL), 0, "",
     AGAIN "RoPE of base {factor:.7g}, where the reference has none: a layer without positions" LOOK
           "`no_rope_layers`; layers without a window that have no positions"},
    {"heads_missing", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(TWICE) | IF(ZERO), 0, "",
     AGAIN "zeros in place of what some heads give"},
    {"heads_scaled", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(TWICE), 0, "",
     AGAIN "what some heads give times {now:.4g}"},
    {"rope_missing", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(ZERO), 0, "",
     AGAIN "RoPE left out on q, on k or on both"},
    {"rope_direction", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(NEGATIVE), 0, "",
     AGAIN "RoPE turning the wrong way round (the sign of the sine)"},
    {"rope_on_values", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(PAIRS) | IF(ALL), 0, "",
     AGAIN "RoPE also on v, which has no positions" LOOK "`apply_rotary_pos_emb` on q and k alone"},
    {"rope_width", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(PAIRS) | IF(COUNT), 0, "",
     AGAIN "RoPE turning {now:.0f} features of a head, and not {was:.0f} (rotary_dim, partial_rotary_factor)" LOOK
           "`rotary_dim`, `partial_rotary_factor`, `rotary_pct`"},
    {"rope_width", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(PAIRS) | IF(LAST), 0, "",
     AGAIN "RoPE turning the other end of each head: its last features in place of the first, or the other way round"},
    {"rope_pairing", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(PAIRS), 0, "",
     AGAIN "RoPE's pairs the other way: neighbours against halves (interleaved against rotate_half)"},
    {"rope_offset", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(SHIFT) | IF(ONE), 0, "",
     AGAIN "q at positions {shift:.0f} further on than k for RoPE" LOOK
           "the position of the first token, which q and k share (`position_ids`, a cache's length, a rank's offset)"},
    {"rope_restarts", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(SHIFT) | IF(OF_CP), 0, "",
     AGAIN "positions that each of {ring} ranks counts from 0 among its own tokens, a zigzag's chunks (context "
           "parallelism)"},
    {"rope_restarts", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(SHIFT), 0, "",
     AGAIN "positions that start again at every {first:.0f} tokens: each chunk, shard or document counts its own"},
    {"mask_after_softmax", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(CAUSAL) | IF(ROWS), 0, "",
     AGAIN "the causal mask after the softmax, whose denominator then counts the unseen keys too" LOOK
           "a mask of -inf that is added to the scores, not one that multiplies the probabilities"},
    {"mask_inverted", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(CAUSAL) | IF(EXCHANGED), 0, "",
     AGAIN "the mask read the other way: each token sees the keys that are hidden from it in the reference, and those "
           "alone" LOOK "whether true in `attn_mask` means attended (PyTorch) or masked (Megatron, TransformerEngine)"},
    {"causal_mask", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(CAUSAL) | IF(SAME) | IF(CUT), 0, "",
     AGAIN "scores capped at some {factor:.3g} after the mask, so that unseen keys have the least score of all, and "
           "weight"},
    {"causal_mask", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(CAUSAL) | IF(SAME), 0, "",
     AGAIN "scores of unseen keys set to 0, and not to -inf, so that the softmax gives them weight"},
    {"keys_masked", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(CUT) | IF(OF_CP) | IF(LAST), 0, "",
     AGAIN "the keys of the farthest of {ring} ranks unseen: a ring that makes one hop too few (ring attention)"},
    {"attention_across_documents", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(CUT) | IF(SAMPLES) | IF(ALL), 0, "",
     AGAIN "no boundaries between the documents that share a row in the reference" LOOK
           "`cu_seqlens`, `position_ids` of packed samples"},
    {"document_boundaries", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(CUT) | IF(SAMPLES) | IF(OF_CP), 0, "",
     AGAIN
     "the documents of the tokens of one of {ring} parts repeated for those of all parts (Ulysses' attention over "
     "all tokens)"},
    {"document_boundaries", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(CUT) | IF(SAMPLES) | IF(ROWS), 0, "",
     AGAIN "documents that begin elsewhere than in the reference" LOOK
           "`cu_seqlens`, `position_ids` of packed samples"},
    {"slices_reordered", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(HEADS) | IF(OF_CP), 0, "",
     AGAIN "the heads of {now:.0f} parts of the output dealt out in turn, where they follow part after part (Ulysses' "
           "second exchange)"},
    {"causal_mask", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(CAUSAL) | IF(OF_CP) | IF(TOKENS), 0, "",
     AGAIN "a causal mask that compares places in a zigzag of {ring} as if they were positions (context parallelism)"},
    {"causal_mask_missing", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(CAUSAL) | IF(OF_CP), 0, "",
     AGAIN "a causal mask among the tokens of each of {ring} ranks alone: all keys of the others are seen (ring "
           "attention)"},
    {"softmax_of_own_keys", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(OF_CP) | IF(AVERAGE), 0, "",
     AGAIN "a softmax of the keys of each of {ring} ranks alone, and the mean of what they give: partial outputs have "
           "to be weighted by their sums of exponentials (ring attention)"},
    {"softmax_of_own_keys", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(OF_CP) | IF(POWER), 0, "",
     AGAIN "the partial outputs of {ring} ranks weighted by powers of 2 of their logarithmic sums, which are natural "
           "logarithms (ring attention)" LOOK "`exp2` and `log2` beside `exp` and `logsumexp` in a kernel"},
    {"ring_own_keys", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(OF_CP) | IF(SAME), 0, "",
     AGAIN "the values of the own rank, of {ring}, weighted by other ranks' keys: keys go round the ring and values do "
           "not" LOOK "what is sent round: k and v together"},
    {"zigzag_positions", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(OF_CP) | IF(TOKENS), 0, "",
     AGAIN "RoPE turning by places in a zigzag of {ring} as if they were positions (context parallelism)"},
    {"attention_window", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(CUT) | IF(OF_CP), 0, "",
     AGAIN "the window among the tokens of each of {ring} ranks alone: other ranks' keys are all seen "
           "(ring attention)"},
    {"causal_mask", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(CAUSAL) | IF(ONE), 0, "",
     AGAIN "a causal mask that is off by one: each token sees the next one (tril and triu's diagonal)" LOOK
           "`tril(1)` for `tril()`, `triu(diagonal)`"},
    {"causal_mask", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(CAUSAL) | IF(LAST), 0, "",
     AGAIN "a causal mask that is off by one: no token sees itself (tril and triu's diagonal)"},
    {"causal_mask", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(CAUSAL) | IF(ALL), 0, "",
     AGAIN "a causal mask, where the reference has none"},
    {"causal_mask_missing", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(CAUSAL), 0, "",
     AGAIN "no causal mask: each token sees all of its sample"},
    {"keys_masked", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(CUT) | IF(LAST) | IF(SOME), 0, "",
     AGAIN "{window:.0f} keys masked from token {from:.0f} on: a padding mask of another side or batch"},
    {"keys_masked", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(CUT) | IF(LAST), 0, "",
     AGAIN "the first {window:.0f} keys masked: a padding mask of another side or batch"},
    {"attention_across_documents", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(CUT) | IF(SAMPLES), 0, "",
     AGAIN "a document that begins at token {first:.0f} on one side alone: packed samples need a mask of their own "
           "each (cu_seqlens)" LOOK "`cu_seqlens`, `position_ids` of packed samples"},
    {"attention_window", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(CUT) | IF(COUNT), 0, "",
     AGAIN "a window of {now:.0f} tokens in place of {was:.0f}"},
    {"attention_window", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(CUT), 0, "",
     AGAIN "a window of {window:.0f} tokens: sliding_window on one side alone"},
    {"wrong_kv_head", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(HEADS), 0, "",
     AGAIN "query heads dealt out to the KV heads in turn: repeat against repeat_interleave"},
    {"slices_reordered", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(PACKED) | IF(ONE), 0, "",
     AGAIN "a packed tensor cut as k, v, q, which the reference has as q, k, v"},
    {"heads_and_tokens_exchanged", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(PACKED) | IF(ROWS), 0, "",
     AGAIN "attention's output flattened as [heads, tokens, d]: heads and tokens are not transposed back"},
    {"dimension_flattened", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(PACKED), 0, "",
     AGAIN "features split into heads the other way round: [heads, d] against [d, heads], or of a packed tensor q|k|v "
           "against [heads, 3, d]"},
    {"other_module", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(EXCHANGED), 0, "", AGAIN "q and k exchanged"},
    {"softmax_axis", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(INVERSE) | IF(ALL), 0, "",
     AGAIN "a softmax over the queries of each key: the wrong dimension" LOOK
           "`softmax(dim=...)`, the order of dimensions of the scores"},
    {"reversed", K(ATTENTION), ARI_IDENTITY + 6, ANY, 0, IF(INVERSE), 0, "", AGAIN "the heads in reverse order"},
    ALWAYS(K(ATTENTION), ANY, IF(BLOCKS), 0, "; in head {head} of {heads} alone"),
    ALWAYS(K(ATTENTION), ANY, IF(OF_SHARDS), 0, "; in heads {head} to {last} of {heads} alone, those of one rank"),
    {"tokens_pooled", K(POOLED), ARI_IDENTITY + 6, ANY, 0, 0, 0, "",
     "pooled of other tokens: {other} of {of}, where the reference has {wanted}" LOOK
     "the mask of padding in a mean over tokens"},
    {"norm_epsilon", K(NORM_AGAIN), ARI_IDENTITY + 6, ANY, 0, IF(ROWS), 0, "",
     "each wrong row is what the norm of the reference's input gives with an epsilon of {epsilon:.3g}: another eps" LOOK
     "`eps`, `rms_norm_eps`"},
    {"norm_statistic_detached", K(NORM_AGAIN), ARI_IDENTITY + 6, ANY, 0, IF(OF_GRADIENT), 0, "",
     "a norm's backward pass without the part through its statistic: what differs is along the normalised values in "
     "every row, of which the reference has no part (a detached variance, or one that is computed under no_grad)" LOOK
     "`detach`, `torch.no_grad` around the variance; a backward pass written by hand"},
    {"norm_statistic", K(NORM_AGAIN), ARI_IDENTITY + 6, ANY, 0, IF(ROOT) | IF(OF_SHARDS), IF(LONE), "",
     "each wrong row is the norm of the reference's input with its squares divided by {features:.4g} in place of "
     "{lanes}: the width of one rank's shard, or of all shards together"},
    {"norm_statistic", K(NORM_AGAIN), ARI_IDENTITY + 6, ANY, 0, IF(ROOT), IF(OF_SHARDS), "",
     "each wrong row is the norm of the reference's input with squares divided by {lanes} - 1 in place of {lanes}: the "
     "standard deviation of samples (torch.std, whose correction is 1) in place of the root of the mean square"},
    {"norm_mean", K(NORM_AGAIN), ARI_IDENTITY + 6, ANY, 0, IF(SHIFT) | IF(ZERO), 0, "",
     "each wrong row is a norm of the reference's input whose mean is not subtracted: RMSNorm in place of LayerNorm"},
    {"norm_mean", K(NORM_AGAIN), ARI_IDENTITY + 6, ANY, 0, IF(SHIFT), 0, "",
     "each wrong row is the reference's with its mean subtracted before the weight: LayerNorm in place of RMSNorm"},
    {"gain_offset", K(NORM_AGAIN), ARI_IDENTITY + 6, ANY, 0, IF(ONE), 0, "",
     "the norm's weight counts as 1 + weight on one side alone (Gemma, zero-centered gamma in Megatron), or the 1 is "
     "added there twice" LOOK "Gemma; Megatron: `layernorm_zero_centered_gamma`"},
    {"fewer_bits", K(NORM_AGAIN), ARI_IDENTITY + 6, ANY, 0, IF(CUT), 0, "",
     "each wrong row is the norm of the reference's input with its gain rounded to bf16"},
    {"norm_missing", K(NORM_AGAIN), ARI_IDENTITY + 6, ANY, 0, IF(ALL), 0, "",
     "each wrong row is what the norm reads in the reference: the norm is left out"},
    {"residual", K(NORM_AGAIN), ARI_IDENTITY + 6, ANY, 0, IF(OF_INPUT), IF(SOME), "",
     "each wrong row is the norm of {branch} alone, to which the other terms of its input are added afterwards: the "
     "norm of the branch in place of that of the sum"},
    {"residual", K(NORM_AGAIN), ARI_IDENTITY + 6, ANY, 0, IF(OF_INPUT) | IF(OF_MODULE), 0, "",
     "each wrong row is the norm of {other}, as this run has them, where the reference reads {wanted}: a norm in "
     "another place, before or after the residual sum (pre-norm, post-norm)"},
    {"other_input", K(NORM_AGAIN), ARI_IDENTITY + 6, ANY, 0, IF(OF_INPUT) | IF(FOREIGN), 0, "",
     "each wrong row is the norm of another input: {other}, where the reference reads {wanted}"},
    {"embedding_scale", K(NORM_AGAIN), ARI_IDENTITY + 6, ANY, 0, IF(OF_INPUT) | IF(POWER) | IF(TOKENS), 0, "",
     "each wrong row is a norm of the reference's terms in another mixture, {other} in place of {wanted}, and a later "
     "sum of them says that the embedding alone is multiplied by another number" LOOK
     "`embedding_multiplier`, sqrt(hidden_size) of Gemma"},
    {"residual_scale", K(NORM_AGAIN), ARI_IDENTITY + 6, ANY, 0, IF(OF_INPUT) | IF(POWER), 0, "",
     "each wrong row is a norm of the reference's terms in another mixture, {other} in place of {wanted}: the factor "
     "of the residual's branch or of the stream" LOOK "`residual_multiplier`, DeepNorm's alpha, the depth's scale"},
    {"residual", K(NORM_AGAIN), ARI_IDENTITY + 6, ANY, 0, IF(OF_INPUT), 0, "",
     "each wrong row is a norm of the reference's terms in another mixture, {other} in place of {wanted} (the residual "
     "connection)"},
    {"gain_twice_or_missing", K(NORM_AGAIN), ARI_IDENTITY + 6, ANY, 0, 0, 0, "",
     "the norm's weight is left out: these are the normalised rows without it"},
    {"batch_again", K(POSITIONS), ARI_IDENTITY + 9, "f", 0, IF(OF_STEP), 0, "",
     "the ids of step {of_step} at step {step}: its batch again (data read from the start, an iterator or a sampler that "
     "begins anew, a buffer that was not refilled)" LOOK
     "the data loader's state in the checkpoint; `set_epoch`; `iter(loader)` within a loop"},
    {"ids_off_by_one", K(POSITIONS), ARI_IDENTITY + 6, ANY, 0, IF(IDS), IF(BLOCKS), "",
     "ids: every wrong row is the table's {by:.0f} rows on from the reference's (a special token counted or not, the "
     "start of a vocabulary's shard)"},
    {"position_offset", K(POSITIONS), ARI_IDENTITY + 6, ANY, 0, IF(SHIFT), IF(PAIRS), "",
     "positions: every wrong row is the table's {by:.0f} rows on from the reference's (a cache's length, padding, a "
     "start at 1)"},
    {"positions", K(POSITIONS), ARI_IDENTITY + 6, ANY, 0, IF(SOME), IF(PAIRS), "",
     "positions: the table's rows from 0 on again at position {first}: each chunk, shard or document counts its own"},
    {"embedding_mask", K(POSITIONS), ARI_IDENTITY + 6, ANY, 0, IF(OF_SHARDS), 0, "",
     "the reference's row plus one row of each other shard of the table, of {shards}: what ranks look up for ids that "
     "they do not own is not set to zero before the sum" LOOK
     "the mask of ids outside the rank's vocabulary range; Megatron: `VocabParallelEmbedding`"},
    {"rope_theta", K(POSITIONS), ARI_IDENTITY + 6, ANY, 0, IF(OF_THETA) | IF(FRACTION), 0, "",
     "cosines of the right positions times other frequencies, the fastest divided by {factor:.4g}{scale}: "
     "rope_scaling on one side alone"},
    {"rope_theta", K(POSITIONS), ARI_IDENTITY + 6, ANY, 0, IF(OF_THETA), 0, "",
     "cosines of the right positions times other frequencies, the fastest pair's alone the same{scale}: another "
     "rope_theta, or a scaling of the slow pairs"},
    {"rope_restarts", K(POSITIONS), ARI_IDENTITY + 6, ANY, 0, IF(SOME), 0, "",
     "the cosines of positions from 0 on again at position {first}: each chunk, shard or document counts its own"},
    {"rope_offset", K(POSITIONS), ARI_IDENTITY + 6, ANY, 0, IF(SHIFT), 0, "",
     "from position {first} on the cosines of positions {by:.0f} on: an offset of the positions (a cache's length, "
     "padding, a start at 1)"},
    {"softcap", K(CURVE), ARI_IDENTITY + 9, ANY, 0, IF(CUT) | IF(ZERO), 0, "",
     "a soft cap left out: this is {number:.4g} times {of}, in the reference a tanh with a cap of {wanted:.4g}"},
    {"softcap", K(CURVE), ARI_IDENTITY + 9, ANY, 0, IF(CUT), 0, "",
     "a soft cap of {number:.4g}: cap tanh(x/cap) of {of}, where the reference has {wanted:.4g}"},
    {"logits_scale", K(CURVE), ARI_IDENTITY + 9, ANY, 0, 0, 0, "",
     "this is {number:.6g} times {of}, in the reference {wanted:.6g} times: the scale of the logits is left out, "
     "another one, or a divisor taken for a factor" LOOK "`logits_scaling`, `logit_scale`"},
    {"norm_missing", K(LINEAR), ARI_IDENTITY + 6, ANY, 0, IF(ZERO), 0, "",
     AGAIN "{other} as its input, where the reference reads {wanted}: the norm is left out"},
    {"embedding_scale", K(LINEAR), ARI_IDENTITY + 6, ANY, 0, IF(OF_INPUT) | IF(POWER) | IF(TOKENS), 0, "",
     SUM "the embedding's output is multiplied by another number"},
    {"residual_scale", K(LINEAR), ARI_IDENTITY + 6, ANY, 0, IF(OF_INPUT) | IF(POWER), 0, "",
     SUM "a term has another factor"},
    {"residual", K(LINEAR), ARI_IDENTITY + 6, ANY, 0, IF(OF_INPUT), 0, "", SUM "other terms are added"},
    {"other_input", K(LINEAR), ARI_IDENTITY + 6, ANY, 0, 0, 0, "",
     AGAIN "{other} as its input, where the reference reads {wanted}"},
    {"activation_arguments", K(ACTIVATION), ARI_IDENTITY + 6, ANY, 0, IF(EXCHANGED), 0, "",
     AGAIN "gate and up exchanged: {function} of up times gate, where the reference has {wanted} of gate times up" LOOK
           "the order of gate|up in a packed weight; `chunk` before the function"},
    {"activation_function", K(ACTIVATION), ARI_IDENTITY + 6, ANY, 0, 0, 0, "",
     AGAIN "{function}, where the reference has {wanted}" LOOK
           "`hidden_act`, gelu's tanh form; Megatron: `activation_func`"},
};

ARI_CAUSES(again)

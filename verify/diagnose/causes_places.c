/* SPDX-License-Identifier: Apache-2.0 */
/* Causes of copies that differ, zeros, values in another place or of another tensor, rows, and places. */
#define ARI_CAUSE_ROWS
#include "verify/diagnose/case.h"

#define ZERO "each zero where the reference is not"
#define TAIL "{of}: {each} has only the first {cut} of its {extent} {axes} right{by_heads}, the rest is {rest}"
#define MASK                                                                                                     \
    "another mask: {zero} values are zero where the reference is not, {gained} the other way round, all others " \
    "are right; "
#define MASK_LOOKS "zeros in other places"
#define MOVED "the reference's values in another place"
#define SLICES "{within}; {units} of the reference, {exact}"
#define DEALT "interleaved: {p} runs of {q} are dealt out in turn; "
#define TRANSPOSED "transposed: the data is the reference's with its dimensions in the order {order}{shape}; {exact}; "
#define OTHER_LOOKS "each another tensor's value"
#define OTHER "these are the values of {other} in the reference: all {different} different elements, {exact}"
#define STATISTIC                                                                                                     \
    "a norm's statistics: each wrong row is stretched, by {low:.4g} to {high:.4g}, and perhaps moved, but otherwise " \
    "unchanged: mean and variance (or mean square) are not the row's"
#define TURNED "pairs of features turned"
#define ROPE                                                                                                        \
    "RoPE: each pair of features ({pairing}) keeps its length and is turned by an angle of its position, the same " \
    "for all heads and samples that differ: "

static const ari_cause rows[] = {
    SECTION("Copies that should be equal"),
    {"collective_without_backward", K(OWN_BLOCK), ARI_IDENTITY + 4, "b", 0, IF(TOKENS), IF(LONE), "zero",
     "each of {tp} tensor-parallel ranks has the gradient of its own positions alone, and zeros elsewhere: the forward "
     "pass scattered a sum over the sequence, and the backward pass gathers nothing, as if the collective had no "
     "derivative (sequence parallelism)" LOOK
     "`torch.distributed.reduce_scatter_tensor` in the forward pass where autograd needs "
     "`torch.distributed.nn.functional` or a `Function` of one's own"},
    {"missing_all_gather", K(OWN_BLOCK), ARI_IDENTITY + 4, ANY, 0, IF(TOKENS), IF(LONE), "zero",
     "each of {tp} tensor-parallel ranks has its own positions alone, and zeros elsewhere: looks like a missing "
     "all-gather along the sequence (sequence parallelism)" LOOK
     "`all_gather_into_tensor`, DTensor `redistribute`; Megatron: `gather_from_..._region`"},
    {"missing_all_reduce", K(SUM), ARI_IDENTITY + 2, "g", ARI_IS_EXPERT, IF(ONE), IF(LONE), "",
     "looks like a missing all-reduce over {over}: {who} the value, the others with copies of this expert had no "
     "tokens for it, and zeros; gradients of experts are added over the ranks with copies (edp)"},
    {"missing_broadcast", K(SUM), ARI_IDENTITY + 2, ANY, 0, IF(ONE), IF(LONE), "",
     "looks like a missing broadcast or all-reduce over {over}: {who} the value, the others hold zeros where the "
     "reference does not" LOOK "`dist.broadcast` of initial weights; `sync_module_states`"},
    {"missing_all_reduce", K(SUM), ARI_IDENTITY + 2, ANY, 0, IF(ROWS), IF(LONE), "",
     "looks like a missing all-reduce over {over}: the values of {holders} add up to the reference but for one vector, "
     "the same in each of the {row_count} {rows}: a bias that every rank added to its part"},
    {"missing_all_reduce", K(SUM), ARI_IDENTITY + 2, "b", 0, IF(SOME), IF(LONE), "",
     "looks like a missing all-reduce over {over} of a part of this gradient: of {holders} each has all of {parts}, "
     "and of the rest, which they share out, its own alone: without the former they add up to the reference" LOOK
     "the input of what ranks share out (columns, experts): a copy forward, a sum backward"},
    {"missing_all_reduce", K(SUM), ARI_IDENTITY + 2, ANY, 0, 0, IF(LONE), "",
     "looks like a missing all-reduce over {over}: the values of {holders} add up to the reference (largest difference "
     "{worst:.1e} of its largest value), {who} it"},
    ALSO("b", 0, 0,
         "; the input gradient of a column-parallel layer, or of a head held by several ranks, is partial "
         "until it is reduced"),
    ALSO("f", 0, 0,
         "; a row-parallel output is partial until it is reduced (where a program does so outside the module, "
         "\"partial\" in the capture's spec says so)"),
    ALSO(
        "g", IF(OF_CP), 0,
        "; each context-parallel rank saw its own positions: gradients are added over {data} and cp before the update"),
    ALSO("g", IF(OF_DP), IF(OF_CP),
         "; each data-parallel rank saw its own samples: gradients are added over {data} before the update"),
    {NULL, K(NOTHING), 0, "g", ARI_IS_EXPERT, 0, 0, "",
     "; of an expert: its copies may be on fewer ranks than those of the rest, and its gradient is added over these "
     "(edp)"},
    ALSO("g", IF(OF_DP) | IF(LATER), 0, "; in the step before they were: what said so then was not reset"),
    ALSO("g", IF(SP), IF(OF_DP) | IF(OF_CP),
         "; a replicated parameter of which each rank saw its own positions only (sequence "
         "parallelism): its gradient is spread over the ranks and must be added over tp"),
    ALSO(
        "g", IF(STAGES), 0,
        "; a tied weight has a copy on the first stage of a pipeline and one on the last: the embedding's gradient and "
        "the head's are added over both"),
    ALSO("g", 0, IF(OF_DP) | IF(OF_CP) | IF(SP) | IF(STAGES),
         "; a replicated parameter whose ranks saw different tokens or heads needs its gradients added"),
    {"wrong_group", K(GROUP), ARI_IDENTITY + 5, ANY, 0, 0, IF(LONE) | IF(SAME), "",
     "summed over the wrong group: ranks that hold different parts have equal bits (ranks {groups}), and these groups' "
     "values add up to all parts of the reference; the group must be of the ranks that share a part" LOOK
     "the ranks of `new_group`, the dimension of a `DeviceMesh`; ranks that share a KV head"},
    {"missing_average", K(MEAN), ARI_IDENTITY + 1, ANY, 0, 0, IF(LONE), "",
     "looks like a missing all-reduce that takes the mean over {over}: the mean of the ranks' values is the reference "
     "(largest difference {worst:.1e} of its largest value), and each rank kept its own" LOOK
     "the all-reduce that takes the mean did not run: DDP's and FSDP's hooks (`no_sync`, `set_requires_gradient_sync`, "
     "the module inside called, a parameter without gradient), `ReduceOp.AVG`"},
    ALSO("g", 0, 0,
         "; under DDP and FSDP it did not run: no_sync, the module inside called, a parameter that gets no gradient "
         "(detached, frozen, not used), for which DDP waits"),
    {"missing_all_reduce", K(OWN_BLOCK), ARI_IDENTITY + 5, "g", 0, IF(ZERO), IF(LONE), "",
     "a missing all-reduce of a gradient: every rank has its own 1/{n} of the {axis} right and zeros elsewhere, as of a "
     "parameter that all hold and of which each uses a part (of own heads, own ids): the ranks' sum is the gradient"},
    {"missing_all_gather", K(OWN_BLOCK), ARI_IDENTITY + 5, ANY, 0, IF(ZERO), IF(LONE), "",
     "a missing all-gather along {axis}: every rank has its own 1/{n} of them right and zeros elsewhere"},
    {"missing_all_gather", K(OWN_BLOCK), ARI_TRACE + 5, ANY, 0, 0, IF(LONE), "",
     "a missing all-gather along {axis}: every rank has its own 1/{n} of them right and is wrong elsewhere: "
     "the other ranks' parts never arrived"},
    ALWAYS(K(OWN_BLOCK), "b", 0, IF(TOKENS),
           "; a layer that slices a replicated input must gather that input's gradient"),
    {"missing_all_reduce", K(OWN_PART), ARI_SHAPE - 9, ANY, 0, IF(AVERAGE), IF(LONE), "",
     "looks like a missing all-reduce (mean) over {mesh} on {wrong} alone: {right} has the reference, and there a "
     "gradient points its way with what one of {dp} ranks' samples leave of a mean (cosine {angle:.2f}): its own "
     "gradient was kept"},
    {"missing_all_reduce", K(OWN_PART), ARI_SHAPE - 9, ANY, 0, 0, IF(LONE), "",
     "looks like a missing all-reduce over {mesh} on {wrong} alone: {right} has the reference, and there a part of the "
     "sum is left, {share:.3g} of it (cosine {angle:.2f}), unrelated to what is missing: its own gradient was kept"},
    {"replicas_apart", K(RANKS_WRONG), ARI_SHAPE - 10, ANY, 0, IF(APART), IF(LONE), "",
     "replicas apart: the copy of {right} is right, that of {wrong} is not (largest difference {largest:.2g}); " LOOK
     "seeds with the rank in them, a collective that one rank skips, state that is not broadcast"},
    ALSO("i", 0, 0, "a replicated parameter must start equal: is the rank in its seed, or was it never broadcast?"),
    ALSO("n", 0, 0, "optimizer state, weight decay or clipping that is not the same on every replica"),
    ALSO("^in", 0, 0,
         "a replicated value needs equal inputs, weights and masks on every rank: look for a collective "
         "that this rank skipped, or a buffer that was overwritten there"),
    SECTION("Shards that are another rank's"),
    {"world_rank_in_group", K(SHARDS), ARI_IDENTITY + 5, "fb", 0, IF(HEADS) | IF(SAMPLES), IF(LONE), "",
     "samples by the rank in the world: rank r has the {heads} parts' r mod {heads}-th, not floor(r * {heads} / "
     "{n}): {pairs}; the ranks that share a layer need the samples of their data-parallel rank"},
    {"wrong_kv_head", K(SHARDS), ARI_IDENTITY + 5, ANY, 0, IF(HEADS), IF(SAMPLES), "",
     "the wrong KV head: rank r holds head r mod {heads}, not floor(r * {heads} / {n}): {pairs}" LOOK
     "KV head of rank r is floor(r * n_kv / N); Megatron: `num_query_groups`"},
    {"zigzag_order", K(SHARDS), ARI_IDENTITY + 5, ANY, 0, IF(TOKENS), 0, "",
     "chunks of a zigzag in another order: {pairs}; of {places} context-parallel ranks the r-th has the chunks r and "
     "2*{places}-1-r, in this order"},
    {"batch_order", K(SHARDS), ARI_IDENTITY + 5, "fb", 0, IF(PACKED) | IF(SAMPLES), 0, "",
     "samples in another order: {pairs}; with accumulation most loaders deal micro-batch m of data-parallel rank r as "
     "the (m N + r)-th of the global batch, others give each rank all of its micro-batches at once (\"samples\": "
     "\"by_rank\" in capture's spec)" LOOK
     "samplers, shuffling, the order of data-parallel ranks and of micro-batches"},
    {"packed_cut_as_one", K(SHARDS), ARI_IDENTITY + 4, ANY, 0, IF(PACKED), IF(SAMPLES), "",
     "a packed tensor (q|k|v, gate|up) sharded as one block: {pairs}" LOOK
     "split each part apart, then concatenate; Megatron: `linear_qkv`, `linear_fc1` with `gated_linear_unit`"},
    {"shards_seeded_alike", K(SHARDS), ARI_IDENTITY + 4, "i", 0, IF(SAME), IF(LONE), "",
     "every shard was seeded alike, or one shard broadcast over the whole world: equal bits: {pairs}; the random "
     "stream must be indexed in the full tensor" LOOK
     "the seed of a sharded parameter must depend on the rank; Megatron: `get_cuda_rng_tracker`; a broadcast over the "
     "world"},
    {"positions", K(SHARDS), ARI_IDENTITY + 5, "f", ARI_IS_POSITIONS, IF(SAME), 0, "",
     "every rank looked up the same positions: equal bits: {pairs}; those of a sequence shard start at its own offset"},
    {"same_samples", K(SHARDS), ARI_IDENTITY + 5, "fb", 0, IF(TWICE) | IF(SAMPLES), IF(LONE), "",
     "ranks worked on the same samples: equal bits: {pairs}; each rank needs a part of the batch of its own "
     "(DistributedSampler, its rank and its set_epoch, or a slice by the data-parallel rank)" LOOK
     "`DistributedSampler` with its rank, the slice of the batch that a rank takes"},
    {"same_samples", K(GROUP), ARI_IDENTITY + 4, ANY, 0, IF(SAME), IF(LONE), "",
     "ranks that have other samples have the same values bit for bit, and none has the reference's: ranks {groups}; each "
     "drew them for itself with one seed, or read the same samples in another order"},
    {"one_shard_on_all_ranks", K(SHARDS), ARI_IDENTITY + 4, ANY, 0, IF(SAME), IF(LONE), "",
     "every rank worked on one shard{along}: equal bits: {pairs}"},
    {"shard_repeated", K(SHARDS), ARI_IDENTITY + 4, ANY, 0, IF(TWICE), 0, "",
     "a shard stands at another rank's place too: equal bits: {pairs} (one shard loaded, seeded or sent twice, or a "
     "chunk taken before it has come)"},
    {"batch_order", K(SHARDS), ARI_IDENTITY + 5, "fb", 0, IF(SHIFT) | IF(SAMPLES), 0, "",
     "samples in another order: rank r has those of rank r + {shift} mod {of}{along}: {pairs}"},
    {"batch_order", K(SHARDS), ARI_IDENTITY + 5, "fb", 0, IF(SAMPLES), IF(SAME), "",
     "samples in another order: {pairs}"},
    {"shards_rotated", K(SHARDS), ARI_IDENTITY + 4, ANY, 0, IF(SHIFT), 0, "",
     "shards in rotated order: rank r holds that of rank r + {shift} mod {of}{along}: {pairs}"},
    {"shards_misplaced", K(SHARDS), ARI_IDENTITY + 4, ANY, 0, 0, 0, "",
     "shards at the wrong ranks (a rank taken from another group or mesh dimension): {pairs}" LOOK
     "the group a rank is taken from; `DeviceMesh` dimensions"},
    {"shards_misplaced", K(POSITIONS), ARI_IDENTITY + 6, ANY, 0, IF(IDS) | IF(BLOCKS), 0, "",
     "every wrong row is the table's {by:.0f} rows on from the reference's, a whole one of {shards} shards of it: shards "
     "that were gathered or loaded in another order"},
    {"wrong_group", K(SHARDS_ADDED), ARI_IDENTITY + 6, "g", ARI_IS_EXPERT, IF(OF_EP), 0,
     "each the sum of {n} experts' values",
     "the sum of the gradients of {n} experts, {others}: added over the data-parallel ranks, of which others have "
     "other experts, where the ranks with copies of this expert are meant (edp)" LOOK
     "Megatron: `expert_data_parallel_group`"},
    {"wrong_group", K(SHARDS_ADDED), ARI_IDENTITY + 5, ANY, 0, IF(AVERAGE), IF(LONE),
     "each the mean of {tp} shards' values",
     "each of {tp} shards is the mean of all {tp} shards of the reference: gradients were averaged over ranks that "
     "hold different parts, as over tp or the world where the data-parallel group belongs"},
    {"reduced_again", K(SHARDS_ADDED), ARI_IDENTITY + 5, ANY, 0, 0, 0, "each the sum of {tp} shards' values",
     "each rank's shard is the sum of all {tp} shards of the reference: gradients were added over tp as well, as by an "
     "all-reduce over the world where the data-parallel group belongs"},
    {"world_rank_in_group", K(WORLD_RANK), ARI_TRACE - 4, ANY, 0, 0, IF(LONE), "",
     "the first tensor-parallel group is right, every rank of all others is wrong{zeros}: the rank in the world was "
     "used where the rank in the tensor-parallel group belongs (in an offset, as an owner, to choose a shard)" LOOK
     "`dist.get_rank()` where `get_rank(group)` belongs; Megatron: `get_tensor_model_parallel_rank`"},
    SECTION("Zeros, or one value, where the reference has others"),
    {"zeros_of_ranks", K(ZERO), ARI_TRACE - 5, ANY, 0, IF(SOME), IF(LONE), ZERO,
     "zeros from {wrong} alone: its part was not computed, not sent, or not copied back" LOOK
     "work that these ranks skip: `find_unused_parameters`, `no_sync`, an empty micro-batch"},
    {"missing_reduce_scatter", K(ZERO), ARI_TRACE - 5, "g", 0, IF(OF_SHARDS), IF(LONE), ZERO,
     "{different} elements of this gradient are zero on {wrong}, and the rest is right: as if that were its share (ZeRO) and "
     "nothing was added, copied back or gathered outside of it"},
    {"no_gradient", K(ZERO), ARI_TRACE - 5, "g", 0, 0, IF(ALL), ZERO,
     "{different} elements of this parameter got no gradient, and those around them are right: what they compute was "
     "detached (the keys of a packed q|k|v), not used, or their gradient was not added or copied back"},
    {"partly_written", K(ZERO), ARI_TRACE - 5, ANY, 0, 0, IF(ALL), ZERO,
     "{different} elements were never written, or their contribution was dropped; those around them are right"},
    {"norm_backward_missing", K(ZERO), ARI_TRACE - 5, "b", ARI_IS_NORM, 0, 0, ZERO,
     "the norm's gradient is missing: its dx is zero, so only the residual carries the gradient on"},
    {"no_backward", K(ZERO), ARI_TRACE - 5, "b", 0, 0, 0, ZERO,
     "no gradient flows through this module: its backward is missing, detached, or a collective in it has no "
     "backward" LOOK "`detach`, `torch.no_grad`, a collective without a backward (`torch.distributed.nn.functional`)"},
    {"no_gradient", K(ZERO), ARI_TRACE - 5, "g", 0, 0, 0, ZERO,
     "this parameter got no gradient: it was not used, was detached, or its gradient was not added or copied back"},
    ALSO(ANY, IF(DP), 0, "; or its bucket was reduced before it was written there"),
    {"no_head_computed", K(ZERO), ARI_TRACE - 5, "f", ARI_IS_CONTEXT | ARI_IS_PROBS, 0, 0, ZERO,
     "heads: no head was computed; a local head count divided by the number of ranks twice can floor to 0"},
    {"never_written", K(ZERO), ARI_TRACE - 5, ANY, 0, 0, 0, ZERO,
     "this value was never written: the buffer is cleared and its producer did not run"},
    {"never_written", K(EXPERTS), ARI_IDENTITY + 9, "g", 0, IF(ZERO), 0, "each not zero where the reference is",
     "the gradient of an expert that no token chose, exactly zero in the reference: here memory that nothing wrote to, "
     "as a product over no rows writes nothing" LOOK "`torch.empty` for gradients of a grouped product"},
    {"no_gradient", K(ZERO_BLOCK), ARI_TRACE + 3, "g", ARI_IS_EMBEDDING, IF(ONE), 0, ZERO,
     "one id's row got no gradient, and all others are right: the id of padding (padding_idx), which is a word's "
     "here" LOOK "`padding_idx` of `nn.Embedding`"},
    {"block_not_written", K(ZERO_BLOCK), ARI_TRACE + 3, ANY, 0, 0, 0, ZERO,
     "a block of zeros: all {different} different elements are zero here and make up one block, the rest is right"
     "{part}; that part was never written, not gathered or left out of a loop (a size rounded down)"},
    {"sequence_floored", K(TAIL), ARI_TRACE - 5, ANY, 0, IF(TOKENS), 0, ZERO,
     "the last tokens have nothing: {cut} is {extent} rounded down to a multiple of {unit}, twice the context-parallel "
     "ranks, and what is beyond was dropped; pad the sequence, or refuse its length"},
    {"divided_twice", K(TAIL), ARI_TRACE + 8, ANY, 0, IF(FRACTION), 0, "",
     TAIL "; that is {local} / {shards} rounded down: the local {count} was divided by the number of ranks twice" LOOK
          "`num_heads // tp` applied to a number that is local already"},
    {"divided_twice", K(TAIL), ARI_TRACE + 8, ANY, 0, IF(TWICE), 0, "",
     TAIL "; that is 1/{shards} for {shards} {ranks}: the local {count} was divided by the number of ranks twice"},
    {"shard_tail_missing", K(TAIL), ARI_TRACE + 8, ANY, 0, 0, 0, "",
     TAIL "; the rest was left out of the loop, or its size was rounded down"},
    {"filled", K(FILLED), ARI_IDENTITY + 3, ANY, 0, 0, 0, "each {filled}",
     "all {wrong} different elements have the one value {filled}, larger than any of the reference: filled and never "
     "written, or the fill of a mask or of padding that should not be seen" LOOK
     "`masked_fill` and padding that is used"},
    {"ids_of_other_shards", K(ROWS_ZERO), ARI_TRACE + 1, "f", ARI_IS_EMBEDDING, 0, 0, ZERO,
     "{zero} of {all} {rows} are zero as a whole, all others are right; ids whose rows another rank holds: a missing "
     "all-reduce over the shards of the vocabulary, or a range of ids that leaves some out"},
    {"rows_left_out", K(ROWS_ZERO), ARI_TRACE + 1, ANY, 0, 0, 0, ZERO,
     "{zero} of {all} {rows} are zero as a whole, all others are right; "},
    ALSO("f", 0, 0, "left out by a mask or a loop, or not gathered"),
    ALSO("b", 0, 0, "left out of the loss on this side alone (labels that are ignored, padding), or not gathered"),
    ALSO("^fb", 0, 0, "their part was not computed, not sent or not added"),
    {"dropout_without_scale", K(DROPOUT), ARI_TRACE + 2, ANY, 0, IF(ONE), 0, ZERO,
     "{dropped} elements ({percent:.2g}%) are zero, anywhere in the tensor, and all others are right: a dropout mask "
     "without its scale 1/(1-p), another mask on this side, or writes that were lost"},
    {"dropout", K(DROPOUT), ARI_IDENTITY + 2, "^g", 0, 0, 0, "zero or {factor} times the reference",
     "{dropped} elements ({percent:.2g}%) are zero, anywhere in the tensor, and all others are {factor} times the "
     "reference: dropout with p = {p:.3g}, which the reference does not have (eval against train, or a rank that drops "
     "where it should not)" LOOK "`model.eval()` against `model.train()`"},
    {"causal_mask_missing", K(MASK), ARI_TRACE + 7, ANY, 0, IF(CAUSAL), 0, "",
     "the causal mask is missing: all {gained} elements that are zero in the reference and not here have a key after "
     "the query" LOOK "`is_causal`, the additive mask"},
    {"ignored_labels", K(MASK), ARI_TRACE + 7, "b", 0, IF(TOKENS), 0, "zeros of other tokens",
     "other tokens have a gradient: {tokens} have one on one side alone, of their features all or none, and all others "
     "are right; a mask of labels (of the prompt, of padding) that is not shifted or cut as the labels are" LOOK
     "the shift of the loss's mask and of its labels"},
    {"mask_of_other_layer", K(MASK), ARI_TRACE + 7, ANY, 0, IF(OF_LAYER), 0, MASK_LOOKS,
     MASK
     "it is the mask of {other} in the reference: layers counted from another start (in each stage of a pipeline "
     "from 0), or one stream of random numbers for several layers" LOOK
     "layers counted from 0 in each stage of a pipeline; one seed for several layers; Megatron: `layer_number`, the "
     "RNG tracker's seeds"},
    {"mask_differs_in_replica", K(MASK), ARI_TRACE - 1, ANY, 0, IF(APART), IF(LONE), MASK_LOOKS,
     MASK "dropout in a replicated region needs the same mask on every rank, and the copies differ" LOOK
          "one dropout seed for replicated regions; Megatron: default RNG state"},
    {"mask_of_other_seed", K(MASK), ARI_TRACE - 1, ANY, 0, IF(EQUAL), 0, MASK_LOOKS,
     MASK "the copies agree: a mask from another seed, step or layer"},
    {"mask_of_other_seed", K(MASK), ARI_TRACE - 1, ANY, 0, IF(LATER), 0, MASK_LOOKS,
     MASK "a mask from another seed, step or layer: one of the index in the shard would differ from the first step on"},
    {"mask_of_shard_index", K(MASK), ARI_TRACE - 1, ANY, 0, IF(SEEN), 0, MASK_LOOKS,
     MASK "dropout in a sharded region needs the mask of the element's index in the full tensor, not in the shard" LOOK
          "a dropout seed for each tensor-parallel rank; Megatron: `get_cuda_rng_tracker().fork()`"},
    {"mask_of_other_seed", K(MASK), ARI_TRACE - 1, ANY, 0, 0, 0, MASK_LOOKS,
     MASK "a mask from another seed, step or layer, or, in a sharded region, of the index in the shard"},
    SECTION("The reference's values in another place"),
    {"gathered_in_rank_order", K(RANK_MAJOR), ARI_IDENTITY + 8, ANY, 0, 0, 0, MOVED,
     "tokens gathered over {n} ranks left one part after the other ([ranks, b, s/N, h] in place of [b, s, h]): for "
     "more than one sample an all-gather along tokens must put each sample's parts together; {exact}" LOOK
     "gather along dimension 1 with `torch.cat(parts, dim=1)`, or [s, b, h] as Megatron has it"},
    {"token_blocks_rotated", K(ROTATED), ARI_IDENTITY + 7, ANY, 0, IF(TWICE) | IF(TOKENS) | IF(OF_SHARDS), IF(ALL),
     MOVED,
     "neighbouring token blocks have each other's tokens, two and two: chunks exchanged within pairs of ranks" SLICES},
    {"batch_order", K(ROTATED), ARI_IDENTITY + 7, ANY, 0, IF(ALL) | IF(SAMPLES), 0, MOVED,
     "batch order: sample i has that of sample i + {by}, modulo {n}" SLICES},
    {"token_blocks_rotated", K(ROTATED), ARI_IDENTITY + 7, ANY, 0, IF(ALL) | IF(TWICE) | IF(TOKENS), 0, MOVED,
     "rotated token blocks: the two halves stand in rank-rotated order, each rank's own chunk first (chunked "
     "all-gather), or shards 0 and 1 of 2 in each other's place" SLICES},
    {"halves_exchanged", K(ROTATED), ARI_IDENTITY + 7, ANY, 0, IF(TWICE), 0, MOVED,
     "the two halves are exchanged, as shards 0 and 1 of 2 in each other's place" SLICES LOOK
     "`rotate_half`; two shards exchanged"},
    {"token_blocks_rotated", K(ROTATED), ARI_IDENTITY + 7, ANY, 0, IF(TOKENS) | IF(BLOCKS), 0, MOVED,
     "rotated token blocks: block k of {blocks} has block k{sign}1's tokens: chunks of an all-gather put down starting "
     "with the rank's own" SLICES},
    {"tokens_shifted", K(ROTATED), ARI_IDENTITY + 7, ANY, 0, IF(TOKENS), 0, MOVED,
     "shifted by {slices} {axes} (the end wraps round): positions or labels rolled" SLICES},
    {"heads_rotated", K(ROTATED), ARI_IDENTITY + 7, ANY, 0, IF(HEADS), 0, MOVED,
     "off by {head_by} heads: head i has head i{sign}{head_by}'s, if a head has {head} {axes}" SLICES},
    {"shards_rotated", K(ROTATED), ARI_IDENTITY + 7, ANY, 0, IF(ALL) | IF(BLOCKS), 0, MOVED,
     "shards in rotated order: block k of {blocks} has block k{sign}1's (rank r took the shard of its "
     "neighbour)" SLICES},
    {"ids_off_by_one", K(ROTATED), ARI_IDENTITY + 7, ANY, 0, IF(IDS), 0, MOVED,
     "rotated by {slices}: off-by-one ids" SLICES},
    {"rotated", K(ROTATED), ARI_IDENTITY + 7, ANY, 0, 0, 0, MOVED,
     "rotated by {slices}" SLICES LOOK "`torch.roll`, offsets"},
    {"ids_off_by_one", K(SHIFTED_SLICES), ARI_IDENTITY + 7, ANY, 0, IF(IDS), 0, MOVED,
     "shifted by {slices} {axes}: {axis} i has that of i {sign} {slices} (off-by-one ids)" SLICES},
    {"position_offset", K(SHIFTED_SLICES), ARI_IDENTITY + 7, "f", ARI_IS_POSITIONS, IF(TOKENS), 0, MOVED,
     "positions: token i has the position of i {sign} {slices} (padding on the left, a cache's length)" SLICES LOOK
     "`position_ids`; padding on the left"},
    {"tokens_shifted", K(SHIFTED_SLICES), ARI_IDENTITY + 7, ANY, 0, IF(TOKENS), 0, MOVED,
     "shifted by {slices} {axes}: {axis} i has that of i {sign} {slices}" SLICES},
    {"shifted", K(SHIFTED_SLICES), ARI_IDENTITY + 7, ANY, 0, 0, 0, MOVED,
     "shifted by {slices} {axes}: {axis} i has that of i {sign} {slices}" SLICES},
    {"sequence_reversed", K(REVERSED), ARI_IDENTITY + 7, ANY, 0, IF(TOKENS), 0, MOVED, "sequence reversed" SLICES},
    {"reversed", K(REVERSED), ARI_IDENTITY + 7, ANY, 0, 0, 0, MOVED, "reversed" SLICES},
    {"rope_pairing", K(INTERLEAVED), ARI_IDENTITY + 7, ANY, 0, IF(PAIRS), 0, MOVED,
     "RoPE: {pairs}: its pairs are neighbours on one side and halves on the other (interleaved against "
     "rotate_half)" SLICES LOOK "interleaved against `rotate_half`; `rotary_interleaved`"},
    {"packed_cut_as_one", K(INTERLEAVED), ARI_IDENTITY + 7, ANY, 0, IF(PACKED), 0, MOVED,
     DEALT "a packed tensor ({packed}) cut into shards as one block, or put together shard by shard" SLICES},
    {"gathered_in_rank_order", K(INTERLEAVED), ARI_IDENTITY + 7, ANY, 0, IF(ROWS), 0, MOVED,
     DEALT "tokens gathered over {q} ranks left one part after the other ([ranks, b, s/N] against [b, s]), or batch "
           "and sequence exchanged" SLICES},
    {"samples_dealt_out", K(INTERLEAVED), ARI_IDENTITY + 7, ANY, 0, IF(SAMPLES), 0, MOVED,
     DEALT
     "samples dealt out to ranks in turn on one side, in runs on the other (dp sharding of the batch; \"samples\": "
     "\"dealt\" in capture's spec)" SLICES LOOK "`DistributedSampler` against contiguous slices of the batch"},
    {"tokens_dealt_out", K(INTERLEAVED), ARI_IDENTITY + 7, ANY, 0, IF(TOKENS), 0, MOVED,
     DEALT "tokens dealt out to ranks in turn on one side, in runs on the other (sequence sharding)" SLICES},
    {"dimension_flattened", K(INTERLEAVED), ARI_IDENTITY + 7, ANY, 0, 0, 0, MOVED,
     DEALT
     "a [{p}, {q}] dimension flattened the other way round (heads and lanes, gate and up, shards and rows)" SLICES LOOK
     "`view`, `reshape`, `permute` of heads and lanes; interleaved QKV of Megatron"},
    {"zigzag_positions", K(ZIGZAG), ARI_IDENTITY + 6, ANY, 0, IF(COUNT), 0, "",
     "positions of contiguous chunks for the tokens of a zigzag: place r of {places} has the chunks r and "
     "2*{places}-1-r, and its tokens count as if they were consecutive ones" LOOK
     "`position_ids` cut in the same order as the tokens (balanced ring attention)"},
    {"zigzag_order", K(ZIGZAG), ARI_IDENTITY + 6, ANY, 0, IF(HEADS), 0, "",
     "keys in the order of a zigzag: those of {places} context-parallel ranks are put down as contiguous chunks where "
     "they are a zigzag's, or the other way round, so that masks and values belong to other keys"},
    {"ring_own_keys", K(ZIGZAG), ARI_IDENTITY + 6, ANY, 0, IF(OF_CP), 0, "",
     "the rank's own keys and values at every hop of the ring: where those of another of {places} places should be, "
     "the values are those of the own chunk (a backward pass that keeps the first step's K and V)"},
    {"zigzag_order", K(ZIGZAG), ARI_IDENTITY + 7, ANY, 0, IF(TOKENS), 0, MOVED,
     "the order of a zigzag: of {shards} chunks the r-th from either end stand together, those of one of {places} "
     "context-parallel ranks, where they should stand in the sequence's order, or the other way round" SLICES},
    {"slices_reordered", K(ZIGZAG), ARI_IDENTITY + 7, ANY, 0, 0, 0, MOVED,
     "in another order: of {shards} blocks the r-th from either end stand together" SLICES},
    {"shards_misplaced", K(EXCHANGED), ARI_IDENTITY + 7, ANY, 0, IF(OF_SHARDS), 0, MOVED,
     "exchanged: {unit} {a} has {b}'s and the other way round; shard {a} of {shards} is at another rank's "
     "place" SLICES},
    {"slices_exchanged", K(EXCHANGED), ARI_IDENTITY + 7, ANY, 0, 0, 0, MOVED,
     "exchanged: {unit} {a} has {b}'s and the other way round" SLICES LOOK
     "names or indices in a checkpoint's mapping"},
    {"wrong_kv_head", K(REPEATED), ARI_IDENTITY + 7, ANY, 0, IF(HEADS), 0, MOVED,
     "duplicated: {unit} {a} has {b}'s values, which stand at {b} too; heads assigned by the wrong rule (KV head "
     "r mod n_kv in place of floor(r * n_kv / N))" SLICES},
    {"input_of_other_micro_batch", K(REPEATED), ARI_IDENTITY + 7, "fb", 0, IF(MICRO) | IF(SAMPLES), 0, MOVED,
     "duplicated: {unit} {a} has {b}'s values, which stand at {b} too" SLICES "; of {micro} micro-batches one has "
     "what another was given: a buffer of a transfer that was used again, or read before it had come"},
    {"shard_repeated", K(REPEATED), ARI_IDENTITY + 7, ANY, 0, IF(OF_SHARDS), 0, MOVED,
     "duplicated: {unit} {a} has {b}'s values, which stand at {b} too; shard {a} of {shards} is another rank's "
     "(one shard loaded, seeded or sent twice, or a chunk taken before it has come)" SLICES},
    {"mtp_rolled_elsewhere", K(REPEATED), ARI_IDENTITY + 6, "f", ARI_IS_FURTHER, 0, 0, MOVED,
     "ids of a further token end elsewhere than at a document's end: {unit} {a} has {b}'s row, which stands at {b} too "
     "(rolled after the cut among cp ranks, each its own positions, or over the borders of packed documents)" LOOK
     "`roll_tensor` of Megatron, its cp_group and packed_seq_params"},
    {"slices_repeated", K(REPEATED), ARI_IDENTITY + 7, ANY, 0, 0, 0, MOVED,
     "duplicated: {unit} {a} has {b}'s values, which stand at {b} too" SLICES},
    {"shards_misplaced", K(REORDERED), ARI_IDENTITY + 7, ANY, 0, IF(OF_SHARDS), 0, MOVED,
     "in another order: {unit} {a} has {b}'s; shard {a} of {shards} is at another rank's place" SLICES},
    {"batch_order", K(REORDERED), ARI_IDENTITY + 7, "f", ARI_IS_EMBEDDING, IF(SAMPLES), 0, MOVED,
     "samples in another order: {unit} {a} has {b}'s" SLICES
     "; shuffled with another seed, or by each rank with its own, which has some samples twice and others not at all"},
    {"slices_reordered", K(REORDERED), ARI_IDENTITY + 7, ANY, 0, 0, 0, MOVED,
     "in another order: {unit} {a} has {b}'s" SLICES},
    {"heads_and_tokens_exchanged", K(HEADS_MOVED), ARI_IDENTITY + 8, ANY, 0, 0, 0, MOVED,
     "heads and tokens exchanged: the reference's [b, s, {heads} heads, {lanes}] stands here as [b, {heads} heads, s, "
     "{lanes}] under the old shape, or the other way round (a reshape where a transposition was wanted first); "
     "{exact}" LOOK "`transpose(1, 2)` before or after `reshape`"},
    {"weight_transposed", K(TRANSPOSED), ARI_IDENTITY + 8, "^fb", 0, IF(MATRIX), 0, "the reference's values transposed",
     TRANSPOSED "a weight [in, out] (Conv1D, JAX) against [out, in] (Linear)" LOOK
                "`nn.Linear` [out, in] against GPT-2's `Conv1D` [in, out]"},
    {"transposed", K(TRANSPOSED), ARI_IDENTITY + 8, ANY, 0, IF(SAMPLES), 0, "the reference's values transposed",
     TRANSPOSED "[s, b, h] against [b, s, h]"},
    {"transposed", K(TRANSPOSED), ARI_IDENTITY + 8, ANY, 0, 0, 0, "the reference's values transposed",
     TRANSPOSED "heads and tokens exchanged, or a view of data that was not made contiguous"},
    {"shifted_in_memory", K(SHIFTED), ARI_IDENTITY + 2, ANY, 0, 0, 0, "the reference's values {by} elements {looks}",
     "shifted in memory: {follow} of {all} different elements are the reference's {by} {side}; an offset into a buffer "
     "or a file is off by that much{rows}"},
    SECTION("Something was added, or another tensor's values are here"),
    {"constant_added", K(CONSTANT_ADDED), ARI_IDENTITY + 4, ANY, 0, 0, 0, "",
     "a constant was added: the difference is {added} in every one of the {count} elements (it varies by {spread:.0e} "
     "of its size)" LOOK "an epsilon, an offset, a fill value"},
    {"bias_counted_again", K(VECTOR_ADDED), ARI_IDENTITY + 3, "f", 0, 0, IF(ROWS), "",
     "a bias counted more than once, or left out: the same vector is added to each of the {row_count} {rows} (it "
     "varies by {spread:.0e} of its size, {size:.2g}){source}"},
    ALSO(ANY, IF(OF_TP), 0, "; a row-parallel bias is added once, after the sum over tp, or it counts {tp} times"),
    ALSO(ANY, IF(HIDDEN), IF(NAMED) | IF(LONE),
         "; a row-parallel bias is added once, after the sum over tp, or it counts N times"),
    {"vector_added", K(VECTOR_ADDED), ARI_IDENTITY + 3, ANY, 0, 0, IF(ROWS), "",
     "the difference is one vector: the same is added to each of the {row_count} {rows} (it varies by {spread:.0e} of "
     "its size, {size:.2g}){source}" LOOK "a bias's gradient, a mean that is not subtracted"},
    {"vector_added", K(VECTOR_ADDED), ARI_IDENTITY + 3, ANY, 0, 0, 0, "",
     "the difference is one number in each of the {row_count} {rows}, added to all of its elements (it varies by "
     "{spread:.0e} of its size, {size:.2g}){source}: a mean of each row that is subtracted on one side, as in centred "
     "gradients"},
    {"positions", K(TABLE_ADDED), ARI_TRACE + 6, ANY, 0, 0, 0, "",
     "positions: the difference is the same for all {samples} samples (it varies by {spread:.0e} of its size), so it "
     "depends on the token's position alone; learned positions looked up by a local index, counted twice, or left "
     "out{source}"},
    {"dropout_without_scale", K(OTHER_TENSOR), ARI_IDENTITY + 9, "fb", 0, IF(CUT), 0, OTHER_LOOKS,
     OTHER "; where that one has {masked} others, both sides are zero: its mask, without the scale 1/(1-p)"},
    {"no_update", K(OTHER_TENSOR), ARI_IDENTITY + 9, ANY, 0, IF(OF_BEFORE), 0, OTHER_LOOKS,
     OTHER "; the weights before the step: no update (the optimizer does not have this parameter, or its result was "
           "lost)"},
    {"positions", K(OTHER_TENSOR), ARI_IDENTITY + 9, "f", 0, IF(TOKENS), 0, OTHER_LOOKS,
     OTHER "; the embedding of the tokens alone: that of the positions was not added"},
    {"gradient_of_last_step", K(OTHER_TENSOR), ARI_IDENTITY + 9, "g", 0, IF(OF_STEP), 0, OTHER_LOOKS,
     OTHER
     "; the gradient of step {of_step} at step {step}: a bucket that was not filled again, or copied back before its "
     "reduction had ended"},
    {"stale_value", K(OTHER_TENSOR), ARI_IDENTITY + 9, ANY, 0, IF(OF_STEP), 0, OTHER_LOOKS,
     OTHER "; stale: the value of step {of_step} at step {step} (not written again, or read too early)"},
    {"other_point_of_step", K(OTHER_TENSOR), ARI_IDENTITY + 9, ANY, 0, IF(SAME), 0, OTHER_LOOKS,
     OTHER "; the same tensor at another point of the step"},
    {"rope_missing", K(OTHER_TENSOR), ARI_IDENTITY + 9, ANY, 0, IF(PAIRS), 0, OTHER_LOOKS,
     OTHER "; RoPE's rotation is missing" LOOK "`apply_rotary_pos_emb` on q and on k"},
    {"shards_misplaced", K(OTHER_TENSOR), ARI_IDENTITY + 9, "iw", ARI_IS_EXPERT, IF(OF_LAYER) | IF(EXCHANGED), 0,
     "each another expert's value",
     OTHER "; another expert's: experts that are dealt out to the ranks in one order and numbered in another" LOOK
           "experts' global numbers"},
    {"shards_seeded_alike", K(OTHER_TENSOR), ARI_IDENTITY + 9, "iw", ARI_IS_EXPERT, IF(OF_LAYER), 0,
     "each another expert's value",
     "these are the values of {other} in the reference: all {different} different elements, {exact}; another expert's: "
     "each expert-parallel rank numbers its experts from 0, draws them with one seed, or reads the first ones" LOOK
     "experts' global numbers"},
    {"never_written", K(OTHER_TENSOR), ARI_IDENTITY + 9, "g", 0, IF(ZERO), 0, OTHER_LOOKS,
     OTHER
     "; the reference is zero there, as where no token came: nothing was written, and what that memory held before "
     "is still in it" LOOK "`torch.empty` for gradients, a workspace of several layers"},
    {"other_layer", K(OTHER_TENSOR), ARI_IDENTITY + 9, ANY, 0, IF(OF_LAYER), 0, OTHER_LOOKS,
     OTHER "; another layer's: layers exchanged, or counted from another start" LOOK
           "layer offsets of pipeline stages; names in a mapping"},
    {"residual", K(OTHER_TENSOR), ARI_IDENTITY + 9, "fb", 0, IF(ALONE), 0, OTHER_LOOKS,
     OTHER "; a branch alone: what goes round it, the residual, is not added"},
    {"norm_missing", K(OTHER_TENSOR), ARI_IDENTITY + 9, "f", 0, IF(OF_INPUT), 0, OTHER_LOOKS,
     OTHER ", which is no norm's: what the norm reads passes through it, the norm itself is left out"},
    {"residual", K(OTHER_TENSOR), ARI_IDENTITY + 9, "f", 0, IF(BLOCKS), 0, OTHER_LOOKS,
     OTHER "; a part of this module alone: what its others make is not added (an adapter that is off, or of scale 0)"},
    {"other_module", K(OTHER_TENSOR), ARI_IDENTITY + 9, ANY, 0, IF(OF_MODULE), 0, OTHER_LOOKS,
     OTHER "; another module of the same layer: two were exchanged, or one name stands for the other" LOOK
           "names in a mapping; k and v exchanged"},
    {"other_tensor", K(OTHER_TENSOR), ARI_IDENTITY + 9, ANY, 0, 0, 0, OTHER_LOOKS,
     OTHER "; a buffer that was used again, or one name in place of another"},
    ALWAYS(K(OTHER_TENSOR), ANY, IF(EXCHANGED), 0, "; and that one has this one's: the two are exchanged"),
    {"one_buffer_for_two", K(SHARED_TENSOR), ARI_TRACE + 5, ANY, 0, 0, 0, "",
     "the other dump has the same values under {other} ({exact}), where the reference has two different tensors: one "
     "buffer for both, or one name saved twice" LOOK "saved views of one buffer; `clone` before saving"},
    {"tied_weight", K(TENSOR_ADDED), ARI_IDENTITY + 1, ANY, 0, IF(FOREIGN), 0, "",
     "a tied weight that is not tied here: what the reference has besides is {other}, the gradient of a parameter of "
     "this run alone" LOOK "`tie_weights()` after loading, wrapping or `to_empty`; a head of another stage or unit"},
    {"decay_in_gradient", K(TENSOR_ADDED), ARI_IDENTITY + 1, ANY, 0, IF(OF_WEIGHT), 0, "",
     "{what}: weight decay of {factor:.4g} was added to the gradient"},
    {"other_learning_rate", K(TENSOR_ADDED), ARI_TRACE - 2, ANY, 0, IF(OF_GRADIENT), 0, "",
     "{what}: another learning rate, or a step more or less along the gradient"},
    {"gradient_not_zeroed", K(TENSOR_ADDED), ARI_IDENTITY + 1, ANY, 0, IF(OF_STEP), 0, "",
     "{what}: a gradient of another step is in it (not zeroed before it was added to)"},
    {"residual_scale", K(TENSOR_ADDED), ARI_IDENTITY + 1, "f", 0, 0, IF(ONE), "",
     "{what}: a term of this sum has another factor (a branch's scale, an adapter's alpha over its rank)"},
    {"residual", K(TENSOR_ADDED), ARI_IDENTITY + 1, "fb", 0, 0, 0, "",
     "{what}: a residual, a second use of a value or a branch counted twice or left out, or with another factor"},
    {"tensor_added", K(TENSOR_ADDED), ARI_IDENTITY + 1, ANY, 0, 0, 0, "", "{what}" LOOK "residuals and hooks"},
    SECTION("Whole rows, ids and rotary positions"),
    {"stale_weights", K(LOOKUP), ARI_IDENTITY + 8, "f", 0, IF(OF_BEFORE), 0, "each an older weight",
     "every row was looked up in the table as it was before the last update, bit for bit: weights that are not "
     "gathered again after it (ZeRO-3, FSDP), or copies of them that were not made anew" LOOK
     "weights gathered once and kept (FSDP `reshard_after_forward`), casts and copies that are not made anew after "
     "`optimizer.step()`"},
    {"ids_at_shard_edge", K(LOOKUP), ARI_TRACE + 8, ANY, 0, 0, 0, "",
     "ids at a shard's edge: the {tokens} wrong token{hold} {ids} id{plural} (equal reference rows), and no token with "
     "{them} is right; the first or last id of a shard belongs to {whose}{bits}" LOOK
     "`<` against `<=` in the range of a vocabulary shard"},
    {"ids_at_shard_edge", K(EDGE_ROWS), ARI_TRACE + 6, ANY, 0, 0, 0, "",
     "ids at a shard's edge: only {ids} {differ}, the first or last of a shard: they belong to two shards, or to none"},
    {"tied_weight", K(BATCH_ROWS), ARI_TRACE + 4, ANY, 0, IF(ALL), 0, "",
     "a tied weight: the {ids} rows of ids that the batch does not hold, which have the LM head's gradient alone, are "
     "twice the reference: the head's use of the weight is counted twice" LOOK
     "both uses of a tied weight must be in the sum; Megatron: `allreduce_word_embedding_grads`"},
    {"repeated_ids", K(BATCH_ROWS), ARI_TRACE + 4, ANY, 0, IF(TWICE), 0, "",
     "repeated ids: exactly the rows of the {ids} ids that the batch has more than once differ: their contributions "
     "were overwritten in place of added" LOOK "`index_put_` without `accumulate=True`"},
    {"tied_weight", K(BATCH_ROWS), ARI_TRACE + 4, ANY, 0, IF(ZERO), 0, "",
     "a tied weight: {ids} rows are zero, where the reference has the LM head's gradient, and all others differ: the "
     "weight's use in the head is missing from the sum (a head with a weight of its own, detached, or not added)"},
    {"tied_weight", K(BATCH_ROWS), ARI_TRACE + 4, ANY, 0, IF(SOME), 0, "",
     "a tied weight: exactly the rows of the {ids} ids that the batch holds differ, all others have the LM head's "
     "gradient and are right; the embedding's own use of the weight {use}"},
    {"tied_weight", K(BATCH_ROWS), ARI_TRACE + 4, ANY, 0, IF(PERHAPS), 0, "",
     "a tied weight, perhaps: the rows of {ids} ids differ as a whole, all others have gradients too and are right; if "
     "those are the ids of the batch, the embedding's own use of the weight {use}"},
    {"ids_of_nobody", K(LEFT_OVER), ARI_TRACE + 7, ANY, 0, 0, 0, "",
     "the last {left} of {vocabulary} ids belong to nobody: {vocabulary} over {shards} ranks, rounded down, leaves the "
     "ids from {from} on out; a vocabulary that does not divide needs uneven shards, or padding that is masked" LOOK
     "pad the vocabulary and mask it, or cut unevenly; Megatron: `make_vocab_size_divisible_by`"},
    {"vocabulary_padding", K(PADDING), ARI_TRACE + 6, ANY, 0, 0, 0, "",
     "padded vocabulary: only the last {ids} ids (from {from} on) differ, which are zero in the reference; padding "
     "must stay out of the softmax and of gradients, and never be saved"},
    {"statistic_of_own_samples", K(STATISTIC), ARI_IDENTITY + 1, ANY, 0, IF(SAMPLES), 0,
     "each channel of each block of samples stretched and moved",
     "in each of {blocks} blocks of samples each channel is stretched by its own factor, {low:.4g} to {high:.4g}, and "
     "moved: a batch norm's mean and variance are those of the samples that a rank, or a micro-batch, has at once, and "
     "not of all" LOOK "`SyncBatchNorm`"},
    {"norm_over_padding", K(STATISTIC), ARI_IDENTITY + 1, ANY, 0, IF(PADDED), 0, "",
     STATISTIC "; sqrt({padded} / {lanes}) = {factor:.4g}: they were taken over {padded} lanes, padding included"},
    {"norm_statistic", K(STATISTIC), ARI_TRACE + 6, ANY, 0, 0, 0, "",
     STATISTIC "; they include lanes of padding, or cover a shard of the features alone"},
    {"rope_missing", K(ROPE), ARI_IDENTITY + 2, ANY, 0, IF(ZERO), 0, TURNED, ROPE "the rotation is missing"},
    {"rope_direction", K(ROPE), ARI_IDENTITY + 2, ANY, 0, IF(NEGATIVE), 0, TURNED,
     ROPE "it goes the wrong way round (the sign of the sine)"},
    {"norm_after_rope", K(ROPE), ARI_IDENTITY + 2, "f", ARI_IS_NORM, IF(TWICE), 0, TURNED,
     ROPE "what the norm reads was turned already, where the norm comes first" LOOK
          "the order of q_norm, k_norm and `apply_rotary_pos_emb`"},
    {"rope_twice", K(ROPE), ARI_IDENTITY + 2, ANY, 0, IF(TWICE), 0, TURNED, ROPE "it was applied twice"},
    {"rope_theta", K(ROPE), ARI_IDENTITY + 2, ANY, 0, IF(OF_THETA), 0, TURNED,
     ROPE "the fastest pair is right and slower ones are not: another rope_theta, scaling or head size" LOOK
          "`rope_theta`, `rope_scaling`, head size"},
    {"rope_offset", K(ROPE), ARI_IDENTITY + 2, ANY, 0, IF(SHIFT), 0, TURNED,
     ROPE "from position {first} on, every position counts as {by} {side}: an offset of the positions (a rank's or a "
          "chunk's start, a cache's length)" LOOK "position ids of a sequence shard or cache"},
    {"rope_restarts", K(ROPE), ARI_IDENTITY + 2, ANY, 0, IF(SOME), 0, TURNED,
     ROPE "positions before {first} are right, and {first} counts as {by} {side}: positions counted from each shard's "
          "or sample's own start"},
    {"rope_positions", K(ROPE), ARI_IDENTITY + 2, ANY, 0, 0, 0, TURNED,
     ROPE "other positions, or other frequencies (position {first} is the first, its fastest pair turned by "
          "{angle:.4g})"},
    ALWAYS(K(ROPE), "b", 0, 0, "; a gradient is turned back by the same angles"),
    SECTION("Where the differences are"),
    {"part_of_one_rank", K(SHARD_WRONG), ARI_PLACE + 9, ANY, 0, 0, IF(LONE), "",
     "{where}; all others are right, so look at what one rank{or_head} had there: its weights, its inputs, or data "
     "that was not there yet" LOOK "that rank's weights, inputs, loaded shard and streams"},
    ALSO(ANY, IF(FINITE), 0, " (there: cosine with the reference {angle:.3f}, size {size:.3g} of it)"),
    {"first_sample_alone", K(FIRST_SAMPLE), ARI_PLACE + 8, ANY, 0, 0, 0, "",
     "only the first of {row_samples} samples is right: leading dimensions not flattened, or a mask, a position or an "
     "offset taken from the first sample"},
    {"part_of_one_rank", K(RANKS_WRONG), ARI_PLACE + 6, ANY, 0, 0, IF(LONE), "",
     "the shards of all other ranks are right; {wrong} read other weights, inputs or state, or computed before its "
     "data arrived"},
    {"document_boundaries", K(DOCUMENTS), ARI_IDENTITY + 6, ANY, 0, IF(CUT) | IF(SHIFT), 0, MASK_LOOKS,
     "documents begin elsewhere: {gained} scores across the reference's boundaries are seen, and {lost} within a "
     "document are not; boundaries (cu_seqlens) that are counted in a chunk or a shard, not in the whole row" LOOK
     "`cu_seqlens` of the whole row, not of a context-parallel rank's chunk"},
    {"attention_across_documents", K(DOCUMENTS), ARI_IDENTITY + 6, ANY, 0, IF(CUT), 0, MASK_LOOKS,
     "attention crosses documents: all {gained} scores that are seen here and not in the reference have a key of "
     "another document; packed documents need a mask each (cu_seqlens)"},
    {"positions_over_documents", K(DOCUMENTS), ARI_IDENTITY + 6, ANY, 0, 0, 0, "",
     "positions run on over packed documents: every wrong token counts as its place in the row, not in its document "
     "(position_ids that restart with each)" LOOK "`position_ids` that restart with each document"},
    {"halo_missing", K(BORDERS), ARI_SHAPE + 1, ANY, 0, 0, 0, "",
     "all that differs is up to {before} before and {behind} behind the borders of {n} ranks' parts: what a convolution, "
     "a window or a shift of tokens reads of the neighbouring rank's part was not exchanged, or its gradient" LOOK
     "the exchange of edges before convolutions"},
    {"later_documents", K(LATER_TOKENS), ARI_PLACE + 2, ANY, 0, IF(DOCUMENTS), 0, "",
     "the first document of every row is right, later ones are not: boundaries (cu_seqlens), positions or labels of "
     "packed documents" LOOK "`cu_seqlens`, `position_ids`, labels of packed documents"},
    {"later_tokens", K(LATER_TOKENS), ARI_PLACE, ANY, 0, 0, 0, "",
     "the first tokens are right and later ones are not: a mask, a position offset or a chunk's border"},
    {"other_initial_values", K(ANYTHING), ARI_LAST_RESORT, "i", 0, 0, 0, "",
     "other initial values: another seed, another name in the random key, or an index that is not the full tensor's"},
    {"unknown", K(ANYTHING), ARI_LAST_RESORT, "n", 0, 0, 0, "",
     "if the gradient is right, look at the optimizer: step count, state, weight decay, clipping, or a step taken "
     "before the reduced gradient was copied back"},
    {"unknown", K(ANYTHING), ARI_LAST_RESORT, "g", 0, 0, 0, "",
     "if this is the first difference, the gradients around it are right: look at this parameter's own sum over tokens "
     "and ranks, and at the saved input"},
    {"unknown", K(ANYTHING), ARI_LAST_RESORT, "fb", 0, 0, 0, "",
     "no known trace; if this is the first difference, its inputs are right: look at this module's own weights, "
     "arithmetic, saved values and collective"},
    {"unknown", K(ANYTHING), ARI_LAST_RESORT, ANY, 0, 0, 0, "",
     "no known trace: another tensor, other training, or a conversion that computed"},
    ALWAYS(
        K(ANYTHING), "fb", IF(GATHERED), 0,
        "; its weights are gathered for each use (ZeRO-3): in another order of the ranks, too late, or not again after "
        "an update"),
    ALWAYS(K(ANYTHING), ANY, IF(APART), 0,
           "; copies that should be equal differ, so each rank computed from data of its own"),
    ALWAYS(K(ANYTHING), ANY, IF(FINITE), 0, " (cosine with the reference {angle:.3f}, size {size:.3g} of it)"),
    SECTION("Collectives, where all tensors are right"), /* by verify/check/check_calls.c */
    {"collective_repeated", K(CALLS), ARI_TRACE, ANY, 0, 0, 0, "",
     "more bytes move: one collective is made again, one right after the other" LOOK
     "q, k and v (gate and up) that each gather their common input; a gather in each branch; `redistribute` of a "
     "DTensor in several places"},
    {"collective_added", K(CALLS), ARI_TRACE, ANY, 0, 0, 0, "",
     "other bytes move: a collective that the layout does not have" LOOK
     "as of `collective_repeated`; barriers that reduce, metrics that are summed every step"},
    {"collective_left_out", K(CALLS), ARI_TRACE, ANY, 0, 0, 0, "",
     "fewer bytes move: a collective of the layout is not made" LOOK "ranks that happen to hold equal values"},
};

ARI_CAUSES(places)

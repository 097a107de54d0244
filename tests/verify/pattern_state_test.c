/* SPDX-License-Identifier: Apache-2.0 */
/* Traces of mistakes that show against the step before: stale gradients, Adam's counter, decay, shares of weights. */
#include "tests/verify/pattern_support.h"

VALUE(gradient_before, noise(i + 5000))
/* So many times the reference and so many times the gradient of the step before; elements below by[2] are right. */
VALUE(mixed, (float)i < w->by[2] ? x : w->by[0] * x + w->by[1] * noise(i + 5000))
VALUE(added_and_foreign, r == 0 ? x + noise(i + 5000) + 0.01f * noise(i + 900) : 2.0f * x)

static float of_micro_batches(const world *w, int r, size_t i, float x)
{
    float sum = 0.0f;
    (void)w, (void)r, (void)x;
    for (size_t k = 1; k <= 4; k++)
        sum += noise(7 * i + 1000003 * k);
    return sum;
}

static float divided_after_each(const world *w, int r, size_t i, float x)
{
    float sum = 0.0f;
    (void)w, (void)r, (void)x;
    for (size_t k = 1; k <= 4; k++)
        sum += (k > 2 ? 0.5f : 0.25f) * noise(7 * i + 1000003 * k);
    return sum;
}

VALUE(last_micro_batch, noise(7 * i + 4 * 1000003))
VALUE(all_but_two, i >= 2 ? noise(i + 4000) : x)
VALUE(all_but_twelve, i >= 12 ? noise(i + 4000) : x)

enum { COUNT = 96 };

/* A step moves weights by a thousandth of their size. */
VALUE(weight_before, noise(i))
VALUE(stepped, x + 1e-3f * noise(i + 77))
/* sqrt(1 - 0.999^2)/(1 - 0.9^2) of sqrt(1 - 0.999)/(1 - 0.9). */
#define SECOND_OF_FIRST 0.744136f
VALUE(update_scaled, noise(i) + w->by[r] * (x - noise(i)))
VALUE(update_right_and_scaled, r == 0 ? x : update_scaled(w, r, i, x))
VALUE(decay_missing_on_rank_1, r == 1 ? x + 1e-4f * noise(i) : x)
VALUE(decayed, x - 1e-4f * noise(i))
/* A third is rank 0's. */
VALUE(own_share, (i < COUNT / 3) == (r == 0) ? x : noise(i))
/* Two thirds. */
VALUE(shares_scaled, i < COUNT / 3 ? x : update_scaled(w, r, i, x))
VALUE(first_shares_right, i / 24 % 16 < 8 ? x : noise(i) + 1e-3f * noise(i + 900))
VALUE(own_scaled, r ? update_scaled(w, r, i, x) : x)
VALUE(own_decayed, r ? x - 1e-4f * noise(i) : x)
VALUE(shares_decayed, i < COUNT / 3 ? x : x - 1e-4f * noise(i))
VALUE(not_updated, noise(i))
VALUE(decayed_alone, noise(i) - 1e-5f * noise(i))
VALUE(misaligned, noise(i) + 1e-3f * noise((i + COUNT / 2) % COUNT + 77))

#define NORM "model.norm.weight"
#define LM_HEAD "lm_head.weight"
#define ADAM .step = 1, .beta1 = 0.9, .beta2 = 0.999
#define STEPPED OF(stepped), .before = weight_before

#define GRADIENT NORM, 'g', MESH(2, 1, -1, COUNT)
#define UPDATED NORM, 'n', MESH(2, 1, -1, COUNT)
#define HEAD LM_HEAD, 'g', MESH(1, 1, -1, 32, 24)
#define STEP_3 .last = gradient_before, KNOWN(.step = 3)
#define BOTH_BY(factor) BY(factor, factor)
#define SAMPLES .batch = 16, .seq = 8

static const trace traces[] = {
    {"the gradient of the step before", GRADIENT, mixed, CAUSE("gradient_of_last_step"), BY(0.0f, 1.0f),
     HINT("last step's value: every different element is the gradient of step 2, and nothing of"), STEP_3},
    {"in some elements", GRADIENT, mixed, CAUSE("gradient_of_last_step"), BY(0.0f, 1.0f, 40), HINT("last step's value"),
     STEP_3},
    {"twice that of the step before", GRADIENT, mixed, CAUSE("gradient_of_last_step"), BY(0.0f, 2.0f),
     HINT("the gradient of step 2 times 2, and nothing of this step's"), STEP_3},
    {"gradients that add up", GRADIENT, mixed, CAUSE("gradient_not_zeroed"), BY(1.0f, 1.0f),
     HINT("still in it: the gradient is the reference plus that of step 2"), STEP_3},
    {"gradients that add up with factors", GRADIENT, mixed, CAUSE("gradient_not_zeroed"), BY(0.5f, 2.0f),
     HINT("the gradient is 0.5 times the reference plus 2 times that of step 2"), STEP_3},
    {"a gradient without the last one", GRADIENT, mixed, BY(2.0f, 0.0f), CAUSE("reduced_again"), STEP_3},
    {"the last one and something foreign", GRADIENT, added_and_foreign, CAUSE("unknown"), STEP_3},
    {"one of several micro-batches", HEAD, last_micro_batch, CAUSE("one_micro_batch"), OF(of_micro_batches),
     HINT("as if one of 4 micro-batches counted"), KNOWN(SAMPLES, .micro_batches = 4)},
    {"two micro-batches, divided after each", HEAD, divided_after_each, CAUSE("accumulation_divided"),
     OF(of_micro_batches), HINT("divided by 2 after each of 2 micro-batches"), KNOWN(SAMPLES, .micro_batches = 2)},
    {"one of four parts", HEAD, last_micro_batch, OF(of_micro_batches), CAUSE("partial_sum"), NO("second forward pass"),
     KNOWN(SAMPLES)},
    {"of a recomputed input one of four parts may be foreign", HEAD, last_micro_batch, OF(of_micro_batches),
     CAUSE("partial_sum"), KNOWN(SAMPLES, .recomputed = true),
     HINT("or, where its input is recomputed, the second forward pass")},
    {"all but a few elements are no percentage", NORM, 'g', MESH(1, 1, -1, 1000), all_but_two,
     PATTERN("998 of 1000 elements, all but 2")},
    {"all but twelve are one", NORM, 'g', MESH(1, 1, -1, 1000), all_but_twelve, PATTERN("988 of 1000 elements (99%)")},
    {"the correction of another step of Adam", UPDATED, update_scaled, CAUSE("adam_step_counter"), STEPPED,
     BOTH_BY(SECOND_OF_FIRST), KNOWN(ADAM),
     HINT("as that of step 2 would be in step 1", "the counter was advanced without an update")},
    {"SGD has no correction", UPDATED, update_scaled, STEPPED, BOTH_BY(SECOND_OF_FIRST), CAUSE("update_scaled"),
     KNOWN(.step = 1)},
    /* The update times what the moments lack at step 1: 1 - beta1, and one over the root of 1 - beta2. */
    {"a first moment without correction", UPDATED, update_scaled, STEPPED, BOTH_BY(0.1f), CAUSE("adam_not_corrected"),
     HINT("first moment was"), KNOWN(ADAM)},
    {"a second moment without correction", UPDATED, update_scaled, STEPPED, BOTH_BY(31.6228f),
     CAUSE("adam_not_corrected"), HINT("second moment was"), KNOWN(ADAM)},
    {"moments without correction", UPDATED, update_scaled, STEPPED, BOTH_BY(3.16228f), CAUSE("adam_not_corrected"),
     HINT("moments were"), KNOWN(ADAM)},
    {"no moments of other betas", UPDATED, update_scaled, STEPPED, BOTH_BY(3.16228f), CAUSE("update_scaled"),
     KNOWN(.step = 1, .beta1 = 0.8, .beta2 = 0.99)},
    {"replicas that count their steps differently", UPDATED, update_right_and_scaled, CAUSE("adam_step_not_synced"),
     STEPPED, BY(1.0f, SECOND_OF_FIRST), KNOWN(ADAM),
     HINT("on rank 1 and not on the others that hold it: they count their steps differently")},
    {"replicas apart by a factor of no step", UPDATED, update_right_and_scaled, STEPPED, BY(1.0f, 0.8f),
     CAUSE("update_of_ranks_apart"), KNOWN(ADAM)},
    {"decay that did not reach a replica", UPDATED, decay_missing_on_rank_1, STEPPED, CAUSE("decay_of_ranks_apart"),
     KNOWN(.step = 1), HINT("0.0001 times the weight before the step, on rank 1 and not on the others")},
    {"shares of ranks that count their steps differently", UPDATED, shares_scaled, CAUSE("adam_step_not_synced"),
     STEPPED, BOTH_BY(SECOND_OF_FIRST), KNOWN(ADAM, .zero = true), HINT("the ranks whose shares these are")},
    {"shares that were updated by less", UPDATED, shares_scaled, CAUSE("update_of_ranks_apart"), STEPPED, BOTH_BY(0.8f),
     KNOWN(ADAM, .zero = true), HINT("0.8 times the expected, in what differs and not in the rest")},
    {"shares that are each rank's own", NORM, 'n', SHARDED(2, 0, 2 * COUNT), own_scaled, CAUSE("adam_step_not_synced"),
     STEPPED, BY(1.0f, SECOND_OF_FIRST), KNOWN(ADAM, .zero = true, RANKS(2, 1, 1)), HINT("in what differs and not")},
    {"shares of shards, of which the first is right", LM_HEAD, 'n', MESH(2, 2, 0, 32, 24), first_shares_right,
     CAUSE("shares_misaligned"), STEPPED, KNOWN(ADAM, .zero = true)},
    {"decay of shares that are each rank's own", NORM, 'n', SHARDED(2, 0, 2 * COUNT), own_decayed,
     CAUSE("decay_of_ranks_apart"), STEPPED, KNOWN(.step = 1, .zero = true, RANKS(2, 1, 1))},
    {"shares with more decay", UPDATED, shares_decayed, CAUSE("decay_of_ranks_apart"), STEPPED,
     KNOWN(.step = 1, .zero = true), HINT("0.0001 times the weight", "the ranks whose shares these are")},
    {"a part that was updated by less, without ZeRO", UPDATED, shares_scaled, CAUSE("unknown"), STEPPED, BOTH_BY(0.8f),
     KNOWN(ADAM)},
    {"more decay on both", UPDATED, decayed, STEPPED, CAUSE("weight_decay"), KNOWN(.step = 1)},
    {"shares that were not gathered", UPDATED, own_share, STEPPED, CAUSE("shares_not_gathered"),
     HINT("on 2 of 2 ranks"), KNOWN(.step = 1, .zero = true)},
    {"no shares without ZeRO", UPDATED, own_share, STEPPED, CAUSE("unknown"), KNOWN(.step = 1)},
    {"shares that do not line up", UPDATED, misaligned, STEPPED, CAUSE("shares_misaligned"),
     KNOWN(.step = 1, .zero = true)},
    {"shares that no rank has updated", UPDATED, not_updated, STEPPED, CAUSE("shares_misaligned"), HINT("no rank has"),
     KNOWN(.step = 1, .zero = true)},
    {"shares that have decay alone", UPDATED, decayed_alone, STEPPED, CAUSE("shares_misaligned"), HINT("no rank has"),
     KNOWN(.step = 1, .zero = true)},
    {"no shares to line up without ZeRO", UPDATED, misaligned, STEPPED, CAUSE("unknown"), KNOWN(.step = 1)},
};

Test(pattern_state, every_trace_is_named)
{
    EXPECT_TRACES(traces);
}

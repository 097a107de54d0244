/* SPDX-License-Identifier: Apache-2.0 */
/* Every corruption of a dump is named and located, beside equal bits and beside rounding; nothing is made of what is
 * rounding alone. */
#include "support/together.h"
#include "tests/verify/explain_spoil.h"

typedef void (*corruption)(float *x, const float *was, dumps *d);

typedef struct spoiled {
    const char *file, *tensor;
    corruption f;
    const char *cause, *where; /* causes.md; what the pattern contains */
    size_t heads, kv_heads;
    enum { BOTH, WITH, WITHOUT } rounding; /* beside which it is seen */
    bool much;                             /* the rule allows a tenth of the largest value */
} spoiled;

/* --- the table ---------------------------------------------------------------------------------------------------- */

#define LAYER "model.layers.1."
/* Named alike beside rounding; of a model of such heads; by a rule that allows much. */
#define ALIKE .rounding = BOTH
#define HEADS .heads = 8, .kv_heads = 2
#define MUCH .rounding = WITH, .much = true
static const spoiled cases[] = {
    {GQA_GRADS, LAYER "self_attn.o_proj.weight", quarter, "missing_all_reduce", "each 1/4", ALIKE},
    {GQA_GRADS, LAYER "input_layernorm.weight", four_times, "reduced_again", "each 4 times", ALIKE},
    {GQA_GRADS, LAYER "mlp.down_proj.weight", negate, "sign_flipped", "each -1 times", ALIKE},
    {GQA_GRADS, LAYER "mlp.up_proj.weight", loss_scale, "loss_scale", "each 2^16 times", ALIKE},
    {GQA_GRADS, LAYER "self_attn.q_proj.weight", one_shard_thrice, "reduced_again", "heads 2..3 of 8; shard 1 of 4",
     HEADS},
    {GQA_GRADS, "model.norm.weight", all_by_clipping, "clip_factor", "each 0.731 times", ALIKE},
    {GQA_GRADS, LAYER "mlp.gate_proj.weight", shards_by_their_norm, "scaled_by_rank", "each shard a constant", ALIKE},
    {GPT2_GRADS, "transformer.h.0.attn.c_attn.weight", zero_keys, "block_not_written",
     "columns 64..127; that is k of q|k|v", ALIKE},
    {GPT2_GRADS, "transformer.wte.weight", zero_one_id, "no_gradient", "id 5", ALIKE},
    {GQA_OUTPUTS, "hidden_states.1", scale_features, "gain_twice_or_missing", "all 4096", ALIKE},
    {GQA_MODEL, LAYER "mlp.up_proj.weight", scale_rows, "row_statistic", "all", ALIKE},
    {GQA_GRADS, LAYER "mlp.down_proj.weight", add_constant, "constant_added", "all", ALIKE},
    {GQA_GRADS, LAYER "mlp.down_proj.weight", clamp, "clipped", "each at a bound", ALIKE},
    {GQA_GRADS, LAYER "mlp.down_proj.weight", flip_exponent, "bit_flipped", "row 4, column 73", ALIKE},
    {GQA_GRADS, LAYER "mlp.up_proj.weight", not_a_number, "not_a_number", "row 10", ALIKE},
    {GQA_MODEL, LAYER "mlp.down_proj.weight", to_bf16, "fewer_bits", "bf16 precision", ALIKE},
    {GQA_MODEL, LAYER "mlp.down_proj.weight", cut_to_bf16, "fewer_bits", "bf16 precision", ALIKE},
    {GQA_MODEL, LAYER "mlp.down_proj.weight", to_int8, "quantised", "each a multiple", ALIKE},
    {GQA_GRADS, LAYER "mlp.up_proj.weight", rotate_shards, "shards_rotated", "another place", ALIKE},
    {GQA_GRADS, LAYER "mlp.up_proj.weight", repeat_shard, "shard_repeated", "rows 44..87; shard 1 of 4", ALIKE},
    {GQA_MODEL, LAYER "self_attn.q_proj.weight", roll_heads, "heads_rotated", "another place", HEADS},
    {GQA_MODEL, LAYER "self_attn.q_proj.weight", roll_heads, "heads_rotated", "another place", ALIKE},
    {GQA_GRADS, LAYER "self_attn.o_proj.weight", roll_head_columns, "heads_rotated", "another place", HEADS},
    {GQA_MODEL, LAYER "self_attn.q_proj.weight", swap_two_heads, "shards_misplaced", "another place", HEADS},
    {GQA_MODEL, LAYER "self_attn.q_proj.weight", interleave_rope, "rope_pairing", "another place", HEADS},
    {GQA_OUTPUTS, "hidden_states.1", rotate_tokens, "token_blocks_rotated", "another place", ALIKE},
    {GQA_OUTPUTS, "hidden_states.1", deal_tokens, "tokens_dealt_out", "another place", ALIKE},
    {GQA_OUTPUTS, "hidden_states.1", gather_what_was_dealt, "gathered_in_rank_order", "another place", ALIKE},
    {GQA_OUTPUTS, "hidden_states.1", roll_features, "rotated", "another place", ALIKE},
    {GQA_MODEL, LAYER "mlp.up_proj.weight", three_rows_on, "shifted", "another place", ALIKE},
    {GQA_MODEL, LAYER "mlp.up_proj.weight", one_row_again, "slices_repeated", "row 5", ALIKE},
    {GQA_OUTPUTS, "hidden_states.1", reverse_tokens, "sequence_reversed", "another place", ALIKE},
    {GQA_OUTPUTS, "hidden_states.1", gather_in_rank_order, "gathered_in_rank_order", "another place", ALIKE},
    {GPT2_MODEL, "transformer.h.0.attn.c_attn.weight", interleave_qkv, "packed_cut_as_one", "another place", ALIKE},
    {GPT2_MODEL, "transformer.h.0.attn.c_attn.weight", shard_qkv_as_one, "packed_cut_as_one", "columns 32..159", ALIKE},
    {GQA_MODEL, "model.embed_tokens.weight", roll_ids, "ids_off_by_one", "another place", ALIKE},
    {GQA_OUTPUTS, "hidden_states.2", swap_samples, "batch_order", "another place", ALIKE},
    {GQA_OUTPUTS, "hidden_states.1", shift_one_token, "tokens_shifted", "another place", ALIKE},
    {GQA_OUTPUTS, "hidden_states.1", one_sample_rotated, "token_blocks_rotated", "sample 1", ALIKE},
    {GQA_OUTPUTS, "hidden_states.1", zigzag_of_some_features, "zigzag_order", "features 16..23", ALIKE},
    {GQA_MODEL, "model.embed_tokens.weight", columns_again_in_some_rows, "shard_repeated", "columns 24..27", ALIKE},
    {GQA_GRADS, LAYER "self_attn.o_proj.weight", transpose_square, "weight_transposed", "transposed", ALIKE},
    {GPT2_MODEL, "transformer.h.0.mlp.c_fc.weight", transpose_under_old_shape, "weight_transposed", "transposed",
     ALIKE},
    {GQA_MODEL, LAYER "mlp.up_proj.weight", five_elements_on, "shifted_in_memory", "5 elements on", ALIKE},
    {GQA_GRADS, LAYER "mlp.up_proj.weight", swap_two_rows, "slices_exchanged", "rows 0..1", ALIKE},
    {GQA_MODEL, LAYER "self_attn.k_proj.weight", second_kv_head_is_the_first, "wrong_kv_head", "head 1 of 2", HEADS},
    {GQA_MODEL, LAYER "mlp.up_proj.weight", cut_with_gate, "packed_cut_as_one", "", ALIKE},
    {GQA_MODEL, LAYER "mlp.up_proj.weight", swap_layers, "other_layer", "another tensor's", ALIKE},
    {GQA_MODEL, LAYER "self_attn.k_proj.weight", value_for_key, "other_module", "another tensor's", ALIKE},
    {GQA_GRADS, LAYER "mlp.up_proj.weight", one_buffer, "one_buffer_for_two", "all", ALIKE},
    {GQA_OUTPUTS, "hidden_states.1", no_residual, "residual", "all", ALIKE},
    {GPT2_OUTPUTS, "hidden_states.1", bias_three_times, "bias_counted_again", "all 4096", ALIKE},
    {GQA_GRADS, LAYER "self_attn.o_proj.weight", one_of_four, "partial_sum", "all 4096", ALIKE},
    {GQA_MODEL, LAYER "mlp.up_proj.weight", other_weights_in_a_shard, "part_of_one_rank", "rows 44..87", ALIKE},
    {GQA_OUTPUTS, "hidden_states.1", drop_out, "dropout", "zero or 1.11111 times", ALIKE},
    {GQA_OUTPUTS, "hidden_states.1", drop_some, "dropout_without_scale", "each zero where", ALIKE},
    {GQA_OUTPUTS, "hidden_states.1", no_every_third_token, "rows_left_out", "each zero where", ALIKE},
    {GQA_MODEL, LAYER "mlp.up_proj.weight", zero_one_shard, "block_not_written", "rows 88..131", ALIKE},
    {GQA_MODEL, LAYER "mlp.up_proj.weight", fill_a_shard, "filled", "rows 44..87", ALIKE},
    {GQA_OUTPUTS, "hidden_states.1", norm_of_each_shard, "statistic_of_one_shard", "all 4096", ALIKE},
    {GQA_OUTPUTS, "loss", four_losses, "reduced_again", "the one value", ALIKE},
    {GQA_OUTPUTS, "loss", quarter_of_a_loss, "averaged_again", "the one value", ALIKE},
    {GQA_OUTPUTS, "loss", whole_vocabulary_on_each, "loss_of_all_vocabularies", "the one value", ALIKE},
    {GQA_GRADS, LAYER "mlp.up_proj.weight", negate, "sign_flipped", "", MUCH},
    {GQA_GRADS, LAYER "mlp.up_proj.weight", nearly_zero_one_shard, "block_not_written", "", MUCH},
    {GQA_GRADS, LAYER "mlp.up_proj.weight", three_quarters, "divisor_of_other_count", "", MUCH},
    {GQA_GRADS, LAYER "mlp.up_proj.weight", rotate_shards, "shards_rotated", "", MUCH},
    {GQA_GRADS, LAYER "mlp.up_proj.weight", two_stand_out, "rounding", "", .rounding = WITH},
    {GQA_GRADS, "model.norm.weight", one_step_off, "rounding", "", .rounding = WITHOUT},
};
enum { CASES = sizeof cases / sizeof *cases };

static ar_verify_row explained(const spoiled *s, bool rounding, ari_explain_case known)
{
    SCOPED(dumps_end) dumps d;
    ar_verify_row row;
    dumps_begin(&d, s->file, rounding);
    float *x = dumps_data(&d, s->tensor);
    const size_t count = dumps_count(&d, s->tensor);
    OWNED(free) float *was = malloc(count * sizeof *was);
    cr_assert_not_null(was);
    memcpy(was, x, count * sizeof *was);
    s->f(x, was, &d);
    known.heads = s->heads;
    known.kv_heads = s->kv_heads;
    known.atol = s->much ? 0.1 * (double)largest_of(was, count) : 0.0;
    dumps_explain(&row, &d, &s->tensor, 1, known);
    return row;
}

CLAIM(every_corruption_is_named_and_located)
{
    for (size_t i = 0; i < 2 * CASES; i++) {
        const spoiled *s = &cases[i / 2];
        if (s->rounding == (i % 2 ? WITHOUT : WITH))
            continue;
        const ar_verify_row row = explained(s, i % 2, (ari_explain_case){.atol = 0.0});
        expect_row(&row, s->cause, NULL, i / 2);
        cr_expect(strstr(row.pattern, s->where) && !strstr(row.hint, "{"), "case %zu: '%s' is not in '%s'", i / 2,
                  s->where, row.pattern);
    }
}

/* What would be a mistake of ranks is none of theirs where the other run is known to be of one, and no word of a plain
 * factor or part is of several. */
CLAIM(nothing_over_ranks_is_said_of_one)
{
    static const char *const over_ranks[] = {"missing_all_reduce", "part_of_one_rank", "loss_of_all_vocabularies"};
    for (size_t i = 0; i < CASES; i++) {
        const spoiled *s = &cases[i];
        const bool plain = s->f == quarter || s->f == four_times || s->f == one_of_four;
        bool over = false;
        for (size_t k = 0; k < 3; k++)
            over = over || strcmp(s->cause, over_ranks[k]) == 0;
        if (!plain && !over)
            continue;
        const ar_verify_row row = explained(s, false, (ari_explain_case){.mesh = {{0, 1, 1, 1, 1}}});
        cr_expect(row.evidence.cause && (!over || strcmp(row.evidence.cause, s->cause) != 0), "case %zu: %s", i,
                  row.hint);
        cr_expect(!plain || (!strstr(row.hint, "rank") && !strstr(row.hint, "tp") && !strstr(row.hint, "reduce")),
                  "case %zu: %s", i, row.hint);
    }
}

/* --- nothing is made of nothing ----------------------------------------------------------------------------------- */

/* Rounding is called so; noise as large as 16-bit arithmetic leaves, in no pattern, has no other cause either. */
CLAIM(noise_is_no_mistake)
{
    static const struct {
        const char *file;
        float noise; /* 0: rounding */
    } files[] = {{GQA_GRADS, 0.0f},  {MQA_GRADS, 0.0f},     {GPT2_MODEL, 0.0f}, {GPT2_OUTPUTS, 0.0f},
                 {GQA_MODEL, 4e-3f}, {GPT2_OUTPUTS, 4e-3f}, {GPT2_MODEL, 5e-4f}};
    for (size_t k = 0; k < sizeof files / sizeof *files; k++) {
        const float size = files[k].noise;
        SCOPED(dumps_end) dumps d;
        ar_verify_row row[MAX_TENSORS];
        dumps_begin(&d, files[k].file, size == 0.0f);
        for (size_t i = 0; i < d.n && size > 0.0f; i++) {
            for (size_t at = 0; at < dumps_count(&d, d.tensor[i].name); at++)
                d.data[i][at] += size * d.data[i][at] * noise(at + i) + size * 0.01f * noise(3 * at);
        }
        dumps_explain(row, &d, NULL, d.n, (ari_explain_case){.atol = 0.0});
        for (size_t i = 0; i < d.n; i++) {
            const char *cause = row[i].evidence.cause ? row[i].evidence.cause : "none";
            const bool rounding = strcmp(cause, "rounding") == 0,
                       fine = rounding || strcmp(cause, "unknown") == 0 || strcmp(cause, "low_precision") == 0;
            cr_expect(size > 0.0f ? fine
                                  : rounding || strstr(row[i].pattern, "no element differs") ||
                                        dumps_count(&d, row[i].name) < 5,
                      "%s, %s:\n  pattern %s\n  hint    %s", files[k].file, row[i].name, row[i].pattern, row[i].hint);
        }
    }
}

CLAIM(what_the_rule_allows_is_no_difference)
{
    SCOPED(dumps_end) dumps d;
    ar_verify_row row;
    static const char *const name[] = {"lm_head.weight"};
    dumps_begin(&d, GQA_GRADS, true);
    dumps_explain(&row, &d, name, 1, (ari_explain_case){.atol = 1.0});
    cr_expect(strstr(row.pattern, "no element differs") || strstr(row.pattern, "all within rounding"), "%s",
              row.pattern);
}

CLAIM(other_counts_are_refused)
{
    const ar_dump_tensor a = {.name = "w", .dtype = AR_F32, .ndim = 1, .shape = {4}, .count = 4}, b = {.name = "w"};
    ar_verify_row row = {.name = "w"};
    cr_expect_eq(ari_explain(&row, &a, &b, &(ari_explain_case){.atol = 0.0}), AR_ERR_ARG);
}

/* Beside itself with the same noise: what both dumps say of their numerics decides. */
CLAIM(of_two_exact_runs_nothing_is_rounding)
{
    for (size_t both = 0; both < 2; both++) {
        made m = {.metadata = {{"numerics", "exact"}, {both ? "numerics" : NULL, "exact"}}};
        (void)put(&m, "model.layers.1.mlp.up_proj.weight:grad", 2, 176, 64, 0);
        add_rounding(other_of(&m), UP);
        const ar_verify_row row = look(&m, (ari_explain_case){.atol = 0.0});
        expect_row(&row, both ? "small_change" : "rounding", NULL, both);
    }
}

/* All gradients, of ranks whose number is not known, or of one. */
CLAIM(a_factor_of_all_gradients_is_told_from_that_of_one)
{
    static const struct {
        float by;
        bool alone;
        const char *cause, *words;
    } of[] = {{3.0f, false, "reduced_again", "each divided by its own number of targets"},
              {1.0f / 3.0f, false, "averaged_again", "divided by their number twice"},
              {3.0f, true, "reduced_again", "a sum over 3 micro-batches"},
              {1.0f / 3.0f, true, "averaged_again", "by the number of micro-batches twice"}};
    for (size_t k = 0; k < sizeof of / sizeof *of; k++) {
        made m = {.metadata = {{"micro_batches", "3"}, {"micro_batches", "3"}}};
        for (size_t t = 0; t < 2; t++) {
            (void)put(&m, t ? "b.weight:grad" : "a.weight:grad", 2, 64, 64, 0);
            scale(other_of(&m), SQUARE, of[k].by);
        }
        const ar_verify_row row = look(&m, (ari_explain_case){.mesh = {{0, of[k].alone, of[k].alone, 1, of[k].alone}}});
        expect_row(&row, of[k].cause, of[k].words, k);
    }
}

CLAIM(a_loss_of_one_rank_is_over_no_ranks)
{
    const float loss[] = {2.5f, 0.625f, 10.0f, 2.53f};
    static const char *const causes[] = {"", "averaged_again", "reduced_again", "unknown"};
    const ar_st_tensor t[] = {{.name = "loss:fwd", .dtype = AR_F32, .ndim = 1, .shape = {1}},
                              {.name = "output:fwd", .dtype = AR_F32}};
    for (size_t i = 1; i < 4; i++) {
        made m = {.n = 0};
        put_pair(&m, t[i > 2], &loss[0], &loss[i]);
        const ar_verify_row row = look(&m, (ari_explain_case){.mesh = {{0, 1, 1, 1, 1}}});
        expect_row(&row, causes[i], i > 2 ? "the loss is off by" : NULL, i);
        cr_expect(!strstr(row.hint, "rank"), "case %zu: %s", i, row.hint);
    }
}

CLAIM(a_part_of_an_expert_s_gradient_is_told_by_its_own_ranks)
{
    made m = {.n = 0};
    const float *x = put(&m, "model.layers.0.mlp.experts.3.up_proj.weight:grad", 2, 64, 64, 0);
    for (size_t i = 0; i < SQUARE; i++)
        other_of(&m)[i] = 0.25f * x[i] + 0.43f * noise(i + 50000);
    const ar_verify_row row = look(&m, (ari_explain_case){.heads = 0});
    expect_row(&row, "partial_sum", "the ranks with copies of it alone (edp)", 0);
}

CLAIM(a_mask_the_other_way_round_is_told)
{
    uint8_t mask[2][128];
    made m = {.n = 0};
    for (size_t i = 0; i < 128; i++) {
        mask[0][i] = noise(i) > 0.0f;
        mask[1][i] = !mask[0][i];
    }
    put_pair(&m, (ar_st_tensor){.name = "mask", .dtype = AR_BOOL, .ndim = 2, .shape = {2, 64}}, mask[0], mask[1]);
    const ar_verify_row row = look(&m, (ari_explain_case){.heads = 0});
    expect_row(&row, "mask_inverted", NULL, 0);
}

enum { ROPE_SEQ = 24, ROPE_HEADS = 4, ROPE_HEAD = 8, ROPE = 2 * ROPE_SEQ * ROPE_HEADS * ROPE_HEAD };

/* x turned to position * by + from, with that theta; by 0: to positions that start again at every from-th, if any. */
static void turn(float *out, const float *x, double by, double from, double theta)
{
    for (size_t i = 0; i < ROPE; i++) {
        const size_t lane = i % ROPE_HEAD, pair = lane % (ROPE_HEAD / 2);
        const double at = (double)(i / (ROPE_HEADS * ROPE_HEAD) % ROPE_SEQ);
        const double position = by != 0.0 ? at * by + from : from != 0.0 ? copysign(fmod(at, from), from) : 0.0;
        const double angle = position * pow(theta, -2.0 * (double)pair / ROPE_HEAD);
        const double self = (double)x[i], half = lane < ROPE_HEAD / 2 ? -(double)x[i + 4] : (double)x[i - 4];
        out[i] = (float)(self * cos(angle) + half * sin(angle));
    }
}

/* A gradient is turned back, and is zero for the last token; a norm leaves the turn of its input as it is. */
CLAIM(other_angles_of_rope_are_told)
{
    static const struct {
        double by, from, theta;
        const char *cause;
    } cases_of_rope[] = {{1.0, 3.0, 1e4, "rope_offset"},
                         {0.0, 0.0, 1e4, "rope_missing"},
                         {-1.0, 0.0, 1e4, "rope_direction"},
                         {2.0, 0.0, 1e4, "rope_twice"},
                         {1.0, 0.0, 5e5, "rope_theta"},
                         {3.0, 0.0, 1e4, "rope_positions"},
                         {0.0, ROPE_SEQ / 3, 1e4, "rope_restarts"}};
    static float x[ROPE], y[ROPE], z[ROPE];
    const size_t wide = ROPE_HEADS * ROPE_HEAD;
    const ar_st_tensor values = {"model.layers.0.self_attn.q_rope:fwd", AR_F32, 3, {2, ROPE_SEQ, wide}, NULL},
                       gradients = {"model.layers.0.self_attn.k:bwd", AR_F32, 3, {2, ROPE_SEQ, wide}, NULL},
                       norms = {"model.layers.0.self_attn.q_norm:fwd",
                                AR_F32,
                                4,
                                {2, ROPE_SEQ, ROPE_HEADS, ROPE_HEAD},
                                NULL};
    for (size_t k = 0; k < 2 * sizeof cases_of_rope / sizeof *cases_of_rope + 1; k++) {
        made m = {.n = 0};
        const bool forward = k % 2 == 0, of_norm = k == 2 * sizeof cases_of_rope / sizeof *cases_of_rope;
        const double way = forward ? 1.0 : -1.0;
        for (size_t i = 0; i < ROPE; i++)
            x[i] = !forward && i / wide % ROPE_SEQ == ROPE_SEQ - 1 ? 0.0f : noise(i);
        if (of_norm) {
            turn(z, x, 1.0, 0.0, 1e4);
            put_pair(&m, norms, x, z);
        } else {
            turn(y, x, way, 0.0, 1e4);
            turn(z, x, way * cases_of_rope[k / 2].by, way * cases_of_rope[k / 2].from, cases_of_rope[k / 2].theta);
            put_pair(&m, forward ? values : gradients, y, z);
        }
        const ar_verify_row row = look(&m, (ari_explain_case){.heads = ROPE_HEADS});
        expect_row(&row, of_norm ? "norm_after_rope" : cases_of_rope[k / 2].cause, NULL, k);
    }
}

EVERY_CLAIM(explain)

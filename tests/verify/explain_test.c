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
} spoiled;

/* --- the table ---------------------------------------------------------------------------------------------------- */

#define LAYER "model.layers.1."
static const spoiled cases[] = {
    {GQA_GRADS, LAYER "self_attn.o_proj.weight", quarter, "missing_all_reduce", "each 1/4", 0, 0},
    {GQA_GRADS, LAYER "input_layernorm.weight", four_times, "reduced_again", "each 4 times", 0, 0},
    {GQA_GRADS, LAYER "mlp.down_proj.weight", negate, "sign_flipped", "each -1 times", 0, 0},
    {GQA_GRADS, LAYER "mlp.up_proj.weight", loss_scale, "loss_scale", "each 2^16 times", 0, 0},
    {GQA_GRADS, LAYER "self_attn.q_proj.weight", one_shard_thrice, "reduced_again", "heads 2..3 of 8; shard 1 of 4", 8,
     2},
    {GQA_GRADS, "model.norm.weight", all_by_clipping, "clip_factor", "each 0.731 times", 0, 0},
    {GQA_GRADS, LAYER "mlp.gate_proj.weight", shards_by_their_norm, "scaled_by_rank", "each shard a constant", 0, 0},
    {GPT2_GRADS, "transformer.h.0.attn.c_attn.weight", zero_keys, "block_not_written",
     "columns 64..127; that is k of q|k|v", 0, 0},
    {GPT2_GRADS, "transformer.wte.weight", zero_one_id, "no_gradient", "id 5", 0, 0},
    {GQA_GRADS, LAYER "mlp.down_proj.weight", add_constant, "constant_added", "all", 0, 0},
    {GQA_GRADS, LAYER "mlp.down_proj.weight", take_absolute, "absolute_value", "negative of the reference", 0, 0},
    {GQA_GRADS, LAYER "mlp.down_proj.weight", clamp, "clipped", "each at a bound", 0, 0},
    {GQA_GRADS, LAYER "mlp.down_proj.weight", flip_exponent, "bit_flipped", "row 4, column 73", 0, 0},
    {GQA_GRADS, LAYER "mlp.up_proj.weight", not_a_number, "not_a_number", "row 10", 0, 0},
    {GQA_MODEL, LAYER "mlp.down_proj.weight", to_bf16, "fewer_bits", "bf16 precision", 0, 0},
    {GQA_MODEL, LAYER "mlp.down_proj.weight", cut_to_bf16, "fewer_bits", "bf16 precision", 0, 0},
    {GQA_MODEL, LAYER "mlp.down_proj.weight", to_int8, "quantised", "each a multiple", 0, 0},
    {GQA_GRADS, LAYER "mlp.up_proj.weight", rotate_shards, "shards_rotated", "another place", 0, 0},
    {GQA_GRADS, LAYER "mlp.up_proj.weight", repeat_shard, "shard_repeated", "rows 44..87; shard 1 of 4", 0, 0},
    {GQA_MODEL, LAYER "self_attn.q_proj.weight", roll_heads, "heads_rotated", "another place", 8, 2},
    {GQA_MODEL, LAYER "self_attn.q_proj.weight", roll_heads, "heads_rotated", "another place", 0, 0},
    {GQA_GRADS, LAYER "self_attn.o_proj.weight", roll_head_columns, "heads_rotated", "another place", 8, 2},
    {GQA_MODEL, LAYER "self_attn.q_proj.weight", interleave_rope, "rope_pairing", "another place", 8, 2},
    {GQA_OUTPUTS, "hidden_states.1", rotate_tokens, "token_blocks_rotated", "another place", 0, 0},
    {GQA_OUTPUTS, "hidden_states.1", deal_tokens, "tokens_dealt_out", "another place", 0, 0},
    {GQA_OUTPUTS, "hidden_states.1", reverse_tokens, "sequence_reversed", "another place", 0, 0},
    {GQA_OUTPUTS, "hidden_states.1", gather_in_rank_order, "gathered_in_rank_order", "another place", 0, 0},
    {GPT2_MODEL, "transformer.h.0.attn.c_attn.weight", interleave_qkv, "packed_cut_as_one", "another place", 0, 0},
    {GPT2_MODEL, "transformer.h.0.attn.c_attn.weight", shard_qkv_as_one, "packed_cut_as_one", "columns 32..159", 0, 0},
    {GQA_MODEL, "model.embed_tokens.weight", roll_ids, "ids_off_by_one", "another place", 0, 0},
    {GQA_OUTPUTS, "hidden_states.2", swap_samples, "batch_order", "another place", 0, 0},
    {GQA_OUTPUTS, "hidden_states.1", shift_one_token, "tokens_shifted", "another place", 0, 0},
    {GQA_OUTPUTS, "hidden_states.1", one_sample_rotated, "token_blocks_rotated", "sample 1", 0, 0},
    {GQA_OUTPUTS, "hidden_states.1", zigzag_of_some_features, "zigzag_order", "features 16..23", 0, 0},
    {GQA_MODEL, "model.embed_tokens.weight", columns_again_in_some_rows, "shard_repeated", "columns 24..27", 0, 0},
    {GQA_GRADS, LAYER "self_attn.o_proj.weight", transpose_square, "weight_transposed", "transposed", 0, 0},
    {GPT2_MODEL, "transformer.h.0.mlp.c_fc.weight", transpose_under_old_shape, "weight_transposed", "transposed", 0, 0},
    {GQA_MODEL, LAYER "mlp.up_proj.weight", five_elements_on, "shifted_in_memory", "5 elements on", 0, 0},
    {GQA_GRADS, LAYER "mlp.up_proj.weight", swap_two_rows, "slices_exchanged", "rows 0..1", 0, 0},
    {GQA_MODEL, LAYER "self_attn.k_proj.weight", second_kv_head_is_the_first, "wrong_kv_head", "head 1 of 2", 8, 2},
    {GQA_MODEL, LAYER "mlp.up_proj.weight", cut_with_gate, "packed_cut_as_one", "", 0, 0},
    {GQA_MODEL, LAYER "mlp.up_proj.weight", swap_layers, "other_layer", "another tensor's", 0, 0},
    {GQA_MODEL, LAYER "mlp.up_proj.weight", swap_layers, "other_layer", "another tensor's", 0, 0},
    {GQA_MODEL, LAYER "self_attn.k_proj.weight", value_for_key, "other_module", "another tensor's", 0, 0},
    {GQA_GRADS, LAYER "mlp.up_proj.weight", one_buffer, "one_buffer_for_two", "all", 0, 0},
    {GQA_OUTPUTS, "hidden_states.1", no_residual, "residual", "all", 0, 0},
    {GPT2_OUTPUTS, "hidden_states.1", bias_three_times, "bias_counted_again", "all 4096", 0, 0},
    {GQA_GRADS, LAYER "self_attn.o_proj.weight", one_of_four, "partial_sum", "all 4096", 0, 0},
    {GQA_MODEL, LAYER "mlp.up_proj.weight", other_weights_in_a_shard, "part_of_one_rank", "rows 44..87", 0, 0},
    {GQA_OUTPUTS, "hidden_states.1", drop_out, "dropout", "zero or 1.11111 times", 0, 0},
    {GQA_OUTPUTS, "hidden_states.1", drop_some, "dropout_without_scale", "each zero where", 0, 0},
    {GQA_OUTPUTS, "hidden_states.1", no_every_third_token, "rows_left_out", "each zero where", 0, 0},
    {GQA_MODEL, LAYER "mlp.up_proj.weight", zero_one_shard, "block_not_written", "rows 88..131", 0, 0},
    {GQA_MODEL, LAYER "mlp.up_proj.weight", fill_a_shard, "filled", "rows 44..87", 0, 0},
    {GQA_OUTPUTS, "hidden_states.1", norm_of_each_shard, "statistic_of_one_shard", "all 4096", 0, 0},
    {GQA_OUTPUTS, "loss", four_losses, "reduced_again", "the one value", 0, 0},
    {GQA_OUTPUTS, "loss", whole_vocabulary_on_each, "loss_of_all_vocabularies", "the one value", 0, 0},
};
enum { CASES = sizeof cases / sizeof *cases };

static bool is_cause(const ar_verify_row *row, const char *cause)
{
    return row->evidence.cause && strcmp(row->evidence.cause, cause) == 0;
}

static void expect_named(const spoiled *s, size_t i, bool rounding)
{
    dumps d;
    dumps_begin(&d, s->file, rounding);
    const size_t at = dumps_index(&d, s->tensor), count = dumps_count(&d, s->tensor);
    float *was = malloc(count * sizeof *was);
    memcpy(was, d.data[at], count * sizeof *was);
    s->f(d.data[at], was, &d);
    dumps_write(&d);
    const ar_verify_row row = explained(&d, s->tensor, (ari_explain_case){.heads = s->heads, .kv_heads = s->kv_heads});
    cr_expect(is_cause(&row, s->cause) && strstr(row.pattern, s->where) && !strstr(row.hint, "{"),
              "case %zu, %s%s:\n  expected '%s', '%s'\n  pattern %s\n  hint    %s", i, s->tensor,
              rounding ? " with rounding" : "", s->cause, s->where, row.pattern, row.hint);
    free(was);
    dumps_end(&d);
}

CLAIM(every_corruption_is_named_and_located)
{
    for (size_t i = 0; i < 2 * CASES; i++)
        expect_named(&cases[i / 2], i / 2, i % 2);
}

/* Where the other run is known to be of one rank, no cause and no word is of several. */
CLAIM(nothing_over_ranks_is_said_of_one)
{
    const corruption alone[] = {quarter, four_times, one_of_four};
    const char *name = LAYER "self_attn.o_proj.weight";
    for (size_t i = 0; i < sizeof alone / sizeof *alone; i++) {
        SCOPED(dumps_end) dumps d;
        dumps_begin(&d, GQA_GRADS, false);
        const size_t at = dumps_index(&d, name), count = dumps_count(&d, name);
        float *was = malloc(count * sizeof *was);
        memcpy(was, d.data[at], count * sizeof *was);
        alone[i](d.data[at], was, &d);
        free(was);
        dumps_write(&d);
        const ar_verify_row row = explained(&d, name, (ari_explain_case){.mesh = {{0, 1, 1, 1, 1}}});
        cr_expect(!strstr(row.hint, "rank") && !strstr(row.hint, "tp") && !strstr(row.hint, "reduce"), "case %zu: %s",
                  i, row.hint);
    }
}

/* What would be a mistake of ranks is none of theirs where there is one. */
CLAIM(no_cause_over_ranks_is_said_of_one)
{
    static const char *const over_ranks[] = {"missing_all_reduce", "part_of_one_rank", "loss_of_all_vocabularies"};
    for (size_t i = 0; i < 3 * CASES; i++) {
        const spoiled *s = &cases[i / 3];
        if (strcmp(s->cause, over_ranks[i % 3]) != 0)
            continue;
        SCOPED(dumps_end) dumps d;
        dumps_begin(&d, s->file, false);
        const size_t at = dumps_index(&d, s->tensor), count = dumps_count(&d, s->tensor);
        float *was = malloc(count * sizeof *was);
        memcpy(was, d.data[at], count * sizeof *was);
        s->f(d.data[at], was, &d);
        free(was);
        dumps_write(&d);
        const ar_verify_row row = explained(&d, s->tensor, (ari_explain_case){.mesh = {{0, 1, 1, 1, 1}}});
        cr_expect(row.evidence.cause && !is_cause(&row, s->cause), "case %zu, %s: %s", i / 3, s->tensor, row.hint);
    }
}

/* --- nothing is made of nothing ----------------------------------------------------------------------------------- */

static void expect_only_rounding(const char *file)
{
    SCOPED(dumps_end) dumps d;
    dumps_begin(&d, file, true);
    dumps_write(&d);
    for (size_t i = 0; i < d.n; i++) {
        const ar_verify_row row = explained(&d, d.tensor[i].name, (ari_explain_case){0});
        cr_expect(is_cause(&row, "rounding") || strstr(row.pattern, "no element differs") ||
                      dumps_count(&d, d.tensor[i].name) < 5,
                  "%s:\n  pattern %s\n  hint    %s", d.tensor[i].name, row.pattern, row.hint);
    }
}

CLAIM(rounding_is_called_rounding)
{
    expect_only_rounding(GQA_GRADS);
    expect_only_rounding(MQA_GRADS);
    expect_only_rounding(GPT2_MODEL);
    expect_only_rounding(GPT2_OUTPUTS);
}

/* Noise as large as 16-bit arithmetic leaves, in no pattern: no cause but that may be named. */
static void expect_no_cause(const char *file, float size)
{
    static const char *const fine[] = {"rounding", "low_precision", "unknown"};
    SCOPED(dumps_end) dumps d;
    dumps_begin(&d, file, false);
    for (size_t i = 0; i < d.n; i++) {
        for (size_t k = 0; k < dumps_count(&d, d.tensor[i].name); k++)
            d.data[i][k] += size * d.data[i][k] * noise(k + i) + size * 0.01f * noise(3 * k);
    }
    dumps_write(&d);
    for (size_t i = 0; i < d.n; i++) {
        const ar_verify_row row = explained(&d, d.tensor[i].name, (ari_explain_case){0});
        bool right = false;
        for (size_t k = 0; k < sizeof fine / sizeof *fine; k++)
            right = right || is_cause(&row, fine[k]);
        cr_expect(right, "%s:\n  pattern %s\n  hint    %s", d.tensor[i].name, row.pattern, row.hint);
    }
}

CLAIM(noise_of_low_precision_is_no_mistake)
{
    expect_no_cause(GQA_MODEL, 4e-3f);
    expect_no_cause(GPT2_OUTPUTS, 4e-3f);
    expect_no_cause(GPT2_MODEL, 5e-4f);
}

/* A rule that allows a tenth of the largest value, and a mistake that is larger: its trace is sought in the noise that
 * is there, and never called rounding. */
CLAIM(a_rule_that_allows_much_hides_no_cause)
{
    static const struct {
        corruption f;
        const char *cause;
    } large[] = {{negate, "sign_flipped"},
                 {nearly_zero_one_shard, "block_not_written"},
                 {three_quarters, "divisor_of_other_count"},
                 {rotate_shards, "shards_rotated"}};
    for (size_t i = 0; i < sizeof large / sizeof *large; i++) {
        dumps d;
        const char *name = LAYER "mlp.up_proj.weight";
        float *was = malloc(UP * sizeof *was);
        dumps_begin(&d, GQA_GRADS, true);
        memcpy(was, dumps_data(&d, name), UP * sizeof *was);
        large[i].f(dumps_data(&d, name), was, &d);
        dumps_write(&d);
        const ar_verify_row row = explained(&d, name, (ari_explain_case){.atol = 0.1 * (double)largest_of(was, UP)});
        cr_expect(is_cause(&row, large[i].cause), "case %zu:\n  pattern %s\n  hint    %s", i, row.pattern, row.hint);
        free(was);
        dumps_end(&d);
    }
}

/* What is said of a tensor whose data is another's in the other dump. */
static ar_verify_row explained_beside(ar_st_tensor t, const void *data, ari_explain_case known)
{
    SCOPED(dumps_end) dumps d = {.n = 0};
    char reference[64];
    snprintf(reference, sizeof reference, "/tmp/anyrank-beside-%ld-a.safetensors", (long)getpid());
    snprintf(d.path, sizeof d.path, "/tmp/anyrank-beside-%ld-b.safetensors", (long)getpid());
    cr_assert_ok(ar_st_write(reference, &t, 1, NULL, 0));
    t.data = data;
    cr_assert_ok(ar_st_write(d.path, &t, 1, NULL, 0));
    cr_assert_ok(ar_dump_open(&d.reference, reference, NULL));
    cr_assert_ok(ar_dump_open(&d.other, d.path, NULL));
    const ar_verify_row row = explained(&d, t.name, known);
    unlink(reference);
    return row;
}

CLAIM(a_loss_of_one_rank_is_over_no_ranks)
{
    const float loss[] = {2.5f, 0.625f, 10.0f};
    const char *const causes[] = {"", "averaged_again", "reduced_again"};
    const ar_st_tensor t = {.name = "loss:fwd", .dtype = AR_F32, .ndim = 1, .shape = {1}, .data = &loss[0]};
    for (int i = 1; i < 3; i++) {
        const ar_verify_row row = explained_beside(t, &loss[i], (ari_explain_case){.mesh = {{0, 1, 1, 1, 1}}});
        cr_expect(is_cause(&row, causes[i]) && !strstr(row.hint, "rank"), "case %d: %s", i, row.hint);
    }
}

CLAIM(a_mask_the_other_way_round_is_told)
{
    uint8_t mask[2][128];
    for (size_t i = 0; i < 128; i++) {
        mask[0][i] = noise(i) > 0.0f;
        mask[1][i] = !mask[0][i];
    }
    const ar_st_tensor t = {.name = "mask", .dtype = AR_BOOL, .ndim = 2, .shape = {2, 64}, .data = mask[0]};
    const ar_verify_row row = explained_beside(t, mask[1], (ari_explain_case){.heads = 0});
    cr_expect(is_cause(&row, "mask_inverted"), "%s", row.hint);
}

/* --- rotary embeddings -------------------------------------------------------------------------------------------- */

enum { ROPE_SEQ = 24, ROPE_HEADS = 4, ROPE_HEAD = 8, ROPE = 2 * ROPE_SEQ * ROPE_HEADS * ROPE_HEAD };

/* x turned to position * by + from, with that theta. */
static void turn(float *out, const float *x, double by, double from, double theta)
{
    for (size_t i = 0; i < ROPE; i++) {
        const size_t lane = i % ROPE_HEAD, pair = lane % (ROPE_HEAD / 2);
        const double position = (double)(i / (ROPE_HEADS * ROPE_HEAD) % ROPE_SEQ) * by + from;
        const double angle = position * pow(theta, -2.0 * (double)pair / ROPE_HEAD);
        const double self = (double)x[i], half = lane < ROPE_HEAD / 2 ? -(double)x[i + 4] : (double)x[i - 4];
        out[i] = (float)(self * cos(angle) + half * sin(angle));
    }
}

/* way: 1 forward; -1: of a gradient, which is turned back, and is zero for the last token. */
static void expect_rope(double way, double by, double from, double theta, const char *cause)
{
    static float x[ROPE], y[ROPE], z[ROPE];
    const ar_st_tensor t = {.name =
                                way > 0.0 ? "model.layers.0.self_attn.q_rope:fwd" : "model.layers.0.self_attn.k:bwd",
                            .dtype = AR_F32,
                            .ndim = 3,
                            .shape = {2, ROPE_SEQ, ROPE_HEADS * ROPE_HEAD},
                            .data = y};
    for (size_t i = 0; i < ROPE; i++)
        x[i] = way < 0.0 && i / (ROPE_HEADS * ROPE_HEAD) % ROPE_SEQ == ROPE_SEQ - 1 ? 0.0f : noise(i);
    turn(y, x, way, 0.0, 1e4);
    turn(z, x, way * by, way * from, theta);
    const ar_verify_row row = explained_beside(t, z, (ari_explain_case){.heads = ROPE_HEADS});
    cr_expect(is_cause(&row, cause), "expected %s\n  hint %s", cause, row.hint);
}

CLAIM(other_angles_of_rope_are_told)
{
    for (int way = -1; way <= 1; way += 2) {
        expect_rope(way, 1.0, 3.0, 1e4, "rope_offset");
        expect_rope(way, 0.0, 0.0, 1e4, "rope_missing");
        expect_rope(way, -1.0, 0.0, 1e4, "rope_direction");
        expect_rope(way, 2.0, 0.0, 1e4, "rope_twice");
        expect_rope(way, 1.0, 0.0, 5e5, "rope_theta");
        expect_rope(way, 3.0, 0.0, 1e4, "rope_positions");
    }
}

/* A norm leaves the turn of its input as it is. */
CLAIM(a_norm_of_what_was_turned_already_is_told)
{
    static float x[ROPE], z[ROPE];
    const ar_st_tensor t = {.name = "model.layers.0.self_attn.q_norm:fwd",
                            .dtype = AR_F32,
                            .ndim = 4,
                            .shape = {2, ROPE_SEQ, ROPE_HEADS, ROPE_HEAD},
                            .data = x};
    for (size_t i = 0; i < ROPE; i++)
        x[i] = noise(i);
    turn(z, x, 1.0, 0.0, 1e4);
    const ar_verify_row row = explained_beside(t, z, (ari_explain_case){.heads = ROPE_HEADS});
    cr_expect(is_cause(&row, "norm_after_rope"), "%s", row.hint);
}

CLAIM(what_the_rule_allows_is_no_difference)
{
    SCOPED(dumps_end) dumps d;
    dumps_begin(&d, GQA_GRADS, true);
    dumps_write(&d);
    const ar_verify_row row = explained(&d, "lm_head.weight", (ari_explain_case){.atol = 1.0});
    cr_expect(strstr(row.pattern, "no element differs") || strstr(row.pattern, "all within rounding"), "%s",
              row.pattern);
}

CLAIM(other_counts_are_refused)
{
    SCOPED(dumps_end) dumps d;
    dumps_begin(&d, GQA_GRADS, false);
    dumps_write(&d);
    ar_verify_row row = {.name = "lm_head.weight"};
    const ari_explain_case c = {0};
    cr_expect_eq(
        ari_explain(&row, ar_dump_find(d.reference, "lm_head.weight"), ar_dump_find(d.other, "model.norm.weight"), &c),
        AR_ERR_ARG);
}

/* Of a little noise everywhere a few elements stand out; that is no write to one place. */
CLAIM(the_tail_of_rounding_is_rounding)
{
    SCOPED(dumps_end) dumps d;
    dumps_begin(&d, GQA_GRADS, true);
    float *x = dumps_data(&d, "model.layers.1.mlp.up_proj.weight");
    const float largest = largest_of(x, UP);
    x[700] += 2e-5f * largest;
    x[9000] -= 3e-5f * largest;
    dumps_write(&d);
    const ar_verify_row row = explained(&d, "model.layers.1.mlp.up_proj.weight", (ari_explain_case){0});
    cr_expect(is_cause(&row, "rounding"), "%s", row.hint);
}

/* A unit in the last place is no flipped bit. */
CLAIM(one_element_a_step_off_is_rounding)
{
    SCOPED(dumps_end) dumps d;
    dumps_begin(&d, GQA_GRADS, false);
    float *x = dumps_data(&d, "model.norm.weight");
    x[7] = nextafterf(x[7], 1.0f);
    dumps_write(&d);
    const ar_verify_row row = explained(&d, "model.norm.weight", (ari_explain_case){0});
    cr_expect(is_cause(&row, "rounding"), "%s", row.hint);
}

/* Beside itself with the same noise: what both dumps say of their numerics decides. */
CLAIM(of_two_exact_runs_nothing_is_rounding)
{
    static const char *const exact[] = {"numerics", "exact"};
    const char *name = "model.layers.1.mlp.up_proj.weight";
    SCOPED(dumps_end) dumps d;
    dumps_begin(&d, GQA_GRADS, false);
    snprintf(d.reference_path, sizeof d.reference_path, "/tmp/anyrank-explain-%ld-exact", (long)getpid());
    cr_assert_ok(ar_st_write(d.reference_path, d.tensor, d.n, exact, 1));
    add_rounding(dumps_data(&d, name), UP);
    for (size_t both = 0; both < 2; both++) {
        cr_assert_ok(ar_st_write(d.path, d.tensor, d.n, exact, both));
        cr_assert_ok(ar_dump_open(&d.reference, d.reference_path, NULL));
        cr_assert_ok(ar_dump_open(&d.other, d.path, NULL));
        const ar_verify_row row = explained(&d, name, (ari_explain_case){0});
        cr_expect(is_cause(&row, both ? "small_change" : "rounding"), "%s", row.hint);
        ar_dump_close(d.reference);
        ar_dump_close(d.other);
    }
    d.reference = d.other = NULL;
    unlink(d.reference_path);
}

CLAIM(the_same_dumps_give_the_same_texts)
{
    SCOPED(dumps_end) dumps d;
    dumps_begin(&d, GPT2_GRADS, true);
    scale(dumps_data(&d, "transformer.h.1.attn.c_proj.weight"), 2048, 3.0f);
    dumps_write(&d);
    const ar_verify_row a = explained(&d, "transformer.h.1.attn.c_proj.weight", (ari_explain_case){0});
    const ar_verify_row b = explained(&d, "transformer.h.1.attn.c_proj.weight", (ari_explain_case){0});
    cr_expect_str_eq(a.hint, b.hint);
    cr_expect_str_eq(a.pattern, b.pattern);
}

EVERY_CLAIM(explain)

/* SPDX-License-Identifier: Apache-2.0 */
/* Every corruption of a dump is named and located, beside equal bits and beside rounding; nothing is made of what is
 * rounding alone. */
#include "tests/verify/explain_support.h"

TestSuite(explain, .timeout = 30);

typedef void (*corruption)(float *x, const float *was, dumps *d);

typedef struct spoiled {
    const char *file, *tensor;
    corruption f;
    const char *hint, *where; /* what the texts contain */
    size_t heads, kv_heads;
} spoiled;

/* --- values ---------------------------------------------------------------------------------------------------------
 */

enum { SQUARE = 64 * 64, UP = 176 * 64, C_ATTN = 64 * 192, HIDDEN = 2 * 32 * 64 };

static void scale(float *x, size_t n, float by)
{
    for (size_t i = 0; i < n; i++)
        x[i] *= by;
}

static void quarter(float *x, const float *was, dumps *d)
{
    (void)was, (void)d;
    scale(x, SQUARE, 0.25f);
}

static void four_times(float *x, const float *was, dumps *d)
{
    (void)was, (void)d;
    scale(x, 64, 4.0f);
}

static void negate(float *x, const float *was, dumps *d)
{
    (void)was, (void)d;
    scale(x, UP, -1.0f);
}

static void loss_scale(float *x, const float *was, dumps *d)
{
    (void)was, (void)d;
    scale(x, UP, 65536.0f);
}

static void one_shard_thrice(float *x, const float *was, dumps *d)
{
    (void)was, (void)d;
    scale(x + 16 * 64, 16 * 64, 3.0f);
}

static void all_by_clipping(float *x, const float *was, dumps *d)
{
    (void)x, (void)was;
    for (size_t i = 0; i < d->n; i++)
        scale(d->data[i], dumps_count(d, d->tensor[i].name), 0.731f);
}

static void shards_by_their_norm(float *x, const float *was, dumps *d)
{
    (void)was, (void)d;
    static const float by[] = {0.5f, 2.0f, 1.5f, 0.9f};
    for (size_t k = 0; k < 4; k++)
        scale(x + k * 44 * 64, 44 * 64, by[k]);
}

static void zero_keys(float *x, const float *was, dumps *d)
{
    (void)was, (void)d;
    for (size_t row = 0; row < 64; row++)
        scale(x + row * 192 + 64, 64, 0.0f);
}

static void add_constant(float *x, const float *was, dumps *d)
{
    (void)was, (void)d;
    for (size_t i = 0; i < UP; i++)
        x[i] += 0.01f;
}

static void take_absolute(float *x, const float *was, dumps *d)
{
    (void)was, (void)d;
    for (size_t i = 0; i < UP; i++)
        x[i] = fabsf(x[i]);
}

static void clamp(float *x, const float *was, dumps *d)
{
    (void)was, (void)d;
    for (size_t i = 0; i < UP; i++)
        x[i] = fminf(fmaxf(x[i], -0.004f), 0.004f);
}

static void flip_exponent(float *x, const float *was, dumps *d)
{
    (void)was, (void)d;
    uint32_t u;
    memcpy(&u, &x[777], sizeof u);
    u ^= 1u << 27;
    memcpy(&x[777], &u, sizeof u);
}

static void not_a_number(float *x, const float *was, dumps *d)
{
    (void)was, (void)d;
    for (size_t i = 640; i < 704; i++)
        x[i] = NAN;
}

static void to_bf16(float *x, const float *was, dumps *d)
{
    (void)was, (void)d;
    for (size_t i = 0; i < UP; i++) {
        uint32_t u;
        memcpy(&u, &x[i], sizeof u);
        u = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
        memcpy(&x[i], &u, sizeof u);
    }
}

static void cut_to_bf16(float *x, const float *was, dumps *d)
{
    (void)was, (void)d;
    for (size_t i = 0; i < UP; i++) {
        uint32_t u;
        memcpy(&u, &x[i], sizeof u);
        u &= 0xffff0000u;
        memcpy(&x[i], &u, sizeof u);
    }
}

static void to_int8(float *x, const float *was, dumps *d)
{
    (void)was, (void)d;
    float largest = 0.0f;
    for (size_t i = 0; i < UP; i++)
        largest = fmaxf(largest, fabsf(x[i]));
    for (size_t i = 0; i < UP; i++)
        x[i] = nearbyintf(x[i] / largest * 127.0f) * (largest / 127.0f);
}

/* --- places ---------------------------------------------------------------------------------------------------------
 */

/* Slices of `inner` elements: slice i of each run of n gets that of place(i). */
static void move(float *x, const float *was, size_t count, size_t n, size_t inner, size_t (*place)(size_t))
{
    for (size_t i = 0; i < count / inner; i++)
        memcpy(x + i * inner, was + (i / n * n + place(i % n)) * inner, inner * sizeof *x);
}

static size_t next_shard(size_t i)
{
    return (i + 44) % 176;
}

static size_t first_twice(size_t i)
{
    return i >= 44 && i < 88 ? i - 44 : i;
}

static size_t head_before(size_t i)
{
    return (i + 56) % 64;
}

static size_t pairs_from_halves(size_t i)
{
    return i / 8 * 8 + i % 2 * 4 + i % 8 / 2;
}

static size_t token_blocks(size_t i)
{
    return (i + 8) % 32;
}

static size_t backwards(size_t i)
{
    return 31 - i;
}

static size_t gate_up(size_t i)
{
    return i % 3 * 64 + i / 3;
}

static size_t two_shards(size_t i)
{
    return i / 32 % 3 * 64 + i / 96 * 32 + i % 32;
}

static size_t next_id(size_t i)
{
    return (i + 1) % 256;
}

static size_t gathered(size_t i)
{
    return i / 8 % 2 * 32 + i / 16 * 8 + i % 8;
}

static void rotate_shards(float *x, const float *was, dumps *d)
{
    (void)d;
    move(x, was, UP, 176, 64, next_shard);
}

static void repeat_shard(float *x, const float *was, dumps *d)
{
    (void)d;
    move(x, was, UP, 176, 64, first_twice);
}

static void roll_heads(float *x, const float *was, dumps *d)
{
    (void)d;
    move(x, was, SQUARE, 64, 64, head_before);
}

static void roll_head_columns(float *x, const float *was, dumps *d)
{
    (void)d;
    move(x, was, SQUARE, 64, 1, head_before);
}

static void interleave_rope(float *x, const float *was, dumps *d)
{
    (void)d;
    move(x, was, SQUARE, 64, 64, pairs_from_halves);
}

static void rotate_tokens(float *x, const float *was, dumps *d)
{
    (void)d;
    move(x, was, HIDDEN, 32, 64, token_blocks);
}

static void reverse_tokens(float *x, const float *was, dumps *d)
{
    (void)d;
    move(x, was, HIDDEN, 32, 64, backwards);
}

static void gather_in_rank_order(float *x, const float *was, dumps *d)
{
    (void)d;
    move(x, was, HIDDEN, 64, 64, gathered);
}

static void interleave_qkv(float *x, const float *was, dumps *d)
{
    (void)d;
    move(x, was, C_ATTN, 192, 1, gate_up);
}

static void shard_qkv_as_one(float *x, const float *was, dumps *d)
{
    (void)d;
    move(x, was, C_ATTN, 192, 1, two_shards);
}

static void roll_ids(float *x, const float *was, dumps *d)
{
    (void)d;
    move(x, was, 256 * 64, 256, 64, next_id);
}

static void swap_samples(float *x, const float *was, dumps *d)
{
    (void)d;
    memcpy(x, was + HIDDEN / 2, HIDDEN / 2 * sizeof *x);
    memcpy(x + HIDDEN / 2, was, HIDDEN / 2 * sizeof *x);
}

static void shift_one_token(float *x, const float *was, dumps *d)
{
    (void)d;
    for (size_t sample = 0; sample < 2; sample++) {
        memcpy(x + sample * 2048 + 64, was + sample * 2048, (2048 - 64) * sizeof *x);
        memset(x + sample * 2048, 0, 64 * sizeof *x);
    }
}

static void one_sample_rotated(float *x, const float *was, dumps *d)
{
    (void)d;
    move(x + HIDDEN / 2, was + HIDDEN / 2, HIDDEN / 2, 32, 64, token_blocks);
}

static void transpose(float *x, const float *was, size_t rows, size_t cols)
{
    for (size_t i = 0; i < rows; i++) {
        for (size_t k = 0; k < cols; k++)
            x[k * rows + i] = was[i * cols + k];
    }
}

static void transpose_square(float *x, const float *was, dumps *d)
{
    (void)d;
    transpose(x, was, 64, 64);
}

static void transpose_under_old_shape(float *x, const float *was, dumps *d)
{
    (void)d;
    transpose(x, was, 64, 256);
}

static void five_elements_on(float *x, const float *was, dumps *d)
{
    (void)d;
    memcpy(x, was + 5, (UP - 5) * sizeof *x);
}

static void swap_two_rows(float *x, const float *was, dumps *d)
{
    (void)d;
    memcpy(x, was + 64, 64 * sizeof *x);
    memcpy(x + 64, was, 64 * sizeof *x);
}

static void second_kv_head_is_the_first(float *x, const float *was, dumps *d)
{
    (void)d;
    memcpy(x + 8 * 64, was, (size_t)8 * 64 * sizeof *x);
}

/* --- other tensors ------------------------------------------------------------------------------------------------ */

static void swap_layers(float *x, const float *was, dumps *d)
{
    float *other = dumps_data(d, "model.layers.0.mlp.up_proj.weight");
    memcpy(x, other, UP * sizeof *x);
    memcpy(other, was, UP * sizeof *x);
}

static void value_for_key(float *x, const float *was, dumps *d)
{
    (void)was;
    memcpy(x, dumps_data(d, "model.layers.1.self_attn.v_proj.weight"), (size_t)16 * 64 * sizeof *x);
}

static void no_residual(float *x, const float *was, dumps *d)
{
    const float *before = dumps_data(d, "hidden_states.0");
    for (size_t i = 0; i < HIDDEN; i++)
        x[i] = was[i] - before[i];
}

static void bias_three_times(float *x, const float *was, dumps *d)
{
    (void)d;
    for (size_t i = 0; i < HIDDEN; i++)
        x[i] = was[i] + 3.0f * noise(i % 64);
}

/* --- parts
 * ------------------------------------------------------------------------------------------------------------ */

/* What one of four equal and unrelated contributions to a sum looks like. */
static void one_of_four(float *x, const float *was, dumps *d)
{
    (void)d;
    double square = 0.0, of_noise = 0.0;
    for (size_t i = 0; i < SQUARE; i++) {
        square += (double)was[i] * (double)was[i];
        of_noise += (double)noise(i) * (double)noise(i);
    }
    const float size = (float)(sqrt(3.0 / 16.0) * sqrt(square / of_noise));
    for (size_t i = 0; i < SQUARE; i++)
        x[i] = 0.25f * was[i] + size * noise(i);
}

static void other_weights_in_a_shard(float *x, const float *was, dumps *d)
{
    (void)was, (void)d;
    for (size_t i = 44 * 64; i < 88 * 64; i++)
        x[i] = 0.02f * noise(i);
}

static void four_losses(float *x, const float *was, dumps *d)
{
    (void)was, (void)d;
    x[0] *= 4.0f;
}

static void whole_vocabulary_on_each(float *x, const float *was, dumps *d)
{
    (void)was, (void)d;
    x[0] += 0.693147181f;
}

/* --- the table
 * ---------------------------------------------------------------------------------------------------------- */

#define LAYER "model.layers.1."
static const spoiled cases[] = {
    {GQA_GRADS, LAYER "self_attn.o_proj.weight", quarter, "missing all-reduce over tp or dp of 4", "each 1/4", 0, 0},
    {GQA_GRADS, LAYER "input_layernorm.weight", four_times, "a factor of exactly 4", "each 4 times", 0, 0},
    {GQA_GRADS, LAYER "mlp.down_proj.weight", negate, "the sign is flipped", "each -1 times", 0, 0},
    {GQA_GRADS, LAYER "mlp.up_proj.weight", loss_scale, "loss scale", "each 2^16 times", 0, 0},
    {GQA_GRADS, LAYER "self_attn.q_proj.weight", one_shard_thrice, "a factor of exactly 3",
     "heads 2..3 of 8; shard 1 of 4", 8, 2},
    {GQA_GRADS, "model.norm.weight", all_by_clipping, "gradient-clipping factor", "each 0.731 times", 0, 0},
    {GQA_GRADS, LAYER "mlp.gate_proj.weight", shards_by_their_norm,
     "each of 4 shards of the rows has a factor of its own", "each shard a constant", 0, 0},
    {GPT2_GRADS, "transformer.h.0.attn.c_attn.weight", zero_keys, "a block of zeros",
     "columns 64..127; that is k of q|k|v", 0, 0},
    {GQA_GRADS, LAYER "mlp.down_proj.weight", add_constant, "a constant was added: the difference is 0.01", "all", 0,
     0},
    {GQA_GRADS, LAYER "mlp.down_proj.weight", take_absolute, "the absolute value", "negative of the reference", 0, 0},
    {GQA_GRADS, LAYER "mlp.down_proj.weight", clamp, "clipped: all", "each at a bound", 0, 0},
    {GQA_GRADS, LAYER "mlp.down_proj.weight", flip_exponent, "one bit flipped: bit 27, of the exponent, of [4, 73]",
     "row 4, column 73", 0, 0},
    {GQA_GRADS, LAYER "mlp.up_proj.weight", not_a_number, "not a number in 64", "row 10", 0, 0},
    {GQA_MODEL, LAYER "mlp.down_proj.weight", to_bf16, "rounded to bf16", "bf16 precision", 0, 0},
    {GQA_MODEL, LAYER "mlp.down_proj.weight", cut_to_bf16, "truncated (cut off, not rounded) to bf16", "bf16 precision",
     0, 0},
    {GQA_MODEL, LAYER "mlp.down_proj.weight", to_int8, "quantised", "each a multiple", 0, 0},
    {GQA_GRADS, LAYER "mlp.up_proj.weight", rotate_shards, "shards in rotated order: block k of 4 has block k+1",
     "another place", 0, 0},
    {GQA_GRADS, LAYER "mlp.up_proj.weight", repeat_shard, "duplicated: block 1 has 0's", "rows 44..87; shard 1 of 4", 0,
     0},
    {GQA_MODEL, LAYER "self_attn.q_proj.weight", roll_heads, "off by one: by 1 head: head i has head i-1's",
     "another place", 8, 2},
    {GQA_MODEL, LAYER "self_attn.q_proj.weight", roll_heads, "off by one: by 1 head", "another place", 0, 0},
    {GQA_GRADS, LAYER "self_attn.o_proj.weight", roll_head_columns, "off by one: by 1 head", "another place", 8, 2},
    {GQA_MODEL, LAYER "self_attn.q_proj.weight", interleave_rope, "RoPE: halves are interleaved", "another place", 8,
     2},
    {GQA_OUTPUTS, "hidden_states.1", rotate_tokens, "rotated token blocks: block k of 4", "another place", 0, 0},
    {GQA_OUTPUTS, "hidden_states.1", reverse_tokens, "sequence reversed", "another place", 0, 0},
    {GQA_OUTPUTS, "hidden_states.1", gather_in_rank_order, "tokens gathered over 4 ranks left one part after the other",
     "another place", 0, 0},
    {GPT2_MODEL, "transformer.h.0.attn.c_attn.weight", interleave_qkv, "interleaved: 3 runs of 64", "another place", 0,
     0},
    {GPT2_MODEL, "transformer.h.0.attn.c_attn.weight", shard_qkv_as_one, "a packed tensor (q|k|v) cut into shards",
     "columns 32..159", 0, 0},
    {GQA_MODEL, "model.embed_tokens.weight", roll_ids, "off-by-one ids", "another place", 0, 0},
    {GQA_OUTPUTS, "hidden_states.2", swap_samples, "batch order", "another place", 0, 0},
    {GQA_OUTPUTS, "hidden_states.1", shift_one_token, "shifted by 1 token: token i has that of i - 1", "another place",
     0, 0},
    {GQA_OUTPUTS, "hidden_states.1", one_sample_rotated, "rotated token blocks: block k of 4", "sample 1", 0, 0},
    {GQA_GRADS, LAYER "self_attn.o_proj.weight", transpose_square, "transposed", "transposed", 0, 0},
    {GPT2_MODEL, "transformer.h.0.mlp.c_fc.weight", transpose_under_old_shape, "reshaped, not transposed back",
     "transposed", 0, 0},
    {GQA_MODEL, LAYER "mlp.up_proj.weight", five_elements_on, "shifted in memory", "5 elements on", 0, 0},
    {GQA_GRADS, LAYER "mlp.up_proj.weight", swap_two_rows, "exchanged: row 0 has 1's", "rows 0..1", 0, 0},
    {GQA_MODEL, LAYER "self_attn.k_proj.weight", second_kv_head_is_the_first, "KV head r mod n_kv", "head 1 of 2", 8,
     2},
    {GQA_MODEL, LAYER "mlp.up_proj.weight", swap_layers,
     "the values of model.layers.0.mlp.up_proj.weight in the reference", "another tensor's", 0, 0},
    {GQA_MODEL, LAYER "mlp.up_proj.weight", swap_layers, "that one has this one's: the two are exchanged",
     "another tensor's", 0, 0},
    {GQA_MODEL, LAYER "self_attn.k_proj.weight", value_for_key, "the values of model.layers.1.self_attn.v_proj.weight",
     "another tensor's", 0, 0},
    {GQA_OUTPUTS, "hidden_states.1", no_residual, "hidden_states.0 is missing", "all", 0, 0},
    {GPT2_OUTPUTS, "hidden_states.1", bias_three_times, "a bias counted more than once", "all 4096", 0, 0},
    {GQA_GRADS, LAYER "self_attn.o_proj.weight", one_of_four, "a partial sum: cosine with the reference 0.5",
     "all 4096", 0, 0},
    {GQA_MODEL, LAYER "mlp.up_proj.weight", other_weights_in_a_shard, "only shard 1 of 4 along dimension 0",
     "rows 44..87", 0, 0},
    {GQA_OUTPUTS, "loss", four_losses, "a factor of 4", "the one value", 0, 0},
    {GQA_OUTPUTS, "loss", whole_vocabulary_on_each, "log(2)", "the one value", 0, 0},
};
enum { CASES = sizeof cases / sizeof *cases };

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
    cr_expect(strstr(row.hint, s->hint) && strstr(row.pattern, s->where),
              "case %zu, %s%s:\n  expected '%s', '%s'\n  pattern %s\n  hint    %s", i, s->tensor,
              rounding ? " with rounding" : "", s->hint, s->where, row.pattern, row.hint);
    free(was);
    dumps_end(&d);
}

Test(explain, every_corruption_is_named_and_located)
{
    for (size_t i = 0; i < CASES; i++)
        expect_named(&cases[i], i, false);
}

Test(explain, every_corruption_is_named_and_located_beside_rounding)
{
    for (size_t i = 0; i < CASES; i++)
        expect_named(&cases[i], i, true);
}

/* --- nothing is made of nothing ----------------------------------------------------------------------------------- */

static void expect_only_rounding(const char *file)
{
    dumps d;
    dumps_begin(&d, file, true);
    dumps_write(&d);
    for (size_t i = 0; i < d.n; i++) {
        const ar_verify_row row = explained(&d, d.tensor[i].name, (ari_explain_case){0});
        cr_expect(strstr(row.hint, "rounding: the largest difference") || strstr(row.pattern, "no element differs") ||
                      dumps_count(&d, d.tensor[i].name) < 5,
                  "%s:\n  pattern %s\n  hint    %s", d.tensor[i].name, row.pattern, row.hint);
    }
    dumps_end(&d);
}

Test(explain, rounding_is_called_rounding)
{
    expect_only_rounding(GQA_GRADS);
    expect_only_rounding(MQA_GRADS);
    expect_only_rounding(GPT2_MODEL);
    expect_only_rounding(GPT2_OUTPUTS);
}

/* Noise as large as 16-bit arithmetic leaves, in no pattern: no cause but that may be named. */
static void expect_no_cause(const char *file, float size)
{
    static const char *const fine[] = {"rounding", "no known trace", "if this is the first difference",
                                       "no known pattern"};
    dumps d;
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
            right = right || strncmp(row.hint, fine[k], strlen(fine[k])) == 0;
        cr_expect(right, "%s:\n  pattern %s\n  hint    %s", d.tensor[i].name, row.pattern, row.hint);
    }
    dumps_end(&d);
}

Test(explain, noise_of_low_precision_is_no_mistake)
{
    expect_no_cause(GQA_MODEL, 4e-3f);
    expect_no_cause(GPT2_OUTPUTS, 4e-3f);
    expect_no_cause(GPT2_MODEL, 5e-4f);
}

Test(explain, what_the_rule_allows_is_no_difference)
{
    dumps d;
    dumps_begin(&d, GQA_GRADS, true);
    dumps_write(&d);
    const ar_verify_row row = explained(&d, "lm_head.weight", (ari_explain_case){.atol = 1.0});
    cr_expect(strstr(row.pattern, "no element differs") || strstr(row.pattern, "all within rounding"), "%s",
              row.pattern);
    dumps_end(&d);
}

Test(explain, other_counts_are_refused)
{
    dumps d;
    dumps_begin(&d, GQA_GRADS, false);
    dumps_write(&d);
    ar_verify_row row = {.name = "lm_head.weight"};
    const ari_explain_case c = {0};
    cr_expect_eq(
        ari_explain(&row, ar_dump_find(d.reference, "lm_head.weight"), ar_dump_find(d.other, "model.norm.weight"), &c),
        AR_ERR_ARG);
    dumps_end(&d);
}

/* Of a little noise everywhere a few elements stand out; that is no write to one place. */
Test(explain, the_tail_of_rounding_is_rounding)
{
    dumps d;
    dumps_begin(&d, GQA_GRADS, true);
    float *x = dumps_data(&d, "model.layers.1.mlp.up_proj.weight");
    float largest = 0.0f;
    for (size_t i = 0; i < UP; i++)
        largest = fmaxf(largest, fabsf(x[i]));
    x[700] += 2e-5f * largest;
    x[9000] -= 3e-5f * largest;
    dumps_write(&d);
    const ar_verify_row row = explained(&d, "model.layers.1.mlp.up_proj.weight", (ari_explain_case){0});
    cr_expect_eq(strncmp(row.hint, "rounding: the largest", 21), 0, "%s", row.hint);
    dumps_end(&d);
}

/* A unit in the last place is no flipped bit. */
Test(explain, one_element_a_step_off_is_rounding)
{
    dumps d;
    dumps_begin(&d, GQA_GRADS, false);
    float *x = dumps_data(&d, "model.norm.weight");
    x[7] = nextafterf(x[7], 1.0f);
    dumps_write(&d);
    const ar_verify_row row = explained(&d, "model.norm.weight", (ari_explain_case){0});
    cr_expect_eq(strncmp(row.hint, "rounding: the largest", 21), 0, "%s", row.hint);
    dumps_end(&d);
}

Test(explain, the_same_dumps_give_the_same_texts)
{
    dumps d;
    dumps_begin(&d, GPT2_GRADS, true);
    scale(dumps_data(&d, "transformer.h.1.attn.c_proj.weight"), 2048, 3.0f);
    dumps_write(&d);
    const ar_verify_row a = explained(&d, "transformer.h.1.attn.c_proj.weight", (ari_explain_case){0});
    const ar_verify_row b = explained(&d, "transformer.h.1.attn.c_proj.weight", (ari_explain_case){0});
    cr_expect_str_eq(a.hint, b.hint);
    cr_expect_str_eq(a.pattern, b.pattern);
    dumps_end(&d);
}

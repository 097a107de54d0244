/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_VERIFY_EXPLAIN_SPOIL_H
#define TESTS_VERIFY_EXPLAIN_SPOIL_H

/* Ways to spoil a tensor: x is changed in place, `was` is what it held. */
#include "tests/verify/explain_support.h"

/* --- values ------------------------------------------------------------------------------------------------------- */

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

static void three_quarters(float *x, const float *was, dumps *d)
{
    (void)was, (void)d;
    scale(x, UP, 0.75f);
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

/* --- places ------------------------------------------------------------------------------------------------------- */

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

static size_t dealt(size_t i)
{
    return i % 4 * 8 + i / 4;
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

static void deal_tokens(float *x, const float *was, dumps *d)
{
    (void)d;
    move(x, was, HIDDEN, 32, 64, dealt);
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

/* Both names have what was written last. */
static void one_buffer(float *x, const float *was, dumps *d)
{
    float *second = dumps_data(d, "model.layers.1.mlp.gate_proj.weight");
    (void)was;
    for (size_t i = 0; i < UP; i++)
        x[i] = second[i] = 0.01f * noise(i + 5000);
}

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

/* --- parts -------------------------------------------------------------------------------------------------------- */

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

/* --- what is not there -------------------------------------------------------------------------------------------- */

static void drop_out(float *x, const float *was, dumps *d)
{
    (void)was, (void)d;
    for (size_t i = 0; i < HIDDEN; i++)
        x[i] = noise(3 * i) < -0.8f ? 0.0f : x[i] / 0.9f;
}

static void drop_some(float *x, const float *was, dumps *d)
{
    (void)was, (void)d;
    for (size_t i = 0; i < HIDDEN; i++)
        x[i] = noise(3 * i) < -0.8f ? 0.0f : x[i];
}

static void no_every_third_token(float *x, const float *was, dumps *d)
{
    (void)was, (void)d;
    for (size_t token = 0; token < 64; token += 3)
        scale(x + token * 64, 64, 0.0f);
}

static void zero_one_shard(float *x, const float *was, dumps *d)
{
    (void)was, (void)d;
    scale(x + 88 * 64, 44 * 64, 0.0f);
}

/* What sums that cancel leave of zeros. */
static void nearly_zero_one_shard(float *x, const float *was, dumps *d)
{
    (void)was, (void)d;
    for (size_t i = 88 * 64; i < 132 * 64; i++)
        x[i] = 1e-8f * noise(i);
}

static void fill_a_shard(float *x, const float *was, dumps *d)
{
    (void)was, (void)d;
    for (size_t i = 44 * 64; i < 88 * 64; i++)
        x[i] = 1e30f;
}

/* A root mean square over 16 features at a time in place of 64. */
static void norm_of_each_shard(float *x, const float *was, dumps *d)
{
    (void)d;
    for (size_t at = 0; at < HIDDEN; at += 16) {
        float square = 1e-6f;
        for (size_t i = at; i < at + 16; i++)
            square += was[i] * was[i] / 16.0f;
        scale(x + at, 16, 1.0f / sqrtf(square));
    }
}

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A reference dump from PyTorch and a second one that a test spoils: every tensor of the reference, with or without the
 * rounding that another program's sums would leave. Ways to spoil one: x is changed in place, `was` is what it held. */
#include "ref/io/safetensors_private.h"
#include "tests/verify/two_dumps.h"

#define GQA_GRADS "llama-gqa-tiny/grads.safetensors"
#define GQA_MODEL "llama-gqa-tiny/model.safetensors"
#define GQA_OUTPUTS "llama-gqa-tiny/outputs.safetensors"
#define MQA_GRADS "llama-mqa-tied-tiny/grads.safetensors"
#define GPT2_GRADS "gpt2-tiny/grads.safetensors"
#define GPT2_MODEL "gpt2-tiny/model.safetensors"
#define GPT2_OUTPUTS "gpt2-tiny/outputs.safetensors"

enum { MAX_TENSORS = 64 };

typedef struct dumps {
    char reference[512];
    ar_st_file *file;
    ar_st_tensor tensor[MAX_TENSORS];
    float *data[MAX_TENSORS];
    size_t n;
} dumps;

static inline float largest_of(const float *x, size_t n)
{
    float largest = 0.0f;
    for (size_t i = 0; i < n; i++)
        largest = fmaxf(largest, fabsf(x[i]));
    return largest;
}

/* Sums in another order: up to 3e-6 of the largest element. */
static inline void add_rounding(float *x, size_t n)
{
    const float largest = largest_of(x, n);
    for (size_t i = 0; i < n; i++)
        x[i] += 3e-6f * largest * noise(i + n);
}

static inline void dumps_begin(dumps *d, const char *file, bool rounding)
{
    memset(d, 0, sizeof *d);
    snprintf(d->reference, sizeof d->reference, "%s/%s", TEST_GOLDEN_DIR, file);
    cr_assert_ok(ari_st_open(&d->file, d->reference));
    d->n = ari_st_tensor_count(d->file);
    cr_assert(d->n < MAX_TENSORS);
    for (size_t i = 0; i < d->n; i++) {
        const ar_st_entry *e = ari_st_at(d->file, i);
        d->data[i] = malloc(e->count * sizeof(float));
        cr_assert_ok(ari_st_to_f32(e, d->data[i]));
        if (rounding)
            add_rounding(d->data[i], e->count);
        d->tensor[i] = (ar_st_tensor){.name = e->name, .dtype = AR_F32, .ndim = e->ndim, .data = d->data[i]};
        memcpy(d->tensor[i].shape, e->shape, sizeof e->shape);
    }
}

static inline size_t dumps_index(const dumps *d, const char *name)
{
    size_t i = 0;
    while (i < d->n && strcmp(d->tensor[i].name, name) != 0)
        i++;
    cr_assert(i < d->n, "no tensor %s", name);
    return i;
}

static inline float *dumps_data(dumps *d, const char *name)
{
    return d->data[dumps_index(d, name)];
}

static inline size_t dumps_count(const dumps *d, const char *name)
{
    return ari_st_find(d->file, name)->count;
}

/* What is said of some of its tensors, or of all. */
static inline void dumps_explain(ar_verify_row *row, const dumps *d, const char *const *names, size_t n,
                                 ari_explain_case c)
{
    SCOPED(two_files_end) two_files f = two_files_make();
    OWNED(ar_dump_close) ar_dump *reference = NULL, *other = NULL;
    snprintf(f.other, sizeof f.other, "%s%s", f.folder, strrchr(d->reference, '/')); /* a name that says the pass */
    write_tensors(f.other, d->tensor, d->n);
    cr_assert_ok(ar_dump_open(&reference, d->reference, NULL));
    cr_assert_ok(ar_dump_open(&other, f.other, NULL));
    c.reference = reference;
    c.other = other;
    for (size_t i = 0; i < n; i++) {
        row[i] = (ar_verify_row){.name = names ? names[i] : d->tensor[i].name};
        const ar_dump_tensor *a = ar_dump_find(reference, row[i].name), *b = ar_dump_find(other, row[i].name);
        cr_assert(a && b, "no tensor %s", row[i].name);
        cr_assert_eq(ari_explain(&row[i], a, b, &c), AR_OK, "%s: %s", row[i].name, ar_error_message());
    }
}

static inline void dumps_end(dumps *d)
{
    ari_st_close(d->file);
    for (size_t i = 0; i < d->n; i++)
        free(d->data[i]);
}

#define SPOIL(name, statement)                             \
    static void name(float *x, const float *was, dumps *d) \
    {                                                      \
        (void)x, (void)was, (void)d;                       \
        statement;                                         \
    }
/* Elements [from, to) become this, of i. */
#define EACH(name, from, to, expression)                   \
    static void name(float *x, const float *was, dumps *d) \
    {                                                      \
        (void)was, (void)d;                                \
        for (size_t i = (from); i < (size_t)(to); i++)     \
            x[i] = (expression);                           \
    }
/* Slices of `inner` elements: slice i of each run of n gets that of `place`. */
#define MOVE(name, from, to, n, inner, place)                                                        \
    static void name(float *x, const float *was, dumps *d)                                           \
    {                                                                                                \
        (void)d;                                                                                     \
        for (size_t k = (size_t)(from) / (inner); k < (size_t)(to) / (inner); k++) {                 \
            const size_t i = k % (n);                                                                \
            memcpy(x + k * (inner), was + (k / (n) * (n) + (place)) * (inner), (inner) * sizeof *x); \
        }                                                                                            \
    }

enum { SQUARE = 64 * 64, UP = 176 * 64, C_ATTN = 64 * 192, HIDDEN = 2 * 32 * 64 };

static void scale(float *x, size_t n, float by)
{
    for (size_t i = 0; i < n; i++)
        x[i] *= by;
}

static float with_bits(float x, uint32_t add, uint32_t keep, uint32_t flip)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    u = ((u + add) & keep) ^ flip;
    memcpy(&x, &u, sizeof u);
    return x;
}

/* The last bit that bf16 has, which a tie goes to. */
static uint32_t last_of_bf16(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return (u >> 16) & 1u;
}

SPOIL(quarter, scale(x, SQUARE, 0.25f))
SPOIL(four_times, scale(x, 64, 4.0f))
SPOIL(negate, scale(x, UP, -1.0f))
SPOIL(three_quarters, scale(x, UP, 0.75f))
SPOIL(loss_scale, scale(x, UP, 65536.0f))
SPOIL(one_shard_thrice, scale(x + 16 * 64, 16 * 64, 3.0f))
SPOIL(all_by_clipping, for (size_t i = 0; i < d->n; i++) scale(d->data[i], dumps_count(d, d->tensor[i].name), 0.731f))
EACH(shards_by_their_norm, 0, UP, x[i] * (i < 44 * 64 ? 0.5f : i < 88 * 64 ? 2.0f : i < 132 * 64 ? 1.5f : 0.9f))
EACH(zero_keys, 0, C_ATTN, i / 64 % 3 == 1 ? 0.0f : x[i])
EACH(add_constant, 0, UP, x[i] + 0.01f)
EACH(scale_features, 0, HIDDEN, x[i] * (1.5f + 0.4f * noise(i % 64 + 9)))
EACH(scale_rows, 0, UP, x[i] * (1.5f + 0.4f * noise(i / 64 + 9)))
EACH(clamp, 0, UP, fminf(fmaxf(x[i], -0.004f), 0.004f))
EACH(flip_exponent, 777, 778, with_bits(x[i], 0, ~0u, 1u << 27))
EACH(not_a_number, 640, 704, NAN)
EACH(to_bf16, 0, UP, with_bits(x[i], 0x7fffu + last_of_bf16(x[i]), 0xffff0000u, 0))
EACH(cut_to_bf16, 0, UP, with_bits(x[i], 0, 0xffff0000u, 0))

static void to_int8(float *x, const float *was, dumps *d)
{
    const float largest = largest_of(was, UP);
    (void)d;
    for (size_t i = 0; i < UP; i++)
        x[i] = nearbyintf(x[i] / largest * 127.0f) * (largest / 127.0f);
}

MOVE(rotate_shards, 0, UP, 176, 64, (i + 44) % 176)
MOVE(repeat_shard, 0, UP, 176, 64, i >= 44 && i < 88 ? i - 44 : i)
MOVE(roll_heads, 0, SQUARE, 64, 64, (i + 56) % 64)
MOVE(roll_head_columns, 0, SQUARE, 64, 1, (i + 56) % 64)
MOVE(swap_two_heads, 0, SQUARE, 64, 64, i / 8 == 1 ? i + 40 : i / 8 == 6 ? i - 40 : i)
MOVE(interleave_rope, 0, SQUARE, 64, 64, i / 8 * 8 + i % 2 * 4 + i % 8 / 2)
MOVE(rotate_tokens, 0, HIDDEN, 32, 64, (i + 8) % 32)
MOVE(deal_tokens, 0, HIDDEN, 32, 64, i % 4 * 8 + i / 4)
MOVE(reverse_tokens, 0, HIDDEN, 32, 64, 31 - i)
/* Each of 4 ranks has every fourth token of both samples; parts left one after the other. */
MOVE(gather_what_was_dealt, 0, HIDDEN, 64, 64, i % 16 * 4 + i / 16)
MOVE(roll_features, 0, HIDDEN, 64, 1, (i + 5) % 64)
MOVE(one_row_again, 0, UP, 176, 64, i == 5 ? 4 : i)
EACH(three_rows_on, 0, UP, i < 3 * 64 ? 0.01f * noise(i) : was[i - 3 * 64])
MOVE(gather_in_rank_order, 0, HIDDEN, 64, 64, i / 8 % 2 * 32 + i / 16 * 8 + i % 8)
MOVE(interleave_qkv, 0, C_ATTN, 192, 1, i % 3 * 64 + i / 3)
MOVE(shard_qkv_as_one, 0, C_ATTN, 192, 1, i / 32 % 3 * 64 + i / 96 * 32 + i % 32)
MOVE(roll_ids, 0, 256 * 64, 256, 64, (i + 1) % 256)
MOVE(swap_samples, 0, HIDDEN, 2, HIDDEN / 2, 1 - i)
MOVE(one_sample_rotated, HIDDEN / 2, HIDDEN, 32, 64, (i + 8) % 32)
MOVE(swap_two_rows, 0, 128, 2, 64, 1 - i)
EACH(second_kv_head_is_the_first, 8 * 64, 16 * 64, was[i - 8 * 64])
EACH(shift_one_token, 0, HIDDEN, i % 2048 < 64 ? 0.0f : was[i - 64])
/* Of 32 rows 4 columns are those 24 before: no shift of what is in memory. */
EACH(columns_again_in_some_rows, 0, 32 * 64, i % 64 / 4 == 6 ? was[i - 24] : x[i])
/* Of four chunks of tokens 0, 3, 1, 2, and that for 8 of 64 features. */
EACH(zigzag_of_some_features, 0, HIDDEN,
     was[i / 8 % 8 != 2     ? i
         : i / 512 % 4 == 0 ? i
         : i / 512 % 4 == 1 ? i + 1024
                            : i - 512])
EACH(transpose_square, 0, SQUARE, was[i % 64 * 64 + i / 64])
EACH(transpose_under_old_shape, 0, 64 * 256, was[i % 64 * 256 + i / 64])
EACH(five_elements_on, 0, UP - 5, was[i + 5])

/* Both names have what was written last. */
EACH(one_buffer, 0, UP, dumps_data(d, "model.layers.1.mlp.gate_proj.weight")[i] = 0.01f * noise(i + 5000))
EACH(no_residual, 0, HIDDEN, was[i] - dumps_data(d, "hidden_states.0")[i])
EACH(bias_three_times, 0, HIDDEN, was[i] + 3.0f * noise(i % 64))
SPOIL(value_for_key, memcpy(x, dumps_data(d, "model.layers.1.self_attn.v_proj.weight"), (size_t)16 * 64 * sizeof *x))

static void swap_layers(float *x, const float *was, dumps *d)
{
    float *other = dumps_data(d, "model.layers.0.mlp.up_proj.weight");
    memcpy(x, other, UP * sizeof *x);
    memcpy(other, was, UP * sizeof *x);
}

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

EACH(other_weights_in_a_shard, 44 * 64, 88 * 64, 0.02f * noise(i))
SPOIL(four_losses, x[0] *= 4.0f)
SPOIL(quarter_of_a_loss, x[0] *= 0.25f)
SPOIL(whole_vocabulary_on_each, x[0] += 0.693147181f)

EACH(drop_out, 0, HIDDEN, noise(3 * i) < -0.8f ? 0.0f : x[i] / 0.9f)
EACH(drop_some, 0, HIDDEN, noise(3 * i) < -0.8f ? 0.0f : x[i])
EACH(no_every_third_token, 0, HIDDEN, i / 64 % 3 == 0 ? 0.0f : x[i])
EACH(cut_with_gate, 0, 88 * 64, dumps_data(d, "model.layers.1.mlp.gate_proj.weight")[i + 88 * 64])
EACH(zero_one_id, 5 * 64, 6 * 64, 0.0f)
EACH(zero_one_shard, 88 * 64, 132 * 64, 0.0f)
/* What sums that cancel leave of zeros. */
EACH(nearly_zero_one_shard, 88 * 64, 132 * 64, 1e-8f * noise(i))
EACH(fill_a_shard, 44 * 64, 88 * 64, 1e30f)
/* Of a little noise everywhere a few elements stand out; that is no write to one place. */
static void two_stand_out(float *x, const float *was, dumps *d)
{
    (void)d;
    x[700] += 2e-5f * largest_of(was, UP);
    x[9000] -= 3e-5f * largest_of(was, UP);
}
/* A unit in the last place is no flipped bit. */
SPOIL(one_step_off, x[7] = nextafterf(x[7], 1.0f))

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

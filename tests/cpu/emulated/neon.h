/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* The vector instructions of ref/cpu/exact/arm.c in plain C, written from the pseudocode of Arm's Architecture Reference
 * Manual (DDI 0487: SMMLA, SDOT by element, SMLAL and SMLAL2 by element) under the names of the Arm C Language
 * Extensions: tests run that file by them on any processor. Lane 0 is the lowest. int32 sums wrap, as the instructions'
 * do. */

typedef struct int8x16_t {
    int8_t lane[16];
} int8x16_t;

typedef struct int32x4_t {
    int32_t lane[4];
} int32x4_t;

typedef struct int32x2_t {
    int32_t lane[2];
} int32x2_t;

typedef struct int64x2_t {
    int64_t lane[2];
} int64x2_t;

static inline int8x16_t vld1q_s8(const int8_t *from)
{
    int8x16_t r;
    memcpy(r.lane, from, sizeof r.lane);
    return r;
}

static inline int32x4_t vld1q_s32(const int32_t *from)
{
    int32x4_t r;
    memcpy(r.lane, from, sizeof r.lane);
    return r;
}

static inline int64x2_t vld1q_s64(const int64_t *from)
{
    int64x2_t r;
    memcpy(r.lane, from, sizeof r.lane);
    return r;
}

static inline void vst1_s32(int32_t *to, int32x2_t a)
{
    memcpy(to, a.lane, sizeof a.lane);
}

static inline void vst1q_s32(int32_t *to, int32x4_t a)
{
    memcpy(to, a.lane, sizeof a.lane);
}

static inline void vst1q_s64(int64_t *to, int64x2_t a)
{
    memcpy(to, a.lane, sizeof a.lane);
}

static inline int32x4_t vdupq_n_s32(int32_t a)
{
    return (int32x4_t){{a, a, a, a}};
}

static inline int64x2_t vdupq_n_s64(int64_t a)
{
    return (int64x2_t){{a, a}};
}

static inline int32x2_t vget_low_s32(int32x4_t a)
{
    return (int32x2_t){{a.lane[0], a.lane[1]}};
}

static inline int32x2_t vget_high_s32(int32x4_t a)
{
    return (int32x2_t){{a.lane[2], a.lane[3]}};
}

/* Whether n bytes are all zero, n = 4 or 8: tests have few rows, and what is multiplied is mostly padding. */
static inline int emulated_zero(const int8_t *a, size_t n)
{
    uint64_t bits = 0;
    memcpy(&bits, a, n);
    return bits == 0;
}

/* sum + the products of n int8 of a and b, modulo 2^32. */
static inline int32_t emulated_dot(int32_t sum, const int8_t *a, const int8_t *b, size_t n)
{
    int32_t dot = 0;
    for (size_t i = 0; i < n; i++)
        dot += a[i] * b[i];
    return (int32_t)((uint32_t)sum + (uint32_t)dot);
}

/* SMMLA: a and b are matrices of 2 rows of 8; the sums are a times b transposed, 2x2, row by row. */
static inline int32x4_t vmmlaq_s32(int32x4_t sum, int8x16_t a, int8x16_t b)
{
    for (size_t i = 0; i < 2; i++)
        for (size_t j = 0; j < 2 && !emulated_zero(a.lane + 8 * i, 8); j++)
            sum.lane[2 * i + j] = emulated_dot(sum.lane[2 * i + j], a.lane + 8 * i, b.lane + 8 * j, 8);
    return sum;
}

/* SDOT by element: each lane's 4 bytes of a with the 4 bytes of one lane of b. */
static inline int32x4_t vdotq_laneq_s32(int32x4_t sum, int8x16_t a, int8x16_t b, int lane)
{
    const int8_t *by = b.lane + (size_t)lane * 4;
    for (size_t i = 0; i < 4 && !emulated_zero(by, 4); i++)
        sum.lane[i] = emulated_dot(sum.lane[i], a.lane + 4 * i, by, 4);
    return sum;
}

/* SMLAL by element: 2 int32 by one lane of b, products of 64 bits, added modulo 2^64. */
static inline int64x2_t vmlal_laneq_s32(int64x2_t sum, int32x2_t a, int32x4_t b, int lane)
{
    for (size_t i = 0; i < 2; i++)
        sum.lane[i] = (int64_t)((uint64_t)sum.lane[i] + (uint64_t)((int64_t)a.lane[i] * b.lane[lane]));
    return sum;
}

/* SMLAL2 by element: the same of a's upper half. */
static inline int64x2_t vmlal_high_laneq_s32(int64x2_t sum, int32x4_t a, int32x4_t b, int lane)
{
    return vmlal_laneq_s32(sum, vget_high_s32(a), b, lane);
}

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <arm_neon.h>

#include "tests/cpu/emulated/steps.h"

#define WORDS(i) vld1q_s32((const int32_t *)(const void *)in[i])
#define LONGS(i) vld1q_s64((const int64_t *)(const void *)in[i])
#define BYTES(i) vld1q_s8((const int8_t *)(const void *)in[i])
#define SAVE_WORDS(i, x) vst1q_s32((int32_t *)(void *)out[i], x)
#define SAVE_LONGS(i, x) vst1q_s64((int64_t *)(void *)out[i], x)

static void neon_steps(step_words out[STEPS], const step_words in[3])
{
    const int32x4_t a = WORDS(0), b = WORDS(1);
    SAVE_LONGS(0, vmlal_laneq_s32(LONGS(2), vget_low_s32(a), b, 0));
    SAVE_LONGS(1, vmlal_laneq_s32(LONGS(2), vget_high_s32(a), b, 1));
    SAVE_LONGS(2, vmlal_laneq_s32(LONGS(2), vget_low_s32(a), b, 2));
    SAVE_LONGS(3, vmlal_laneq_s32(LONGS(2), vget_low_s32(a), b, 3));
    SAVE_LONGS(4, vmlal_high_laneq_s32(LONGS(2), a, b, 0));
    SAVE_LONGS(5, vmlal_high_laneq_s32(LONGS(2), a, b, 1));
    SAVE_LONGS(6, vmlal_high_laneq_s32(LONGS(2), a, b, 2));
    SAVE_LONGS(7, vmlal_high_laneq_s32(LONGS(2), a, b, 3));
    SAVE_WORDS(8, vdupq_n_s32((int32_t)in[0][0]));
    SAVE_LONGS(9, vdupq_n_s64((int64_t)in[0][1] << 20));
    vst1_s32((int32_t *)(void *)out[10], vget_low_s32(a));
    vst1_s32((int32_t *)(void *)out[11], vget_high_s32(a));
}

__attribute__((target("arch=armv8.2-a+dotprod"))) static void sdot_steps(step_words out[STEPS], const step_words in[3])
{
    SAVE_WORDS(0, vdotq_laneq_s32(WORDS(2), BYTES(0), BYTES(1), 0));
    SAVE_WORDS(1, vdotq_laneq_s32(WORDS(2), BYTES(0), BYTES(1), 1));
    SAVE_WORDS(2, vdotq_laneq_s32(WORDS(2), BYTES(0), BYTES(1), 2));
    SAVE_WORDS(3, vdotq_laneq_s32(WORDS(2), BYTES(0), BYTES(1), 3));
}

__attribute__((target("arch=armv8.2-a+i8mm"))) static void smmla_steps(step_words out[STEPS], const step_words in[3])
{
    SAVE_WORDS(0, vmmlaq_s32(WORDS(2), BYTES(0), BYTES(1)));
}

#define NEON_STEPS                                      \
    {                                                   \
        {"asimd", neon_steps}, {"asimddp", sdot_steps}, \
        {                                               \
            "i8mm", smmla_steps                         \
        }                                               \
    }

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Rotary positions: frequencies, angles and the rotation of a pair; numerics.md, section 4. Scalings are those of
 * transformers' modeling_rope_utils.py, with every operation rounded to fp32 as there; a number divided by a tensor is
 * the tensor's reciprocal times the number. i: the pair, 0..d/2-1; d: number of rotated features. */
#include "anyrank/rope.h"
#include "ref/numerics/elementary.h"

/** fl32(exp(-(2i/d)*log(theta))). */
ARI_FN float ari_rope_inv_freq(double theta, size_t i, size_t d)
{
    return ari_round32(ari_exp64(-(2.0 * (double)i / (double)d) * ari_log64(theta)));
}

/** Returns fl32(x^y) for fp32 x and y: exp(y*log(x)) in binary64. */
ARI_FN float ari_rope_power(float x, float y)
{
    return ari_round32(ari_exp64((double)y * ari_log64((double)x)));
}

/** Returns theta^(2i/d), with fl32 of theta, of the exponent and of the power. */
ARI_FN float ari_rope_wave(double theta, size_t i, size_t d)
{
    return ari_rope_power((float)theta, (float)(2 * i) / (float)d);
}

/** Linear scaling: fl32(inv_freq/factor), divided in binary64. */
ARI_FN float ari_rope_scaled(float inv_freq, double factor)
{
    return ari_round32((double)inv_freq / factor);
}

/** Computes Llama 3's scaling. With wave = (1/f)*2pi, n = original_positions, and low and high the two factors:
 *  f/factor if wave > n/low; f if wave < n/high; otherwise ((1 - t)*f)/factor + t*f with t = ((1/wave)*n - low)/(high -
 *  low). */
ARI_FN float ari_rope_llama3(float f, const ar_rope *r)
{
    const double n = (double)r->original_positions;
    const float low = (float)r->low_freq_factor, factor = (float)r->factor;
    const float wave = (1.0f / f) * 6.28318530717958647693f;
    if (wave > (float)(n / r->low_freq_factor))
        return f / factor;
    if (wave < (float)(n / r->high_freq_factor))
        return f;
    const float ratio = (1.0f / wave) * (float)n;
    const float t = (ratio - low) / (float)(r->high_freq_factor - r->low_freq_factor);
    const float slow = (1.0f - t) * f;
    const float fast = t * f;
    return slow / factor + fast;
}

/** Returns the pair, not rounded to an integer, that makes `turns` turns within original_positions, in binary64:
 *  d*log(n/(turns*2pi)) / (2*log(theta)). */
ARI_FN double ari_rope_pair_of(const ar_rope *r, double turns, size_t d)
{
    const double waves = (double)r->original_positions / (turns * 2.0 * 3.14159265358979311600);
    return ((double)d * ari_log64(waves)) / (2.0 * ari_log64(r->theta));
}

/** Returns a YaRN frequency: pairs below `low` keep f = 1/wave, pairs above `high` have 1/(factor*wave), and a ramp
 *  connects them. low and high are computed in binary64. */
ARI_FN float ari_rope_yarn(const ar_rope *r, size_t i, size_t d)
{
    double low = ari_rope_pair_of(r, r->beta_fast, d), high = ari_rope_pair_of(r, r->beta_slow, d);
    low = r->truncate ? floor(low) : low;
    high = r->truncate ? ceil(high) : high;
    low = low > 0.0 ? low : 0.0;
    high = high < (double)(d - 1) ? high : (double)(d - 1);
    high += low == high ? 0.001 : 0.0;
    const float wave = ari_rope_wave(r->theta, i, d);
    const float slope = ((float)i - (float)low) / (float)(high - low);
    const float ramp = slope < 0.0f ? 0.0f : slope > 1.0f ? 1.0f : slope;
    const float fast_weight = 1.0f - ramp;
    const float slow = 1.0f / ((float)r->factor * wave);
    const float slowed = slow * (1.0f - fast_weight);
    const float fast = (1.0f / wave) * fast_weight;
    return slowed + fast;
}

/** Returns pair i's frequency. If it depends on the length of the sequence, r is the result of ari_rope_at. */
ARI_FN float ari_rope_frequency(const ar_rope *r, size_t i, size_t d)
{
    switch (r->kind) {
    case AR_ROPE_LINEAR:
        return ari_rope_scaled(ari_rope_inv_freq(r->theta, i, d), r->factor);
    case AR_ROPE_LLAMA3:
        return ari_rope_llama3(ari_rope_inv_freq(r->theta, i, d), r);
    case AR_ROPE_DYNAMIC:
        return 1.0f / ari_rope_wave(r->theta, i, d);
    case AR_ROPE_YARN:
        return ari_rope_yarn(r, i, d);
    case AR_ROPE_LONGROPE:
        return 1.0f / (r->short_factor[i] * ari_rope_wave(r->theta, i, d));
    default:
        return ari_rope_inv_freq(r->theta, i, d);
    }
}

/* YaRN's temperature of attention, equation 22, in binary64. */
ARI_FN double ari_rope_mscale(double factor, double mscale)
{
    return factor <= 1.0 ? 1.0 : 0.1 * mscale * ari_log64(factor) + 1.0;
}

/** Factor of cosines and sines: a binary64 number, rounded once. */
ARI_FN float ari_rope_attention(const ar_rope *r)
{
    if (r->kind != AR_ROPE_YARN && r->kind != AR_ROPE_LONGROPE)
        return 1.0f;
    if (r->attention_factor != 0.0)
        return ari_round32(r->attention_factor);
    if (r->kind == AR_ROPE_LONGROPE && r->factor > 1.0)
        return ari_round32(sqrt(1.0 + ari_log64(r->factor) / ari_log64((double)r->original_positions)));
    if (r->kind == AR_ROPE_LONGROPE)
        return 1.0f;
    if (r->mscale != 0.0 && r->mscale_all_dim != 0.0)
        return ari_round32(ari_rope_mscale(r->factor, r->mscale) / ari_rope_mscale(r->factor, r->mscale_all_dim));
    return ari_round32(ari_rope_mscale(r->factor, 1.0));
}

/** fl32(position*inv_freq). */
ARI_FN float ari_rope_angle(size_t position, float inv_freq)
{
    return ari_round32((double)position * (double)inv_freq); /* exact in binary64 below 2^29 */
}

/** Returns fl32(fl32(x1*c) - fl32(x2*s)), with x1 and x2 from the first and second half of the rotated features.
 *  Backward: s negated. */
ARI_FN float ari_rope_first(float x1, float x2, float c, float s)
{
    const float u = x1 * c;
    const float v = x2 * s;
    return ari_canonical32(u - v);
}

/** fl32(fl32(x2*c) + fl32(x1*s)). */
ARI_FN float ari_rope_second(float x1, float x2, float c, float s)
{
    const float u = x2 * c;
    const float v = x1 * s;
    return ari_canonical32(u + v);
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Rotary positions: numerics.md section 4. The scalings are those of transformers' modeling_rope_utils.py, and each
 * step is stored as Hugging Face stores it; a / tensor is (1 / tensor) * a. */
#include "ref/baseline/run.h"

#include <math.h>

#include "ref/numerics/elementary.h"

/* --- frequencies -------------------------------------------------------------------------------------------------- */

/* Applies Llama 3's scaling: keeps the frequencies of short waves, divides those of long waves by a factor, and blends
 * in between. */
static double llama3_frequency(const ari_bl_run *run, double inv_freq)
{
    const ar_rope *o = run->rope;
    const double two_pi = ari_bl_stored(run, 6.283185307179586),
                 context = ari_bl_stored(run, (double)o->original_positions);
    const double longest_kept = ari_bl_stored(run, (double)o->original_positions / o->high_freq_factor);
    const double shortest_slowed = ari_bl_stored(run, (double)o->original_positions / o->low_freq_factor);
    const double wavelength = ari_bl_stored(run, ari_bl_stored(run, 1.0 / inv_freq) * two_pi),
                 factor = ari_bl_stored(run, o->factor);
    const double slowed = ari_bl_stored(run, inv_freq / factor);
    if (wavelength < longest_kept || wavelength > shortest_slowed)
        return wavelength < longest_kept ? inv_freq : slowed;
    const double waves = ari_bl_stored(run, ari_bl_stored(run, 1.0 / wavelength) * context);
    const double smooth = ari_bl_stored(run, ari_bl_stored(run, waves - ari_bl_stored(run, o->low_freq_factor)) /
                                                 ari_bl_stored(run, o->high_freq_factor - o->low_freq_factor));
    const double share = ari_bl_stored(run, ari_bl_stored(run, ari_bl_stored(run, 1.0 - smooth) * inv_freq) / factor);
    return ari_bl_stored(run, share + ari_bl_stored(run, smooth * inv_freq));
}

/* x^y. */
static double power(const ari_bl_run *run, double x, double y)
{
    return ari_bl_stored(run, ari_exp64(ari_bl_stored(run, y) * ari_log64(ari_bl_stored(run, x))));
}

/* Returns a YaRN frequency, which is blended along a ramp over the pairs: from the pair that rotates beta_fast times
 * within the original context to the one that rotates beta_slow times. */
static double yarn_frequency(const ari_bl_run *run, size_t i, size_t d, double wave)
{
    const ar_rope *o = run->rope;
    const double turns[2] = {o->beta_fast, o->beta_slow}, last_dim = (double)d - 1.0;
    double end[2];
    for (int k = 0; k < 2; k++) {
        const double positions_per_radian = (double)o->original_positions / (turns[k] * 2.0 * 3.141592653589793);
        end[k] = ((double)d * ari_log64(positions_per_radian)) / (2.0 * ari_log64(o->theta));
    }
    if (o->truncate) {
        end[0] = floor(end[0]);
        end[1] = ceil(end[1]);
    }
    end[0] = end[0] < 0.0 ? 0.0 : end[0];
    end[1] = end[1] > last_dim ? last_dim : end[1];
    if (end[0] == end[1])
        end[1] += 0.001;
    double ramp = ari_bl_stored(run, ari_bl_stored(run, (double)i - ari_bl_stored(run, end[0])) /
                                         ari_bl_stored(run, end[1] - end[0]));
    ramp = ramp < 0.0 ? 0.0 : ramp > 1.0 ? 1.0 : ramp;
    const double extrapolated = ari_bl_stored(run, 1.0 - ramp);
    const double interpolation = ari_bl_stored(run, 1.0 / ari_bl_stored(run, ari_bl_stored(run, o->factor) * wave));
    const double slowed = ari_bl_stored(run, interpolation * ari_bl_stored(run, 1.0 - extrapolated));
    return ari_bl_stored(run, slowed + ari_bl_stored(run, ari_bl_stored(run, 1.0 / wave) * extrapolated));
}

/* Returns dynamic scaling's theta for a sequence longer than the original context. */
static double dynamic_theta(const ari_bl_run *run, size_t d, size_t length)
{
    const ar_rope *o = run->rope;
    if (length <= o->original_positions)
        return o->theta;
    const double stretched = ari_bl_stored(run, ari_bl_stored(run, o->factor) * (double)length);
    const double ratio = ari_bl_stored(run, stretched / (double)o->original_positions);
    const double base = ari_bl_stored(run, ratio - ari_bl_stored(run, o->factor - 1.0));
    return ari_bl_stored(run, ari_bl_stored(run, o->theta) * power(run, base, (double)d / ((double)d - 2.0)));
}

/* Returns the angle by which pair i of a head rotates per position, in a sequence of some length. */
static double frequency_of(const ari_bl_run *run, size_t i, size_t length)
{
    const ar_rope *o = run->rope;
    const size_t d = ar_rope_dim(o, run->c->head_dim);
    const bool longer = length > o->original_positions;
    const double exponent = 2.0 * (double)i / (double)d;
    const double plain = ari_bl_stored(run, ari_exp64(-exponent * ari_log64(o->theta)));
    const double wave = power(run, o->theta, exponent);
    if (o->kind == AR_ROPE_LINEAR)
        return ari_bl_stored(run, plain / o->factor);
    if (o->kind == AR_ROPE_LLAMA3)
        return llama3_frequency(run, plain);
    if (o->kind == AR_ROPE_YARN)
        return yarn_frequency(run, i, d, wave);
    if (o->kind == AR_ROPE_DYNAMIC)
        return ari_bl_stored(run, 1.0 / power(run, dynamic_theta(run, d, length), exponent));
    if (o->kind == AR_ROPE_LONGROPE)
        return ari_bl_stored(run,
                             1.0 / ari_bl_stored(run, (double)(longer ? o->long_factor : o->short_factor)[i] * wave));
    return plain;
}

/* --- the rotation ------------------------------------------------------------------------------------------------- */

/* Returns 0.1 m log(s) + 1. */
static double mscale(double scale, double m)
{
    return scale > 1.0 ? 0.1 * m * ari_log64(scale) + 1.0 : 1.0;
}

/* Factor of cosines and sines. */
static double attention_factor(const ari_bl_run *run)
{
    const ar_rope *o = run->rope;
    double factor = 1.0;
    if (o->kind != AR_ROPE_YARN && o->kind != AR_ROPE_LONGROPE)
        return factor;
    if (o->attention_factor != 0.0)
        factor = o->attention_factor;
    else if (o->kind == AR_ROPE_LONGROPE && o->factor > 1.0)
        factor = sqrt(1.0 + ari_log64(o->factor) / ari_log64((double)o->original_positions));
    else if (o->kind == AR_ROPE_YARN && o->mscale != 0.0 && o->mscale_all_dim != 0.0)
        factor = mscale(o->factor, o->mscale) / mscale(o->factor, o->mscale_all_dim);
    else if (o->kind == AR_ROPE_YARN)
        factor = mscale(o->factor, 1.0);
    return ari_bl_stored(run, factor);
}

/* The largest position of the batch, and 1. */
static size_t length_of(const ari_bl_run *run)
{
    size_t length = 0;
    for (size_t i = 0; i < run->b * run->s; i++) {
        const size_t position = ari_bl_position(run->batch, i / run->s, i % run->s);
        length = position >= length ? position + 1 : length;
    }
    return length;
}

/* cos and sin of the angle at a position. */
static void turn_pair(const ari_bl_run *run, size_t position, double frequency, double factor, double *cosine,
                      double *sine)
{
    const double exact = (double)position * frequency;
    if (run->o->mode == AR_MODE_F64) {
        *cosine = ari_bl_fl(run, ari_cos64(ari_bl_fl(run, exact)));
        *sine = ari_bl_fl(run, ari_sin64(ari_bl_fl(run, exact)));
    } else {
        const float angle = (float)exact;
        *cosine = (double)ari_cos32(angle);
        *sine = (double)ari_sin32(angle);
    }
    if (factor != 1.0) {
        *cosine = ari_bl_fl(run, *cosine * factor);
        *sine = ari_bl_fl(run, *sine * factor);
    }
}

/* Reorders a head's rotating features from pairs (0, 1), (2, 3), .. to all even ones followed by all odd ones, or
 * back. */
static void part_pairs(double *x, double *work, size_t half, bool is_split)
{
    for (size_t i = 0; i < half; i++) {
        work[is_split ? i : 2 * i] = x[is_split ? 2 * i : i];
        work[is_split ? half + i : 2 * i + 1] = x[is_split ? 2 * i + 1 : half + i];
    }
    for (size_t i = 0; i < 2 * half; i++)
        x[i] = work[i];
}

/* Computes y1 = x1*cos - x2*sin, y2 = x2*cos + x1*sin; features before or after the rotating ones are unchanged.
 * Interleaved features are rotated as halves, and stay in that order in between. */
void ari_bl_rotate(ari_bl_run *run, double *x, size_t heads, double direction)
{
    ARI_BL_SCOPE(run);
    const size_t d = run->c->head_dim, half = ar_rope_dim(run->rope, d) / 2, length = length_of(run);
    const size_t first_feature = run->rope->last ? d - 2 * half : 0;
    const double factor = attention_factor(run);
    double *work = run->rope->interleaved ? ari_bl_doubles(run, 2 * half, 1) : NULL;
    if (run->rope->interleaved && work == NULL)
        return;
    for (size_t row = 0; work != NULL && direction > 0.0 && row < run->b * heads * run->s; row++)
        part_pairs(x + row * d + first_feature, work, half, true);
    for (size_t t = 0; t < run->s; t++)
        for (size_t i = 0; i < half; i++) {
            const double frequency = frequency_of(run, i, length);
            double cosine = 0.0, sine = 0.0;
            for (size_t head = 0, last_position = SIZE_MAX; head < run->b * heads; head++) {
                const size_t position = ari_bl_position(run->batch, head / heads, t);
                if (position != last_position) {
                    turn_pair(run, position, frequency, factor, &cosine, &sine);
                    sine *= direction;
                    last_position = position;
                }
                double *row = x + (head * run->s + t) * d + first_feature;
                const double x1 = row[i], x2 = row[half + i];
                row[i] = ari_bl_keep(
                    run, ari_bl_branch(run, ari_bl_branch(run, x1 * cosine) - ari_bl_branch(run, x2 * sine)));
                row[half + i] = ari_bl_keep(
                    run, ari_bl_branch(run, ari_bl_branch(run, x2 * cosine) + ari_bl_branch(run, x1 * sine)));
            }
        }
    for (size_t row = 0; work != NULL && direction < 0.0 && row < run->b * heads * run->s; row++)
        part_pairs(x + row * d + first_feature, work, half, false);
}

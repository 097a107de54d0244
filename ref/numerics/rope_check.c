/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/numerics/rope_check.h"

#include <string.h>

#include "ref/numerics/rope.h"

/* Angle from which on sine and cosine of the shared header have no guarantee. */
#define ANGLE_LIMIT 1048576.0f

/* --- what a rotation may say -------------------------------------------------------------------------------------- */

static ar_status check_dim(size_t head_dim, const ar_rope *r)
{
    const size_t d = ar_rope_dim(r, head_dim);
    if (head_dim % 2 != 0 && r->rotary_dim == 0)
        return ar_error_set(AR_ERR_ARG, "rope_tables: head size %zu is odd, expected an even one", head_dim);
    if (d % 2 != 0 || d > head_dim)
        return ar_error_set(AR_ERR_ARG, "rope_tables: %zu of %zu features of a head turn, expected an even number", d,
                            head_dim);
    return AR_OK;
}

static ar_status check_positive(const char *label, double x)
{
    return x > 0.0 && isfinite(x)
               ? AR_OK
               : ar_error_set(AR_ERR_ARG, "rope_tables: %s %g, expected a positive number", label, x);
}

static ar_status check_original(const ar_rope *r)
{
    return r->original_positions > 0
               ? AR_OK
               : ar_error_set(AR_ERR_ARG, "rope_tables: 0 original positions, expected at least 1");
}

static ar_status check_llama3(const ar_rope *r)
{
    AR_TRY(check_original(r));
    if (!(r->low_freq_factor > 0.0 && r->high_freq_factor > r->low_freq_factor))
        return ar_error_set(AR_ERR_ARG,
                            "rope_tables: low_freq_factor %g and high_freq_factor %g, expected positive numbers, the "
                            "second above the first",
                            r->low_freq_factor, r->high_freq_factor);
    return AR_OK;
}

static ar_status check_yarn(const ar_rope *r)
{
    AR_TRY(check_original(r));
    AR_TRY(check_positive("attention_factor", (double)ari_rope_attention(r)));
    if (!(r->beta_slow > 0.0 && r->beta_fast >= r->beta_slow && isfinite(r->beta_fast)))
        return ar_error_set(AR_ERR_ARG,
                            "rope_tables: beta_fast %g and beta_slow %g, expected positive numbers, the first not "
                            "below the second",
                            r->beta_fast, r->beta_slow);
    return r->theta > 1.0 ? AR_OK
                          : ar_error_set(AR_ERR_ARG, "rope_tables: yarn with theta %g, expected more than 1", r->theta);
}

static ar_status check_longrope(const ar_rope *r, size_t pairs)
{
    AR_TRY(check_original(r));
    AR_TRY(check_positive("attention_factor", (double)ari_rope_attention(r)));
    if (pairs > AR_ROPE_PAIRS)
        return ar_error_set(AR_ERR_ARG, "rope_tables: longrope of %zu pairs, supported are %d", pairs, AR_ROPE_PAIRS);
    for (size_t i = 0; i < pairs; i++) {
        AR_TRY(check_positive("short_factor", (double)r->short_factor[i]));
        AR_TRY(check_positive("long_factor", (double)r->long_factor[i]));
    }
    return AR_OK;
}

static ar_status check_kind(size_t d, const ar_rope *r)
{
    AR_TRY(check_positive("theta", r->theta));
    AR_TRY(r->kind > AR_ROPE_DEFAULT ? check_positive("factor", r->factor) : AR_OK);
    if (r->kind == AR_ROPE_DYNAMIC && d <= 2)
        return ar_error_set(AR_ERR_ARG, "rope_tables: dynamic with %zu features that turn, expected more than 2", d);
    switch (r->kind) {
    case AR_ROPE_DYNAMIC:
        return check_original(r);
    case AR_ROPE_YARN:
        return check_yarn(r);
    case AR_ROPE_LLAMA3:
        return check_llama3(r);
    case AR_ROPE_LONGROPE:
        return check_longrope(r, d / 2);
    default:
        return AR_OK;
    }
}

ar_status ari_rope_check(size_t positions, size_t head_dim, const ar_rope *rope)
{
    const size_t d = ar_rope_dim(rope, head_dim);
    AR_TRY(check_dim(head_dim, rope));
    AR_TRY(check_kind(d, rope));
    for (size_t i = 0; positions > 0 && i < d / 2; i++) {
        const float inv_freq = ari_rope_frequency(rope, i, d);
        const float largest = ari_rope_angle(positions - 1, inv_freq);
        if (!(largest < ANGLE_LIMIT))
            return ar_error_set(AR_ERR_ARG,
                                "rope_tables: the angle of position %zu, pair %zu is %g, expected below 2^20",
                                positions - 1, i, (double)largest);
    }
    return AR_OK;
}

/* --- by the length of a sequence ---------------------------------------------------------------------------------- */

size_t ari_rope_length(const ar_rope *rope, size_t length)
{
    const bool longer = length > rope->original_positions;
    if (rope->kind == AR_ROPE_DYNAMIC && longer)
        return length;
    return rope->kind == AR_ROPE_LONGROPE && longer ? 1 : 0;
}

/* theta*(factor*length/n - (factor - 1))^(d/(d - 2)), every operation rounded to fp32. */
static double dynamic_theta(const ar_rope *r, size_t length, size_t d)
{
    const float stretched = (float)r->factor * (float)length / (float)r->original_positions;
    const float grown = stretched - (float)(r->factor - 1.0);
    return (double)((float)r->theta * ari_rope_power(grown, (float)((double)d / (double)(d - 2))));
}

ar_rope ari_rope_at(const ar_rope *rope, size_t length, size_t head_dim)
{
    ar_rope adjusted_rope = *rope;
    if (ari_rope_length(rope, length) == 0)
        return adjusted_rope;
    if (rope->kind == AR_ROPE_DYNAMIC)
        adjusted_rope.theta = dynamic_theta(rope, length, ar_rope_dim(rope, head_dim));
    else
        memcpy(adjusted_rope.short_factor, rope->long_factor, sizeof adjusted_rope.short_factor);
    return adjusted_rope;
}

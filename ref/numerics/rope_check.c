/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/numerics/rope_check.h"

#include "ref/numerics/scalar.h"

/* From this angle on the shared header's sine and cosine promise nothing. */
#define ANGLE_LIMIT 1048576.0f

ar_status ari_rope_check(size_t positions, size_t head_dim, double theta, double factor, const ar_rope_llama3 *llama3)
{
    if (head_dim % 2 != 0)
        return ar_error_set(AR_ERR_ARG, "rope_tables: head size %zu is odd, expected an even one", head_dim);
    if (!(factor > 0.0) || !(theta > 0.0))
        return ar_error_set(AR_ERR_ARG, "rope_tables: theta %g and factor %g, expected positive numbers", theta,
                            factor);
    if (llama3 && llama3->original_positions > 0 &&
        !(llama3->factor > 0.0 && llama3->low_freq_factor > 0.0 && llama3->high_freq_factor > llama3->low_freq_factor))
        return ar_error_set(AR_ERR_ARG,
                            "rope_tables: factor %g, low_freq_factor %g and high_freq_factor %g, expected positive "
                            "numbers, the third above the second",
                            llama3->factor, llama3->low_freq_factor, llama3->high_freq_factor);
    for (size_t i = 0; positions > 0 && i < head_dim / 2; i++) {
        const float inv_freq = ari_rope_frequency(theta, factor, llama3, i, head_dim);
        const float largest = ari_rope_angle(positions - 1, inv_freq);
        if (!(largest < ANGLE_LIMIT))
            return ar_error_set(AR_ERR_ARG,
                                "rope_tables: the angle of position %zu, pair %zu is %g, expected below 2^20",
                                positions - 1, i, (double)largest);
    }
    return AR_OK;
}

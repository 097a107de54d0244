/* SPDX-License-Identifier: Apache-2.0 */
#include "run/positions.h"

#include "ref/numerics/scalar.h"

#define ANGLE_LIMIT 1048576.0f /* 2^20 */

ar_status ari_check_angles(const ar_config *c, size_t seq)
{
    if (!c->rope || seq == 0)
        return AR_OK;
    /* Frequencies fall with the pair's number, or rise where theta is below 1: the largest is the first or the last. */
    const size_t pair[2] = {0, c->head_dim / 2 - 1};
    for (int i = 0; i < 2; i++) {
        const float inv_freq = ari_rope_frequency(c->rope_theta, c->rope_factor, &c->rope_llama3, pair[i], c->head_dim);
        const float angle = ari_rope_angle(seq - 1, inv_freq);
        if (!(angle < ANGLE_LIMIT))
            return ar_error_set(AR_ERR_CONFIG,
                                "%s: rope_theta %g gives position %zu the angle %g, expected below 2^20; take a larger "
                                "rope_theta or a shorter sequence",
                                c->name, c->rope_theta, seq - 1, (double)angle);
    }
    return AR_OK;
}
